package cli

import (
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// eachCommand calls fn for every command that can be run.
func eachCommand(fn func(path string, c *cobra.Command)) {
	p := Process{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard, Env: envconfig.MapLookuper(nil)}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if path, ok := strings.CutPrefix(c.CommandPath(), "tidings "); ok && !c.HasSubCommands() && c.Name() != "help" {
			fn(path, c)
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(p.commands())
}

// withoutJSON are the commands without --json: their output is for people, or is a file.
var withoutJSON = map[string]string{
	"dev":             "runs until it is stopped",
	"serve":           "runs until it is stopped",
	"stream plan":     "prints files for other programs",
	"upstream show":   "prints a file of an upstream",
	"consume":         "runs until it is stopped",
	"contracts write": "writes files",
	"kinds show":      "prints a file of kinds",
	"nats account":    "writes files",
	"nats creds":      "writes a file",
	"nats revoke":     "writes a file",
	"nats durable":    "says in a sentence what it did",
	"nats users":      "prints a part of NATS' configuration",
	"ready":           "answers with its exit code",

	"archive hold add":     "says in a sentence what it did",
	"archive hold release": "likewise",
	"outbox kill":          "likewise",
	"outbox retry":         "likewise",
	"partitions resize":    "likewise",
	"stream configure":     "likewise",
}

func TestEveryCommandThatShowsSomethingHasJSON(t *testing.T) {
	seen := map[string]bool{}
	eachCommand(func(path string, c *cobra.Command) {
		seen[path] = true
		switch has := c.Flags().Lookup("json") != nil; {
		case strings.HasPrefix(path, "bench "):
		case has && withoutJSON[path] != "":
			t.Errorf("%s has --json: take it out of the list", path)
		case !has && withoutJSON[path] == "":
			t.Errorf("%s: %q has no --json", path, c.Short)
		}
	})
	for path := range withoutJSON {
		if !seen[path] {
			t.Errorf("there is no %s", path)
		}
	}
}

// flagWords are the flags that several commands have, with their type and a pattern of their usage.
var flagWords = map[string]struct{ kind, usage string }{
	"actor":    {"string", `^the actor to record \(default: the user of this system\)$`},
	"consumer": {"string", `^(the consumer|only of this consumer)(: .*)?$`},
	"data":     {"string", "^the (data )?`directory` of "},
	"dry-run":  {"bool", `^(with --repair: )?show what the command would do, and change nothing$`},
	"json":     {"bool", `^print (one JSON object|JSON objects, one per)`},
	"kind":     {"string", "^(the|only of this) `kind`"},
	"limit":    {"int", `^(list )?at most this many \w+`},
	"month":    {"string", "`month`, such as 2026-08"},
	"reason":   {"string", `^the reason to record$`},
	"since": {"string", `^(only [\w ]+ since then|when the oldest restored backup was made): a duration ago such as 24h, ` +
		`a date, or a time in RFC 3339$`},
	"tenant": {"int64", `^(the tenant|only of this tenant)$`},
	"until":  {"string", `^only [\w ]+ from before then, in the same forms$`},
	"wait":   {"duration", `^how long to wait for `},
	"yes":    {"bool", `^do not ask for confirmation$`},
}

// synonyms are names that other programs use for our flags.
var synonyms = regexp.MustCompile(
	`^(older-than|newer-than|before|after|start|end|tenants?-id|account|count|max|top|force|no-confirm|assume-yes|consumer-name|` +
		`why|comment|message|preview|simulate|user|by|format|output|timeout)$`)

func TestTheSameFlagHasTheSameWordsEverywhere(t *testing.T) {
	used := map[string]int{}
	eachCommand(func(path string, c *cobra.Command) {
		if strings.HasPrefix(path, "bench ") {
			return // bench has flags of its own
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			used[f.Name]++
			if synonyms.MatchString(f.Name) {
				t.Errorf("%s --%s: another word of ours says that", path, f.Name)
			}
			want, ok := flagWords[f.Name]
			kind := f.Value.Type()
			if kind == "stringSlice" && strings.Contains(f.Usage, "; repeatable (default: every ") {
				kind, want.usage = "string", "^only " // a list of what the flag is elsewhere
			}
			if ok && (kind != want.kind || !regexp.MustCompile(want.usage).MatchString(f.Usage)) {
				t.Errorf("%s --%s is a %s: %q; want a %s that says %s", path, f.Name, f.Value.Type(), f.Usage, want.kind, want.usage)
			}
		})
	})
	for name := range flagWords {
		if used[name] == 0 {
			t.Errorf("no command has --%s", name)
		}
	}
	if names := []string{"tenant", "json", "reason"}; slices.ContainsFunc(names, func(n string) bool { return used[n] < 5 }) {
		t.Errorf("%v", used)
	}
}
