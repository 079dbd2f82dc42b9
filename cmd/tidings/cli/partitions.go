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
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// States of a partition.
const (
	stateOpen    = "open"    // relays publish to it
	stateClosing = "closing" // its relay finishes what it has in hand, and closes the stream
	stateClosed  = "closed"
	stateWaiting = "waiting" // for the partitions whose slots it takes over to close
	stateUnknown = "unknown" // PostgreSQL is away
)

// partitionState is a partition and its stream, as `tidings status --json` and `tidings partitions list --json` print them.
type partitionState struct {
	Partition int    `json:"partition"`
	Stream    string `json:"stream"`
	FirstSlot int    `json:"first_slot"`
	LastSlot  int    `json:"last_slot"`
	After     []int  `json:"after,omitempty"` // whose slots it took over
	State     string `json:"state"`
	Tail      uint64 `json:"tail"`      // the last sequence that the outbox's marks cover
	FirstSeq  uint64 `json:"first_seq"` // of the stream, as are the following
	LastSeq   uint64 `json:"last_seq"`
	Messages  uint64 `json:"messages"`
	Leader    string `json:"leader,omitempty"` // a server's name; empty where there is no cluster
	Replicas  int    `json:"replicas"`
	Current   int    `json:"current_replicas"`    // that have all that the leader has
	Relay     string `json:"relay,omitempty"`     // that holds its lease
	Refused   string `json:"refused,omitempty"`   // why no relay publishes to it, and what to run
	NoLeader  string `json:"no_leader,omitempty"` // why nothing is known of the stream now
	Unknown   string `json:"unknown,omitempty"`   // the server that is away: what it would say is not known
}

// partitions compares the partitions with their streams. While one of the servers is away it says what the other one knows.
func (y *system) partitions(ctx context.Context) ([]partitionState, error) {
	switch {
	case y.truth == nil && y.js == nil:
		return nil, nil
	case y.js == nil:
		return y.partitionsAlone(ctx)
	case y.truth == nil:
		return y.streamsAlone(ctx)
	}
	checks, err := relay.Check(ctx, y.truth, y.js, y.broker)
	if err != nil {
		return nil, err
	}
	all := make([]partitionState, len(checks))
	for i, c := range checks {
		all[i] = partitionState{Partition: c.Number, Stream: y.broker.StreamName(c.Number), FirstSlot: c.FirstSlot, LastSlot: c.LastSlot, After: c.After,
			State: stateOf(c.Partition, c.Active), Tail: c.Tail}
		if s := c.Stream; s != nil {
			all[i].FirstSeq, all[i].LastSeq, all[i].Messages = s.First, s.Last, s.Messages
			all[i].Leader, all[i].Replicas, all[i].Current = s.Leader, s.Replicas, s.Current
		}
		switch {
		case errors.Is(c.Err, relay.ErrStreamRefused):
			all[i].Refused = daemon.Plain(c.Err)
		case c.Err != nil:
			all[i].NoLeader = daemon.Plain(c.Err)
		}
	}
	return all, nil
}

// partitionsAlone is what PostgreSQL knows of the partitions.
func (y *system) partitionsAlone(ctx context.Context) (all []partitionState, err error) {
	known, err := outbox.Partitions(ctx, y.truth)
	if err != nil {
		return nil, err
	}
	active := outbox.Active(known)
	for _, p := range known {
		is := slices.ContainsFunc(active, func(a outbox.Partition) bool { return a.Number == p.Number })
		all = append(all, partitionState{Partition: p.Number, Stream: y.broker.StreamName(p.Number), FirstSlot: p.FirstSlot, LastSlot: p.LastSlot, After: p.After,
			State: stateOf(p, is), Tail: p.Tail, Unknown: serverNATS})
	}
	return all, nil
}

