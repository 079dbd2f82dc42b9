package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
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
	losses
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
func (o relayOptions) fillRanges(ctx context.Context, s *servers) (firsts []int64, err error) {
	var next, floor int64
	if err := s.owner.QueryRow(ctx, `SELECT max(to_id) FROM outbox_ranges`).Scan(&next); err != nil {
		return nil, err
	}
	rows := int64(o.rangeRows)
	var g errgroup.Group
	g.SetLimit(2)
	for range o.ranges {
		first := next
		if err := s.exec(ctx, fmt.Sprintf(`SELECT outbox_range_make(%d, %d); ALTER TABLE outbox_messages_%[1]d
			SET (autovacuum_enabled = off)`, first, first+rows)); err != nil {
			return nil, err
		}
		firsts, next, floor = append(firsts, first), first+rows, first+rows-1
		g.Go(func() error {
			s.say("filling the range from %d with %d rows", first, rows)
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
	return firsts, s.exec(ctx, fmt.Sprintf(`SELECT outbox_range_make(%d, %d), setval('outbox_messages_id_seq', %[3]d);
		UPDATE outbox_partitions SET floor_id = %[3]d; ANALYZE outbox_messages; CHECKPOINT`,
		next, next+50_000_000, floor))
}

func (o relayOptions) runRanges(ctx context.Context, s *servers) error {
	if _, err := outbox.Resize(ctx, s.pool, o.partitions); err != nil {
		return err
	}
	start := time.Now()
	firsts, err := o.fillRanges(ctx, s)
	if err != nil {
		return err
	}
	s.say("filled %d ranges in %.0f s", o.ranges, time.Since(start).Seconds())

	written := 0
	measure := func(with bool) (r rangesResult, err error) {
		if err = moveRanges(ctx, s, firsts, with); err == nil {
			r, err = o.slice(ctx, s, with, written)
		}
		written += o.messages
		return r, err
	}
	if _, err := measure(false); err != nil { // to warm up
		return err
	}
	with, without, err := alternate(o.pairs, true, measure)
	if err != nil {
		return err
	}
	sum := rangesSummary{Case: "ranges", Ranges: o.ranges, RangeRows: o.rangeRows}
	sum.InsertRatios, sum.InsertRatio = ratios(with, without, func(r rangesResult) float64 { return r.InsertsPerSecond })
	sum.DrainRatios, sum.DrainRatio = ratios(with, without, func(r rangesResult) float64 { return r.EventsPerSecond })
	if err := moveRanges(ctx, s, firsts, false); err != nil { // so that the check reads only the rows that this run published
		return err
	}
	if sum.losses, err = s.losses(ctx, written); err != nil {
		return err
	}
	return errors.Join(s.print(&sum), sum.lossless())
}

// moveRanges moves the ranges to the outbox if in is set, else to its archive. That takes
// milliseconds, because it writes only the catalog.
func moveRanges(ctx context.Context, s *servers, firsts []int64, in bool) error {
	sql := `SELECT outbox_range_archive($1, 0)`
	if in {
		sql = `SELECT outbox_range_return($1)`
	}
	for _, first := range firsts {
		if _, err := s.owner.Exec(ctx, sql, first); err != nil {
			return err
		}
	}
	return nil
}

// slice writes messages, lets a relay publish them, and prints the result: the inserts per second,
// and the time of the relay from the first event on the stream to the last mark. before is the
// number of earlier messages. The ranges are in the outbox if with is set, else in its archive.
func (o relayOptions) slice(ctx context.Context, s *servers, with bool, before int) (r rangesResult, err error) {
	r.Case, r.Relays, r.Payload, r.Partitions = "without-ranges", 1, o.payload, o.partitions
	if with {
		r.Case = "with-ranges"
	}
	s.say(r.Case)
	all, start := before+o.messages, time.Now()
	if err := o.write(ctx, s, before, all, 20); err != nil {
		return r, err
	}
	r.InsertsPerSecond = perSecond(o.messages, time.Since(start))
	if err := s.exec(ctx, `CHECKPOINT`); err != nil {
		return r, err
	}
	if err := o.drainOnce(ctx, s, &r.result, before); err != nil {
		return r, err
	}
	return r, s.print(&r)
}
