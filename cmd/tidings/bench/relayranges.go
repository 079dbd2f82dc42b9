package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/outbox"
)

// rangesResult is the output line of a slice of --ranges.
type rangesResult struct {
	result
	InsertsPerSecond float64 `json:"inserts_per_second"`
}

// rangesSummary is the last output line of --ranges.
type rangesSummary struct {
	Case         string    `json:"case"`
	Ranges       int       `json:"ranges"`
	RangeRows    int       `json:"range_rows"`
	InsertRatio  float64   `json:"insert_ratio"` // medians, with the ranges to without
	DrainRatio   float64   `json:"drain_ratio"`
	InsertRatios []float64 `json:"insert_ratios"`
	DrainRatios  []float64 `json:"drain_ratios"`
	Missing      int       `json:"missing"`
	Duplicates   int       `json:"duplicates"`
	Inversions   int       `json:"inversions"`
	settings
}

// narrowSQL fills the table of a range with the narrowest possible rows, marked as published. No
// other process writes meanwhile.
const narrowSQL = `
INSERT INTO outbox_messages_%[1]d (id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
	occurred_at, available_at, inserted_at, processed_at, attempts, partition, stream_seq)
SELECT id, (lpad(to_hex(id), 12, '0') || '80000000000000000000')::uuid, 1, 'follow', id, 'created', 1, '{}',
	now(), now(), now(), now(), 0, 0, 0
  FROM generate_series(%[1]d, %[2]d) id`