// streamsAlone is what NATS knows of the partitions.
func (y *system) streamsAlone(ctx context.Context) (all []partitionState, err error) {
	streams, err := broker.Streams(ctx, y.js, y.broker)
	if err != nil {
		return nil, err
	}
	for _, s := range streams {
		all = append(all, partitionState{Partition: s.Partition.Number, Stream: s.Name, FirstSlot: s.FirstSlot, LastSlot: s.LastSlot, After: s.After, State: stateUnknown,
			FirstSeq: s.First, LastSeq: s.Last, Messages: s.Messages, Leader: s.Leader, Replicas: s.Replicas, Current: s.Current, Unknown: serverTruth})
	}
	return all, nil
}

func stateOf(p outbox.Partition, active bool) string {
	switch {
	case p.Closed:
		return stateClosed
	case !active:
		return stateWaiting
	case p.Closing:
		return stateClosing
	}
	return stateOpen
}

// name notes which relay holds which partition.
func (st *systemState) name() {
	for _, l := range st.Leases {
		if l.Kind != relay.LeaseKind {
			continue
		}
		for _, n := range l.Partitions {
			for i := range st.Partitions {
				if st.Partitions[i].Partition == n {
					st.Partitions[i].Relay = l.Owner
				}
			}
		}
	}
}

// partitionRows are the lines of a table of partitions, of closed ones too when these are asked for.
func partitionRows(all []partitionState, closed bool) [][]string {
	rows := [][]string{{"PARTITION", "STREAM", "SLOTS", "STATE", "MESSAGES", "TAIL", "LAST", "LEADER", "CURRENT REPLICAS", "RELAY"}}
	for _, p := range all {
		if p.State == stateClosed && !closed {
			continue
		}
		state, replicas := p.State, fmt.Sprintf("%d of %d", p.Current, p.Replicas)
		held, last, tail, holder := count(int64(p.Messages)), count(int64(p.LastSeq)), count(int64(p.Tail)), or(p.Relay, "-")
		switch {
		case p.Unknown == serverNATS:
			held, last, replicas = "unknown", "unknown", "unknown"
		case p.Unknown != "":
			tail, holder = "unknown", "unknown"
		case p.Refused != "":
			state = "REFUSED"
		case p.NoLeader != "":
			state, replicas = "NO LEADER", "unknown"
		case p.Replicas == 0:
			replicas = "no stream"
		}
		rows = append(rows, []string{fmt.Sprint(p.Partition), p.Stream, fmt.Sprintf("%d-%d", p.FirstSlot, p.LastSlot), state, held, tail, last, or(p.Leader, "-"), replicas, holder})
	}
	return rows
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

func (p Process) partitionsCommand() *cobra.Command {
	c := &cobra.Command{Use: "partitions", Short: "Show the partitions, or change how many there are"}
	c.AddCommand(p.partitionsListCommand(), p.partitionsResizeCommand())
	return c
}

func (p Process) partitionsListCommand() *cobra.Command {
	var (
		data        string
		asJSON, all bool
	)
	c := &cobra.Command{
		Use:   "list",
		Short: "Show each partition, its slots and its stream",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			y, err := p.system(c.Context(), data, "partitions")
			if err != nil {
				return err
			}
			defer y.close()
			st, err := y.await(c.Context(), patience, systemState.seen)
			if err != nil {
				return err
			}
			if asJSON {
				for _, s := range st.Partitions {
					if s.State != stateClosed || all {
						if err := p.writeJSON(s); err != nil {
							return err
						}
					}
				}
				return nil
			}
			return p.table(partitionRows(st.Partitions, all)...)
		},
	}
	c.Flags().BoolVar(&all, "all", false, "closed partitions too")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON objects, one per partition and line")
	dataFlag(c, &data)
	return c
}

