package cli

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event/contracts"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/upstreams"
)

func (p Process) contractsWriteCommand() *cobra.Command {
	var builtIn bool
	c := p.command(command{
		use:   "write DIR",
		short: "Write the contracts of the kinds and upstreams in force into a directory",
		long: `Write creates asyncapi.json, and schemas/TYPE.json for each event type and version. It replaces
files of these names, and removes schemas of types that no longer exist. The API serves the same
documents at /v1/asyncapi.json and /v1/schemas/TYPE. Like the binaries, the command reads the names
of streams and subjects from NATS_STREAM, NATS_SUBJECT_PREFIX, NATS_LIVE_PREFIX and
NATS_LIVE_OBJECTS, and ce-source from EVENT_SOURCE.`,
		args: exactArgs(1), needs: needServers,
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			set, external := kinds.Builtin(), []upstreams.Upstream(nil)
			if !builtIn {
				y, err := s.open(ctx, s.data, "kinds", needTruth|orOutbox)
				if err != nil {
					return nil, err
				}
				defer y.close()
				if y.OutboxAlone {
					set = &kinds.Set{}
				} else if set, err = truthKinds(ctx, y.Truth); err != nil {
					return nil, err
				}
				if external, err = declared.List(ctx, y.Truth); err != nil {
					return nil, err
				}
			}
			cfg, err := p.naming(ctx)
			if err != nil {
				return nil, err
			}
			n, err := writeContracts(args[0], set, external, contracts.Names{Stream: cfg.Stream, Prefix: cfg.Prefix, Live: cfg.LivePrefix,
				Source: cfg.Source, Objects: cfg.LiveObjects})
			if err != nil {
				return nil, err
			}
			return reports(nil, sentence("%d files in %s.\n", n, args[0])), nil
		},
	})
	c.Flags().BoolVar(&builtIn, "built-in", false, "only the built-in kinds, which needs no database")
	return c
}

// writeContracts writes the contracts of the kinds and upstreams into dir, and returns the number
// of files.
func writeContracts(dir string, set *kinds.Set, declared []upstreams.Upstream, in contracts.Names) (int, error) {
	files, err := contracts.Files(set, declared, in)
	if err != nil {
		return 0, err
	}
	if err := os.MkdirAll(filepath.Join(dir, "schemas"), 0o755); err != nil {
		return 0, fmt.Errorf("create a directory for the contracts: %w", err)
	}
	old, err := filepath.Glob(filepath.Join(dir, "schemas", "*.v*.json"))
	if err != nil {
		return 0, fmt.Errorf("find earlier contracts in %s: %w", dir, err)
	}
	for _, path := range old {
		if files["schemas/"+filepath.Base(path)] == nil {
			if err := os.Remove(path); err != nil {
				return 0, fmt.Errorf("remove the contract of a type that no longer exists: %w", err)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := os.WriteFile(filepath.Join(dir, filepath.FromSlash(name)), files[name], 0o644); err != nil {
			return 0, fmt.Errorf("write a contract: %w", err)
		}
	}
	return len(files), nil
}
