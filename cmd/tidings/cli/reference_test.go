package cli

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestTheCommandsPageIsWhatTheCommandsSay compares docs/commands.md with the help of every command.
// -update writes it.
func TestTheCommandsPageIsWhatTheCommandsSay(t *testing.T) {
	const page = "../../../docs/commands.md"
	var b strings.Builder
	b.WriteString("# Commands\n\nEvery command of `tidings`, as `tidings help COMMAND` shows it.\n`go test ./cmd/tidings/cli -run " +
		"TestTheCommandsPage -update` generates this page.\n\n" +
		exitCodes + "\n\n" +
		"| command | purpose |\n|---|---|\n")
	eachCommand(func(path string, c *cobra.Command) {
		if !c.Hidden {
			fmt.Fprintf(&b, "| [%s](#tidings-%s) | %s |\n", path, strings.ReplaceAll(path, " ", "-"), tableCell(c.Short))
		}
	})
	eachCommand(func(path string, c *cobra.Command) {
		if !c.Hidden {
			describeCommand(&b, path, c)
		}
	})
	want := b.String()
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile(page); err != nil || string(have) != want {
		t.Errorf("docs/commands.md is not what the commands say (%v): run this test with -update", err)
	}
}

// describeCommand writes the section of one command: its purpose, its usage, its flags.
func describeCommand(b *strings.Builder, path string, c *cobra.Command) {
	fmt.Fprintf(b, "\n## tidings %s\n%s.\n\n```\n%s\n```\n", path, c.Short, c.UseLine())
	if c.Long != "" {
		fmt.Fprintf(b, "\n%s\n", strings.ReplaceAll(c.Long, "<", "&lt;"))
	}
	var rows strings.Builder
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		name, usage := pflag.UnquoteUsage(f)
		if value := f.DefValue; value != "" && value != "false" && value != "0" && value != "[]" && value != "0s" {
			usage += " (default " + value + ")"
		}
		fmt.Fprintf(&rows, "| `%s` | %s |\n", strings.TrimSpace("--"+f.Name+" "+name), tableCell(usage))
	})
	if rows.Len() > 0 {
		fmt.Fprintf(b, "\n| flag | meaning |\n|---|---|\n%s", rows.String())
	}
}

// tableCell escapes text for a cell of a table.
func tableCell(text string) string {
	return strings.NewReplacer("|", `\|`, "\n", " ", "<", "&lt;").Replace(text)
}