func (p Process) partitionsResizeCommand() *cobra.Command {
	var (
		data string
		to   int
		wait time.Duration
		sure *asking
	)
	c := &cobra.Command{
		Use:   "resize",
		Short: "Replace the partitions by more, or fewer",
		Long: `Resize replaces the open partitions by new ones, which get the slots evenly. The relays publish what they have in hand to the old streams,
close them, and then open the new ones. The consumers read each old stream to its end before they begin the new ones that share its slots.
Writers do not wait, and no event overtakes another of its aggregate. Old streams stay until they are removed by hand.

The number of partitions is 1, 2, 4, 8, 16 or 32. More partitions let more relays and more instances of a consumer work at once. A resize that has
begun cannot be taken back. Resize refuses to begin another one before it has ended.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if to < 1 || to > 32 || to&(to-1) != 0 {
				return &usageError{fmt.Errorf("--to is %d: want 1, 2, 4, 8, 16 or 32", to)}
			}
			if wait < 0 {
				return &usageError{fmt.Errorf("--wait is %s: want 0 or more", wait)}
			}
			y, err := p.system(c.Context(), data, "partitions")
			if err != nil {
				return err
			}
			defer y.close()
			known, err := outbox.Partitions(c.Context(), y.truth)
			if err != nil {
				return err
			}
			now := len(slices.DeleteFunc(outbox.Active(known), func(a outbox.Partition) bool { return a.Closing }))
			if now != to {
				if err := sure.ask(textLines(fmt.Sprintf("There %s now. Relays close their streams, and open %d others.", are(now, "partition"), to), "A resize that has begun cannot be taken back.")); err != nil {
					return err
				}
			}
			return p.resize(c.Context(), y, to, wait)
		},
	}
	c.Flags().IntVar(&to, "to", 0, "how many partitions there shall be")
	c.Flags().DurationVar(&wait, "wait", time.Minute, "how long to wait for the end; 0 to return at once")
	sure = p.destructive(c)
	dataFlag(c, &data)
	return c
}

// resize begins a resize, and shows what happens until it has ended.
func (p Process) resize(ctx context.Context, y *system, to int, wait time.Duration) error {
	added, err := outbox.Resize(ctx, y.truth, to)
	if errors.Is(err, outbox.ErrResizing) {
		return fmt.Errorf("%w: nothing was changed; `tidings partitions list` shows what the earlier resize waits for", err)
	}
	if err != nil {
		return err
	}
	if len(added) == 0 {
		_, err := fmt.Fprintf(p.Stdout, "There %s already. Nothing was changed.\n", are(to, "partition"))
		return err
	}
	for _, a := range added {
		fmt.Fprintf(p.Stdout, "Partition %d (%s) gets the slots %d-%d, after partition %s.\n", a.Number, y.broker.StreamName(a.Number), a.FirstSlot, a.LastSlot, ranges(a.After))
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
			_, err := fmt.Fprintln(p.Stdout, "The relays go on with it: `tidings partitions list` shows how far they are.")
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the resize has not ended within %s; it continues by itself, and `tidings partitions list` shows what it waits for", wait)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(awaitInterval):
		}
	}
}

// resized says how far a resize is: done once all open partitions have streams, and publish.
func (y *system) resized(ctx context.Context) (line string, done bool, err error) {
	all, err := y.partitions(ctx)
	if err != nil {
		return "", false, err
	}
	var closing, waiting, opening, open []int
	var trouble []string
	for _, p := range all {
		switch {
		case p.State == stateClosed:
			continue
		case p.State == stateClosing:
			closing = append(closing, p.Partition)
		case p.State == stateWaiting:
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
		what    string
		numbers []int
	}{{"closing", closing}, {"waiting for these", waiting}, {"opening", opening}, {"open", open}} {
		if len(part.numbers) > 0 {
			parts = append(parts, fmt.Sprintf("%s: %s", part.what, ranges(part.numbers)))
		}
	}
	line = "Partitions " + strings.Join(append(parts, trouble...), "; ") + "."
	return line, len(closing)+len(waiting)+len(opening)+len(trouble) == 0, nil
}

func are(n int, noun string) string {
	if n == 1 {
		return "is 1 " + noun
	}
	return fmt.Sprintf("are %d %ss", n, noun)
}
