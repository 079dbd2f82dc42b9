package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// relayOptions are the flags of `tidings bench relay`.
type relayOptions struct {
	messages, relays, payload, processed int
	tenants, partitions                  int
	ranges, rangeRows, pairs             int
	sync                                 string
	heldSnapshot, openTransaction        bool
	within, rtt                          time.Duration
}

// The cases of `tidings bench relay`.
const (
	caseRelay           = "relay"
	caseHeldSnapshot    = "relay-held-snapshot"
	caseOpenTransaction = "relay-open-transaction"
)

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
the medians of the ratios: a run with the ranges to the run without them.

With --rtt one relay drains --messages with a network between it and both servers, and without it in
turn, --pairs times. The last line has the median of the ratios of the rates.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.messages < 1 || o.relays < 1 || o.payload < 0 || o.processed < 0 || o.tenants < 1 || o.tenants > 10_000 ||
				o.sync != syncAlways && o.sync != syncDefault {
				return errors.New("want --messages and --relays of 1 or more, --tenants of 1 to 10000, --payload and --processed of 0 or " +
					"more, --broker-sync always or default")
			}
			if o.ranges < 0 || o.rangeRows < 1 || o.pairs < 1 {
				return errors.New("want --ranges of 0 or more, --range-rows and --pairs of 1 or more")
			}
			if err := checkRTT(o.rtt); err != nil {
				return err
			}
			if o.rtt > 0 && (o.ranges > 0 || o.heldSnapshot || o.openTransaction || o.processed > 0) {
				return errors.New("--rtt measures a case of its own: without --ranges, --processed, --held-snapshot and --open-transaction")
			}
			if o.rtt > 0 {
				return onServers(cmd, "", o.sync, o.runRTT)
			}
			if o.ranges > 0 {
				return onServers(cmd, "", o.sync, o.runRanges)
			}
			cases := []string{caseRelay}
			if o.heldSnapshot {
				cases = append(cases, caseHeldSnapshot)
			}
			if o.openTransaction {
				cases = append(cases, caseOpenTransaction)
			}
			return onEach(cmd, o.sync, cases, o.run)
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
	f.IntVar(&o.pairs, "pairs", 3, "measurements with and without the ranges, or the network")
	f.DurationVar(&o.rtt, "rtt", 0, "the round trip between the relay and the servers; 0 for no network")
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

// write writes the rows first to end-1 of the backlog, and each of them per transaction.
func (o relayOptions) write(ctx context.Context, s *servers, first, end, each int) error {
	for ; first < end; first += each {
		if _, err := s.owner.Exec(ctx, backlogSQL, pgx.StrictNamedArgs{"payload": o.payload, "tenants": o.tenants, "first": first,
			"last": min(first+each, end) - 1}); err != nil {
			return err
		}
	}
	return nil
}

func (o relayOptions) run(ctx context.Context, s *servers, name string) error {
	r := result{Case: name, Relays: o.relays, Payload: o.payload, Processed: o.processed, Tenants: o.tenants, Partitions: o.partitions}
	if _, err := outbox.Resize(ctx, s.pool, o.partitions); err != nil {
		return err
	}
	if o.processed > 0 {
		if err := o.preload(ctx, s, name == caseHeldSnapshot); err != nil {
			return err
		}
	}
	if name == caseOpenTransaction {
		if err := s.hold(ctx, `BEGIN; SELECT pg_current_xact_id()`); err != nil {
			return err
		}
	}
	s.say("writing %d rows", o.messages)
	if err := o.write(ctx, s, 0, o.messages, 50_000); err != nil {
		return err
	}

	s.say("draining")
	start := time.Now()
	relays, err := s.startChildren(slices.Repeat([]string{partRelay}, o.relays))
	if err != nil {
		return err
	}
	r.Takeovers = new(int)
	if err := o.drain(ctx, s, o.messages, func(stored int) {
		if o.relays > 1 && *r.Takeovers == 0 && stored >= o.messages/2 {
			relays[0].kill()
			*r.Takeovers++
		}
	}); err != nil {
		return err
	}
	r.rate(o.messages, time.Since(start))
	var cpu time.Duration
	for _, c := range relays {
		cpu += c.used()
	}
	t, peak, err := stop(relays...)
	if err != nil {
		return err
	}
	r.RelayCPU, r.PeakRSS, r.CatchUps, r.Conflicts = perEvent(cpu, o.messages), peak, &t.CatchUps, &t.Conflicts
	s.say("reading the stream back")
	lost, err := s.losses(ctx, r.Events)
	if err != nil {
		return err
	}
	r.Missing, r.Duplicates, r.Inversions = &lost.Missing, &lost.Duplicates, &lost.Inversions
	return errors.Join(s.print(&r), lost.lossless())
}

