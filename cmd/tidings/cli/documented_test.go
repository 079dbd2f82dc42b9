package cli

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"
)

// TestEveryCommandThatADocumentNamesExists reads commands in code of all pages: the command exists,
// has each flag, wants as many arguments, and gets the flags that it requires.
func TestEveryCommandThatADocumentNamesExists(t *testing.T) {
	code := regexp.MustCompile("`(?:bin/)?tidings ([a-z][^`\n]*)`|(?m:^(?:\\$ )?(?:bin/)?tidings ([a-z].*)$)")
	seen := 0
	err := filepath.WalkDir("../../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "node_modules") {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, ".md") || d.Name() == "commands.md" || d.Name() == "CHANGELOG.md" {
			return nil
		}
		text, err := os.ReadFile(path)
		for _, m := range code.FindAllStringSubmatch(string(text), -1) {
			seen++
			line, _, _ := strings.Cut(m[1]+m[2], " #")
			if problem := undocumented(line); problem != "" {
				t.Errorf("%s: `tidings %s`: %s", path, line, problem)
			}
		}
		return err
	})
	if err != nil || seen < 300 {
		t.Errorf("%d commands were read, %v", seen, err)
	}
}

var (
	quoted   = regexp.MustCompile(`"[^"]*"|'[^']*'`)
	optional = regexp.MustCompile(`\[[^\]]*\]|\([^)]*\)|\{[^}]*\}`) // of a use line: what a caller may leave out, or choose
)

// undocumented says what is wrong with a command line of a document, in which words in capitals
// stand for values; "" for nothing.
func undocumented(line string) string {
	abridged := strings.Contains(line, "...")
	line = regexp.MustCompile(`[\[\](){}]|\.\.\.|…|>.*$|&.*$`).ReplaceAllString(quoted.ReplaceAllString(line, "VALUE"), " ")
	words := strings.Fields(line)
	p := Process{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard, Env: envconfig.MapLookuper(nil)}
	c, rest, err := p.commands().Find(words)
	if err != nil {
		return err.Error()
	}
	if c.HasSubCommands() && len(rest) > 0 && !strings.HasPrefix(rest[0], "-") && c.Name() != "help" {
		return "there is no such command below " + c.CommandPath()
	}
	for _, word := range rest {
		name, _, _ := strings.Cut(strings.TrimPrefix(word, "--"), "=")
		if strings.HasPrefix(word, "--") && c.Flags().Lookup(name) == nil && name != "help" && name != "version" {
			return "it has no flag " + word
		}
	}
	if name := missing(c, rest); name != "" && !abridged {
		return "it lacks " + name
	}
	return tooMany(c, rest)
}

// missing returns a flag that the command's use line requires and the line lacks. A line without
// values only names the command and its flags.
func missing(c *cobra.Command, rest []string) string {
	if !slices.ContainsFunc(rest, func(word string) bool { return !strings.HasPrefix(word, "-") }) {
		return ""
	}
	for _, name := range regexp.MustCompile(`--[a-z-]+`).FindAllString(optional.ReplaceAllString(c.Use, ""), -1) {
		if !slices.ContainsFunc(rest, func(word string) bool { return strings.HasPrefix(word+"=", name+"=") }) {
			return name
		}
	}
	return ""
}

// tooMany says when a command that takes no arguments gets one.
func tooMany(c *cobra.Command, rest []string) string {
	if c.Args == nil || c.HasSubCommands() || c.Args(c, []string{"x"}) == nil {
		return ""
	}
	value := false // the word before is a flag that wants a value
	for _, word := range rest {
		switch {
		case strings.HasPrefix(word, "--"):
			name, _, given := strings.Cut(strings.TrimPrefix(word, "--"), "=")
			f := c.Flags().Lookup(name)
			value = !given && f != nil && f.NoOptDefVal == ""
		case value || word == "|":
			value = false
		default:
			if c.Args(c, []string{word, word}) != nil && c.Args(c, []string{word}) != nil {
				return "it takes no argument " + word
			}
		}
	}
	return ""
}
