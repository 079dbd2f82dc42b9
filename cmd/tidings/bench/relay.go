package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// The values of --broker-sync.
const (
	syncAlways  = "always"
	syncDefault = "default"
)

// Texts of flags that several commands have.
const (
	syncWriting = "when the broker syncs to disk: always (before each publish ack) or default (every two minutes)"
	syncReading = syncWriting + "; the measured part only reads"
	giveUp      = "give up after this time"
)

// relayOptions are the flags of `tidings bench relay`.
type relayOptions struct {
	messages, relays, payload, processed int
	tenants, partitions                  int
	ranges, rangeRows, pairs             int
	sync                                 string
	heldSnapshot, openTransaction        bool
	within                               time.Duration
}

// The cases of `tidings bench relay`.
const (
	caseRelay           = "relay"
	caseHeldSnapshot    = "relay-held-snapshot"
	caseOpenTransaction = "relay-open-transaction"
)

// leaseTTL is the lease time of relays under test. It is short, so that the takeover happens during
// the run.
const leaseTTL = time.Second

func relayCommand() *cobra.Command {
	var o relayOptions
	cmd := &cobra.Command{
		Use: "relay", Args: cobra.NoArgs,
		Short: "Measure the drain of a backlog, and check it for loss, duplicates and inversions",
		Long: `Relay writes a backlog of outbox rows and starts relays. It measures the time from their start until
the stream has the last event and every row is marked. With two relays or more, the command kills
one (SIGKILL) half way, and another one takes over its partitions. Afterwards the command reads the
whole stream: missing, duplicates and inversions (versions of one entity that do not rise by one)
must be 0.

With --held-snapshot a second case runs while a snapshot stays open. It is older than the publishing
of the --processed rows, so vacuum cannot remove any row. With --open-transaction another case runs
while a transaction that has an id stays open, so that no floor can rise.

With --ranges the outbox has that many ranges of --range-rows published rows each. The command
inserts --messages, 20 per statement, and drains them, with these ranges in the outbox and without
them in turn, --pairs times. In the runs without the ranges, the archive has them. The last line has
the medians of the ratios: a run with the ranges to the run without them.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.messages < 1 || o.relays < 1 || o.payload < 0 || o.processed < 0 || o.tenants < 1 || o.tenants > 10_000 ||
				o.sync != syncAlways && o.sync != syncDefault {
				return errors.New("want --messages and --relays of 1 or more, --tenants of 1 to 10000, --payload and --processed of 0 or " +
					"more, --broker-sync always or default")
			}
			if o.ranges < 0 || o.rangeRows < 1 || o.pairs < 1 {
				return errors.New("want --ranges of 0 or more, --range-rows and --pairs of 1 or more")
			}
			if o.ranges > 0 {
				return o.runRanges(cmd.Context(), cmd.OutOrStdout(), progress(cmd))
			}
			cases := []string{caseRelay}
			if o.heldSnapshot {
				cases = append(cases, caseHeldSnapshot)
			}
			if o.openTransaction {
				cases = append(cases, caseOpenTransaction)
			}
			for _, c := range cases {
				r, err := o.run(cmd.Context(), c, progress(cmd))
				if err != nil {
					return err
				}
				if err := r.write(cmd.OutOrStdout()); err != nil {
					return err
				}
				if *r.Missing+*r.Duplicates+*r.Inversions > 0 {
					return fmt.Errorf("%d missing, %d duplicates, %d inversions", *r.Missing, *r.Duplicates, *r.Inversions)
				}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.messages, "messages", 200_000, "events in the backlog")
	f.IntVar(&o.relays, "relays", 2, "the number of relays")
	f.IntVar(&o.payload, "payload", 100, "bytes of padding in each payload")
	f.IntVar(&o.tenants, "tenants", 1, "tenants of the events; with more than one the events have four types")
	f.IntVar(&o.partitions, "partitions", 1, "partitions: 1, 2, 4, 8, 16 or 32")
	f.IntVar(&o.processed, "processed", 0, "rows that were published before")
	f.StringVar(&o.sync, "broker-sync", syncAlways, syncWriting)
	f.BoolVar(&o.heldSnapshot, "held-snapshot", false, "run a second case while a snapshot from before the publishing stays open")
	f.BoolVar(&o.openTransaction, "open-transaction", false,
		"run another case while a transaction that is older than the backlog stays open")
	f.IntVar(&o.ranges, "ranges", 0, "measure with and without this many ranges of published rows")
	f.IntVar(&o.rangeRows, "range-rows", 1_000_000, "rows per range")
	f.IntVar(&o.pairs, "pairs", 3, "measurements with and without the ranges")
	f.DurationVar(&o.within, "within", 10*time.Minute, giveUp)
	return cmd
}

// backlogSQL writes rows by plain INSERT: 10,000 entities, each with rising versions. The rows are
// spread over the tenants, and with more than one tenant over four event types, so that the stream
// has that many subjects.
const backlogSQL = `
INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
SELECT n % 10000 % @tenants::bigint + 1, 'follow', n % 10000 + 1,
       CASE WHEN @tenants = 1 THEN 'created' ELSE (ARRAY['created', 'removed', 'noted', 'seen'])[n / 10000 % 4 + 1] END,
       jsonb_build_object('follower_id', '1', 'followee_id', (n % 10000 + 1)::text, 'status', 'ACTIVE',
                          'version', n / 10000 + 1, 'pad', repeat('x', @payload))
  FROM generate_series(@first::bigint, @last::bigint) n`

// rows returns the arguments of backlogSQL for the rows first to end-1.
func (o relayOptions) rows(first, end int) pgx.StrictNamedArgs {
	return pgx.StrictNamedArgs{"payload": o.payload, "tenants": o.tenants, "first": first, "last": end - 1}
}

func (o relayOptions) run(ctx context.Context, name string, say func(string, ...any)) (_ result, err error) {
	r := result{Case: name, Relays: o.relays, Payload: o.payload, Processed: o.processed, Tenants: o.tenants, Partitions: o.partitions}
	say("%s: starting servers", r.Case)
	s, err := startServers(ctx, o.sync, slog.Default())
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if _, err := outbox.Resize(ctx, s.pool, o.partitions); err != nil {
		return r, err
	}
	if o.processed > 0 {
		if err := o.preload(ctx, s, name == caseHeldSnapshot, say); err != nil {
			return r, err
		}
	}
	if name == caseOpenTransaction {
		if err := s.hold(ctx, `BEGIN; SELECT pg_current_xact_id()`); err != nil {
			return r, err
		}
	}
	say("%s: writing %d rows", r.Case, o.messages)
	const step = 50_000
	for first := 0; first < o.messages; first += step {
		if _, err := s.pool.Exec(ctx, backlogSQL, o.rows(first, min(first+step, o.messages))); err != nil {
			return r, err
		}
	}
	js, closeJS, err := s.stream(ctx, slog.Default())
	if err != nil {
		return r, err
	}
	defer closeJS()

	say("%s: draining", r.Case)
	children := make([]*child, 0, o.relays)
	defer func() {
		for _, c := range children {
			c.kill()
		}
	}()
	start := time.Now()
	for range o.relays {
		c, err := startChild(s, partRelay, leaseTTL, logTo(say))
		if err != nil {
			return r, err
		}
		children = append(children, c)
	}
	takeovers, err := o.awaitDrained(ctx, s, js, children, start.Add(o.within))
	if err != nil {
		return r, err
	}
	r.rate(o.messages, time.Since(start))
	running := children
	children = nil
	if err := r.stop(running, takeovers); err != nil {
		return r, err
	}
	say("%s: reading the stream back", r.Case)
	if err := r.check(ctx, s, js); err != nil {
		return r, err
	}
	r.settings, err = s.settings(ctx)
	return r, err
}

// awaitDrained waits until the stream has the last event and every row is marked. With two relays
// or more it kills the first one half way. It returns the number of killed relays.
func (o relayOptions) awaitDrained(ctx context.Context, s *servers, js jetstream.JetStream, children []*child,
	deadline time.Time) (takeovers int, err error) {
	for {
		stored, err := countStored(ctx, js, s.broker)
		if err != nil {
			return takeovers, err
		}
		if o.partitions > 1 && stored > 0 {
			stored-- // the closing message of the installation's first partition
		}
		for _, c := range children {
			c.sample()
		}
		if o.relays > 1 && takeovers == 0 && stored >= o.messages/2 {
			children[0].kill()
			takeovers++
		}
		if stored >= o.messages {
			break
		}
		if time.Now().After(deadline) {
			return takeovers, fmt.Errorf("%d of %d events after %s", stored, o.messages, o.within)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return takeovers, err
		}
	}
	for pending := true; pending; {
		err := s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&pending)
		if err != nil {
			return takeovers, err
		}
	}
	return takeovers, nil
}

// stop stops the relays and sets the figures of their processes. The first takeovers of them were
// killed.
func (r *result) stop(children []*child, takeovers int) error {
	var total tally
	var peak float64
	var cpu time.Duration
	for i, c := range children {
		c.sample()
		peak, cpu = max(peak, c.peak), cpu+c.cpu
		if i < takeovers {
			continue
		}
		t, err := c.stop()
		if err != nil {
			for _, c := range children[i:] {
				c.kill()
			}
			return err
		}
		peak, total.CatchUps, total.Conflicts = max(peak, c.peak), total.CatchUps+t.CatchUps, total.Conflicts+t.Conflicts
	}
	r.RelayCPU = perEvent(cpu, r.Events)
	r.PeakRSS, r.CatchUps, r.Conflicts, r.Takeovers = ptr(round(peak, 1)), &total.CatchUps, &total.Conflicts, &takeovers
	return nil
}

// preload writes rows and marks them as published, so that their entries in the pending index are
// dead. If held is set, a snapshot from before stays open until the end of the case. Otherwise
// vacuum removes the dead entries.
func (o relayOptions) preload(ctx context.Context, s *servers, held bool, say func(string, ...any)) error {
	say("writing %d rows that were published before", o.processed)
	const step = 100_000
	for first := 0; first < o.processed; first += step {
		if _, err := s.pool.Exec(ctx, backlogSQL, o.rows(first, min(first+step, o.processed))); err != nil {
			return err
		}
	}
	if held {
		if err := s.holdSnapshot(ctx); err != nil {
			return err
		}
	}
	owner, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return err
	}
	_, err = owner.Exec(ctx, `UPDATE outbox_messages SET processed_at = now(), stream_seq = 0`)
	if err == nil {
		_, err = owner.Exec(ctx, `VACUUM ANALYZE outbox_messages`)
	}
	return errors.Join(err, owner.Close(ctx))
}

// countStored counts the messages on the streams, including the closing message of a closed stream.
func countStored(ctx context.Context, js jetstream.JetStream, cfg broker.Config) (n int, err error) {
	streams, err := broker.Streams(ctx, js, cfg)
	for _, s := range streams {
		n += int(s.Messages)
	}
	return n, err
}

// check reads all streams and counts missing events, duplicates and inversions.
func (r *result) check(ctx context.Context, s *servers, js jetstream.JetStream) error {
	rows, err := s.pool.Query(ctx, `SELECT event_id::text FROM outbox_messages WHERE stream_seq > 0`)
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	missing := make(map[string]bool, len(ids)) // true until seen
	for _, id := range ids {
		missing[id] = true
	}
	streams, err := broker.Streams(ctx, js, s.broker)
	if err != nil {
		return err
	}
	duplicates, inversions := 0, 0
	versions := make(map[int64]int64)
	for _, stream := range streams { // older streams have lower numbers and come first
		if _, err := broker.Scan(ctx, js, s.broker, stream.Number, broker.Scanning{}, func(m *broker.Stored) error {
			if !event.Ours(m.Header) {
				return nil // the closing message
			}
			e, err := event.Decode(m.Subject, m.Header, m.Data)
			if err != nil {
				return err
			}
			if unseen, known := missing[e.ID]; !known || !unseen {
				duplicates++
			}
			missing[e.ID] = false
			var f struct {
				Version int64 `json:"version"`
			}
			if err := json.Unmarshal(e.Payload, &f); err != nil {
				return err
			}
			if f.Version != versions[e.AggregateID]+1 {
				inversions++
			}
			versions[e.AggregateID] = f.Version
			return nil
		}); err != nil {
			return err
		}
	}
	lost := 0
	for _, unseen := range missing {
		if unseen {
			lost++
		}
	}
	lost += r.Events - len(ids)
	r.Missing, r.Duplicates, r.Inversions = &lost, &duplicates, &inversions
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// logTo is a writer that passes a child's log to say.
type logTo func(string, ...any)

func (w logTo) Write(b []byte) (int, error) {
	w("child: %s", b)
	return len(b), nil
}