// drain waits until the streams have all events and every row is marked. It calls progress with the
// number of events on the streams.
func (o relayOptions) drain(ctx context.Context, s *servers, all int, progress func(stored int)) error {
	stored := 0
	err := await(ctx, 5*time.Millisecond, o.within, func() (published bool, err error) {
		if stored, err = s.stored(ctx); err != nil {
			return false, err
		}
		if o.partitions > 1 && stored > 0 {
			stored-- // the closing message of the installation's first partition
		}
		if progress(stored); stored < all {
			return false, nil
		}
		return s.published(ctx)
	})
	if err != nil {
		return fmt.Errorf("%d of %d events: %w", stored, all, err)
	}
	return nil
}

// preload writes rows and marks them as published, so that their entries in the pending index are
// dead. If held is set, a snapshot from before stays open until the end of the case. Otherwise
// vacuum removes the dead entries.
func (o relayOptions) preload(ctx context.Context, s *servers, held bool) error {
	s.say("writing %d rows that were published before", o.processed)
	if err := o.write(ctx, s, 0, o.processed, 100_000); err != nil {
		return err
	}
	if held {
		if err := s.holdSnapshot(ctx); err != nil {
			return err
		}
	}
	return s.exec(ctx, `UPDATE outbox_messages SET processed_at = now(), stream_seq = 0`, `VACUUM ANALYZE outbox_messages`)
}

// losses are what a relay must not do to events.
type losses struct {
	Missing    int `json:"missing"`
	Duplicates int `json:"duplicates"`
	Inversions int `json:"inversions"`
}

// lossless returns an error if there are any.
func (l losses) lossless() error {
	if l.Missing+l.Duplicates+l.Inversions > 0 {
		return fmt.Errorf("%d missing, %d duplicates, %d inversions", l.Missing, l.Duplicates, l.Inversions)
	}
	return nil
}

// losses reads all streams, which have to have so many events, and counts what is lost.
func (s *servers) losses(ctx context.Context, events int) (l losses, err error) {
	rows, _ := s.pool.Query(ctx, `SELECT event_id::text FROM outbox_messages WHERE stream_seq > 0`)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return l, err
	}
	missing := make(map[string]bool, len(ids)) // true until seen
	for _, id := range ids {
		missing[id] = true
	}
	streams, err := broker.Streams(ctx, s.js, s.broker)
	if err != nil {
		return l, err
	}
	versions := make(map[event.ID]int64)
	for _, stream := range streams { // older streams have lower numbers and come first
		if _, err := broker.Scan(ctx, s.js, s.broker, stream.Number, broker.Scanning{}, func(m *broker.Stored) error {
			if !event.Ours(m.Header) {
				return nil // the closing message
			}
			e, err := event.Decode(m.Subject, m.Header, m.Data)
			if err != nil {
				return err
			}
			if unseen, known := missing[e.ID]; !known || !unseen {
				l.Duplicates++
			}
			missing[e.ID] = false
			var f struct {
				Version int64 `json:"version"`
			}
			if err := json.Unmarshal(e.Payload, &f); err != nil {
				return err
			}
			if f.Version != versions[e.AggregateID]+1 {
				l.Inversions++
			}
			versions[e.AggregateID] = f.Version
			return nil
		}); err != nil {
			return l, err
		}
	}
	l.Missing = events - len(ids)
	for _, unseen := range missing {
		if unseen {
			l.Missing++
		}
	}
	return l, nil
}