// fillRanges creates the ranges and fills them, two at a time. It returns their first ids.
func (o relayOptions) fillRanges(ctx context.Context, s *servers, owner *pgx.Conn, say func(string, ...any)) (firsts []int64, err error) {
	var next, floor int64
	if err := owner.QueryRow(ctx, `SELECT max(to_id) FROM outbox_ranges`).Scan(&next); err != nil {
		return nil, err
	}
	rows := int64(o.rangeRows)
	var g errgroup.Group
	g.SetLimit(2)
	for range o.ranges {
		first := next
		if _, err := owner.Exec(ctx, fmt.Sprintf(`SELECT outbox_range_make(%d, %d); ALTER TABLE outbox_messages_%[1]d
			SET (autovacuum_enabled = off)`, first, first+rows)); err != nil {
			return nil, err
		}
		firsts, next, floor = append(firsts, first), first+rows, first+rows-1
		g.Go(func() error {
			say("filling the range from %d with %d rows", first, rows)
			conn, err := pgx.Connect(ctx, s.url)
			if err != nil {
				return err
			}
			_, err = conn.Exec(ctx, `SET synchronous_commit = off;`+fmt.Sprintf(narrowSQL, first, first+rows-1))
			return errors.Join(err, conn.Close(ctx))
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	_, err = owner.Exec(ctx, fmt.Sprintf(`SELECT outbox_range_make(%d, %d), setval('outbox_messages_id_seq', %[3]d);
		UPDATE outbox_partitions SET floor_id = %[3]d; ANALYZE outbox_messages; CHECKPOINT`,
		next, next+50_000_000, floor))
	return firsts, err
}

func (o relayOptions) runRanges(ctx context.Context, out io.Writer, say func(string, ...any)) (err error) {
	say("starting servers")
	s, err := startServers(ctx, o.sync, slog.Default())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if _, err := outbox.Resize(ctx, s.pool, o.partitions); err != nil {
		return err
	}
	owner, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return err
	}
	defer func() { _ = owner.Close(context.WithoutCancel(ctx)) }() // an error here changes no result
	start := time.Now()
	firsts, err := o.fillRanges(ctx, s, owner, say)
	if err != nil {
		return err
	}
	say("filled %d ranges in %.0f s", o.ranges, time.Since(start).Seconds())
	js, closeJS, err := s.stream(ctx, slog.Default())
	if err != nil {
		return err
	}
	defer closeJS()

	set, err := s.settings(ctx)
	if err != nil {
		return err
	}
	r := &rangesRun{relayOptions: o, s: s, js: js, owner: owner, firsts: firsts, set: set, out: out, say: say}
	sum := rangesSummary{Case: "ranges", Ranges: o.ranges, RangeRows: o.rangeRows, settings: set}
	if err := r.compare(ctx, &sum); err != nil {
		return err
	}
	for _, first := range firsts { // so that the check reads only the rows that this run published
		if _, err := owner.Exec(ctx, `SELECT outbox_range_archive($1, 0)`, first); err != nil {
			return err
		}
	}
	check := result{Events: r.written}
	if err := check.check(ctx, s, js); err != nil {
		return err
	}
	sum.Missing, sum.Duplicates, sum.Inversions = *check.Missing, *check.Duplicates, *check.Inversions
	if err := writeLine(out, sum); err != nil {
		return err
	}
	if sum.Missing+sum.Duplicates+sum.Inversions > 0 {
		return fmt.Errorf("%d missing, %d duplicates, %d inversions", sum.Missing, sum.Duplicates, sum.Inversions)
	}
	return nil
}

// rangesRun is a run of --ranges on servers with filled ranges.
type rangesRun struct {
	relayOptions
	s       *servers
	js      jetstream.JetStream
	owner   *pgx.Conn
	firsts  []int64
	set     settings
	out     io.Writer
	say     func(string, ...any)
	written int
}

// compare runs pairs of slices, one with the ranges and one without, in alternating order. It sets
// the ratios of sum.
func (r *rangesRun) compare(ctx context.Context, sum *rangesSummary) error {
	if _, err := r.slice(ctx, false); err != nil { // to warm up
		return err
	}
	for i := range r.pairs {
		first, err := r.slice(ctx, i%2 == 0)
		if err != nil {
			return err
		}
		second, err := r.slice(ctx, i%2 == 1)
		if err != nil {
			return err
		}
		if i%2 == 1 {
			first, second = second, first
		}
		sum.InsertRatios = append(sum.InsertRatios, round(first.InsertsPerSecond/second.InsertsPerSecond, 3))
		sum.DrainRatios = append(sum.DrainRatios, round(first.EventsPerSecond/second.EventsPerSecond, 3))
	}
	sum.InsertRatio, sum.DrainRatio = median(sum.InsertRatios), median(sum.DrainRatios)
	return nil
}

// slice writes messages, lets a relay publish them, and prints the result. The ranges are in the
// outbox if with is set, else in its archive.
func (r *rangesRun) slice(ctx context.Context, with bool) (line rangesResult, err error) {
	line.Case = "without-ranges"
	if with {
		line.Case = "with-ranges"
	}
	r.say(line.Case)
	for _, first := range r.firsts { // this takes milliseconds, because it writes only the catalog
		sql := `SELECT outbox_range_archive($1, 0)::text`
		if with {
			sql = `SELECT outbox_range_return($1)::text`
		}
		var did string
		if err := r.owner.QueryRow(ctx, sql, first).Scan(&did); err != nil {
			return line, err
		}
	}
	if line.InsertsPerSecond, err = r.insert(ctx, r.s, r.written); err != nil {
		return line, err
	}
	r.written += r.messages
	took, err := r.drain(ctx, r.s, r.js, r.owner, r.written, r.say)
	if err != nil {
		return line, err
	}
	line.rate(r.messages, took)
	line.Relays, line.Payload, line.Partitions, line.settings = 1, r.payload, r.partitions, r.set
	return line, writeLine(r.out, line)
}

// insert writes the messages from the n-th on, 20 per statement and transaction, and returns the
// rate per second.
func (o relayOptions) insert(ctx context.Context, s *servers, n int) (perSecond float64, err error) {
	const each = 20
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	start := time.Now()
	for first := n; first < n+o.messages; first += each {
		if _, err := conn.Exec(ctx, backlogSQL, o.rows(first, min(first+each, n+o.messages))); err != nil {
			return 0, err
		}
	}
	return round(float64(o.messages)/time.Since(start).Seconds(), 0), nil
}

// drain lets a relay publish the pending rows, and returns the time from the first event on the
// stream to the last mark. all is the number of events that the streams have at the end.
func (o relayOptions) drain(ctx context.Context, s *servers, js jetstream.JetStream, owner *pgx.Conn, all int,
	say func(string, ...any)) (took time.Duration, err error) {
	if _, err := owner.Exec(ctx, `CHECKPOINT`); err != nil {
		return 0, err
	}
	c, err := startChild(s, partRelay, leaseTTL, logTo(say))
	if err != nil {
		return 0, err
	}
	defer c.kill()
	deadline := time.Now().Add(o.within)
	var start time.Time
	for pending := true; pending; {
		stored, err := countStored(ctx, js, s.broker)
		if err != nil {
			return 0, err
		}
		if o.partitions > 1 && stored > 0 {
			stored-- // the closing message of the installation's first partition
		}
		if start.IsZero() && stored > all-o.messages {
			start = time.Now()
		}
		if stored >= all {
			err := s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM outbox_messages
				WHERE id > (SELECT min(floor_id) FROM outbox_partitions WHERE final_seq IS NULL) AND processed_at IS NULL)`).
				Scan(&pending)
			if err != nil {
				return 0, err
			}
		}
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("%d of %d events after %s", stored, all, o.within)
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return 0, err
		}
	}
	took = time.Since(start)
	_, err = c.stop()
	return took, err
}
