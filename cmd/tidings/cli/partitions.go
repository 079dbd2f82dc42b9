package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

// partitionRows returns the rows of a table of partitions, closed ones too if closed is set.
func partitionRows(all []status.Partition, closed bool) [][]string {
	rows := [][]string{{"PARTITION", "STREAM", "SLOTS", "STATE", "MESSAGES", "TAIL", "LAST", "LEADER", "CURRENT REPLICAS", "RELAY"}}
	for _, p := range all {
		if p.State == status.Closed && !closed {
			continue
		}
		state, replicas := p.State, fmt.Sprintf("%d of %d", p.Current, p.Replicas)
		held, last, tail, holder := count(int64(p.Messages)), count(int64(p.LastSeq)), count(int64(p.Tail)), orDefault(p.Relay, "-")
		switch {
		case p.Unknown == status.ServerNATS:
			held, last, replicas = "unknown", "unknown", "unknown"
		case p.Unknown != "":
			tail, holder = "unknown", "unknown"
		case p.Condition() == status.Refused:
			state = "REFUSED"
		case p.Condition() == status.NoLeader:
			state, replicas = "NO LEADER", "unknown"
		case p.Replicas == 0:
			replicas = "no stream"
		}
		rows = append(rows, []string{fmt.Sprint(p.Partition), p.Stream, fmt.Sprintf("%d-%d", p.FirstSlot, p.LastSlot), state, held, tail,
			last, orDefault(p.Leader, "-"), replicas, holder})
	}
	return rows
}

func orDefault(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

func (p Process) partitionsListCommand() *cobra.Command {
	var all bool
	c := p.command(command{
		use: "list", short: "Show each partition, its slots and its stream",
		name: "partitions", needs: needAll | orOutbox, json: onePer("partition"),
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			st, err := status.Await(ctx, s.Sources, status.Patience, status.State.Seen)
			if err != nil {
				return nil, err
			}
			if st.IsUnread(status.PartPartitions) {
				return nil, errors.New(strings.Join(notes(st), "\n"))
			}
			shown := slices.DeleteFunc(slices.Clone(st.Partitions), func(p status.Partition) bool {
				return p.State == status.Closed && !all
			})
			return lists(shown, rowsOf(partitionRows(shown, true)...)), nil
		},
	})
	c.Flags().BoolVar(&all, "all", false, "show closed partitions too")
	return c
}

func (p Process) partitionsResizeCommand() *cobra.Command {
	var (
		to   int
		wait time.Duration
	)
	c := p.command(command{
		use:   "resize --to N",
		short: "Change the number of partitions",
		long: `Resize replaces the open partitions by new ones, which share the slots evenly. The relays finish
their current batches on the old streams, close these, and open the new ones. The consumers read
each old stream to its end before they start its successors. Writers do not wait, and no event
overtakes another of its aggregate. Old streams remain until you remove them.

The number of partitions is 1, 2, 4, 8, 16 or 32. More partitions let more relays and more instances
of a consumer work at once. You cannot undo a resize, and the next one cannot start before it has
ended.`,
		name: "partitions", needs: needAll | orOutbox, destructive: true,
		check: func(*session, []string) error {
			if to < 1 || to > 32 || to&(to-1) != 0 {
				return &usageError{fmt.Errorf("--to is %d: want 1, 2, 4, 8, 16 or 32", to)}
			}
			if wait < 0 {
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", wait)}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			known, err := outbox.Partitions(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			now := len(slices.DeleteFunc(outbox.Active(known), func(a outbox.Partition) bool { return a.Closing }))
			if now != to {
				if err := s.ask(textLines(fmt.Sprintf("There %s now. The relays close their streams, and open %d new ones.",
					thereAre(now, "partition"), to), "You cannot undo a resize.")); err != nil {
					return nil, err
				}
			}
			return nil, s.resize(ctx, s.system, to, wait)
		},
	})
	c.Flags().IntVar(&to, "to", 0, "the number of partitions")
	c.Flags().DurationVar(&wait, "wait", time.Minute, "how long to wait for the end of the resize; 0 to return at once. "+
		"After this time the exit code is 1, and the resize continues by itself")
	return c
}

// resize begins a resize, and shows its progress until it has ended or wait has passed.
func (p Process) resize(ctx context.Context, y *system, to int, wait time.Duration) error {
	added, err := outbox.Resize(ctx, y.Truth, to)
	if errors.Is(err, outbox.ErrResizing) {
		return fmt.Errorf("%w: nothing was changed; `tidings partitions list` shows the progress of the earlier resize", err)
	}
	if err != nil {
		return err
	}
	if len(added) == 0 {
		_, err := fmt.Fprintf(p.Stdout, "There %s already. Nothing was changed.\n", thereAre(to, "partition"))
		return err
	}
	for _, a := range added {
		fmt.Fprintf(p.Stdout, "Partition %d (%s) takes slots %d-%d and replaces %s.\n", a.Number, y.Broker.StreamName(a.Number),
			a.FirstSlot, a.LastSlot, words.Partitions(a.After))
	}
	last, deadline := "", time.Now().Add(wait)
	for {
		line, done, err := y.resized(ctx)
		if err != nil && !broker.IsTransient(err) {
			return err
		}
		if err == nil && line != last {
			fmt.Fprintln(p.Stdout, line)
			last = line
		}
		if done {
			return nil
		}
		if wait == 0 {
			_, err := fmt.Fprintln(p.Stdout, "The relays continue the resize: `tidings partitions list` shows the progress.")
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the resize has not ended within %s; it continues by itself, and `tidings partitions list` "+
				"shows the progress", wait)
		}
		if err := work.Sleep(ctx, status.AwaitEvery); err != nil {
			return err
		}
	}
}

// resized returns a line about the progress of a resize. done is true once all open partitions have
// streams and publish.
func (y *system) resized(ctx context.Context) (line string, done bool, err error) {
	all, err := status.Partitions(ctx, y.Sources)
	if err != nil {
		return "", false, err
	}
	var closing, waiting, opening, open []int
	var trouble []string
	for _, p := range all {
		switch {
		case p.State == status.Closed:
			continue
		case p.State == status.Closing:
			closing = append(closing, p.Partition)
		case p.State == status.Waiting:
			waiting = append(waiting, p.Partition)
		case p.Replicas == 0:
			opening = append(opening, p.Partition)
		default:
			open = append(open, p.Partition)
		}
		if p.Refused+p.NoLeader != "" {
			trouble = append(trouble, p.Refused+p.NoLeader)
		}
	}
	var parts []string
	for _, part := range []struct {
		numbers   []int
		one, many string
	}{{closing, "is closing", "are closing"}, {waiting, "waits for the closing ones", "wait for the closing ones"},
		{opening, "is opening", "are opening"}, {open, "is open", "are open"}} {
		if len(part.numbers) > 0 {
			verb := part.many
			if len(part.numbers) == 1 {
				verb = part.one
			}
			text := words.Partitions(part.numbers)
			parts = append(parts, strings.ToUpper(text[:1])+text[1:]+" "+verb)
		}
	}
	line = strings.Join(append(parts, trouble...), ". ") + "."
	return line, len(closing)+len(waiting)+len(opening)+len(trouble) == 0, nil
}

func thereAre(n int, noun string) string {
	if n == 1 {
		return "is 1 " + noun
	}
	return fmt.Sprintf("are %d %ss", n, noun)
}
