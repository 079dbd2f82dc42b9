package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/outbox"
)

// archiveOptions are the flags of `tidings bench archive`.
type archiveOptions struct {
	rows, payload, clients   int
	slices, ranges           int
	withWrites, heldSnapshot bool
	duration                 time.Duration
}

func archiveCommand() *cobra.Command {
	var o archiveOptions
	cmd := &cobra.Command{
		Use: "archive", Args: cobra.NoArgs,
		Short: "Measure archiving, alone and beside writes",
		Long: `The case archive moves --rows messages that were published ten days ago, in ten ranges, in a process
of its own. Afterwards it counts them: missing and duplicates must be 0. The rate covers the time
until the last range is in the archive, with all checks. The time of the ranges' indexes, which the
job creates afterwards, is in the progress lines. With --held-snapshot a snapshot that is older than
the archiving stays open during it.

With --with-writes, --clients connections write to the API beside a relay, each a process, in time
slices of --duration. In every second slice the command archives and indexes a range of --rows /
--slices messages. The line of that slice has the rows per second, measured from the start of the
archiving process. The command compares the slice's writes and published events with the mean of the
slices before and after. The last line has the medians of these ratios.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.rows < 1 || o.payload < 0 || o.clients < 1 || o.slices < 1 || o.duration < time.Second {
				return errors.New("want --rows, --clients and --slices of 1 or more, --payload of 0 or more, and a --duration of " +
					"1s or more")
			}
			if o.withWrites {
				o.ranges = o.slices
				return onServers(cmd, "", syncDefault, o.runWithWrites)
			}
			o.ranges = benchRanges
			return onServers(cmd, "", syncDefault, o.runAlone)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.rows, "rows", 1_000_000, "published messages to move")
	f.IntVar(&o.payload, "payload", 100, "bytes of padding in each payload")
	f.BoolVar(&o.heldSnapshot, "held-snapshot", false, "keep a snapshot open meanwhile")
	f.BoolVar(&o.withWrites, "with-writes", false, "measure writes over HTTP and a relay, with and without archiving")
	f.IntVar(&o.clients, "clients", 32, "parallel connections that write")
	f.IntVar(&o.slices, "slices", 5, "the number of slices with archiving")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "how long each slice writes")
	return cmd
}

// benchRanges is the number of ranges of case archive.
const benchRanges = 10

// publishedSQL writes rows that were published ten days ago.
const publishedSQL = `
INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at, inserted_at,
	processed_at, stream_seq)
SELECT 1, 'follow', n % 10000 + 1, 'created',
       jsonb_build_object('follower_id', '1', 'followee_id', (n % 10000 + 1)::text, 'status', 'ACTIVE',
                          'version', n / 10000 + 1, 'pad', repeat('x', @payload)),
       at, at, at, at, 0
  FROM generate_series(@first::bigint, @last::bigint) n, (SELECT now() - interval '10 days' AS at) t`

func (o archiveOptions) fill(ctx context.Context, s *servers) error {
	s.say("writing %d rows that were published ten days ago", o.rows)
	for range o.ranges {
		if err := s.exec(ctx, `SELECT outbox_range_make(max(to_id), max(to_id) + 50000000) FROM outbox_ranges`); err != nil {
			return err
		}
	}
	const step = 100_000
	for n := range o.ranges {
		first, past := o.rows*n/o.ranges, o.rows*(n+1)/o.ranges
		for ; first < past; first += step {
			if _, err := s.pool.Exec(ctx, publishedSQL, pgx.StrictNamedArgs{"payload": o.payload, "first": first,
				"last": min(first+step, past) - 1}); err != nil {
				return err
			}
		}
		if err := s.exec(ctx, `SELECT outbox_range_cut((SELECT to_id FROM outbox_ranges
			WHERE (SELECT last_value FROM outbox_messages_id_seq) BETWEEN from_id AND to_id - 1))`); err != nil {
			return err
		}
	}
	// The floors as a relay leaves them when every row is published.
	return s.exec(ctx, `UPDATE outbox_partitions SET floor_id = (SELECT last_value FROM outbox_messages_id_seq)`,
		`UPDATE outbox_ranges SET settled_at = now() WHERE to_id - 1 <= (SELECT last_value FROM outbox_messages_id_seq)`,
		`VACUUM ANALYZE outbox_messages`, `CHECKPOINT`)
}

// fallDue makes n ranges due: it sets the time at which they settled to ten days ago.
func fallDue(ctx context.Context, s *servers, n int) error {
	_, err := s.pool.Exec(ctx, `UPDATE outbox_ranges SET settled_at = now() - interval '10 days'
		WHERE from_id IN (SELECT from_id FROM outbox_ranges WHERE state = 'OPEN' AND settled_at IS NOT NULL ORDER BY from_id LIMIT $1)`, n)
	return err
}

// archiveTerms returns the default settings of an installation.
func archiveTerms(context.Context) (outbox.Terms, error) {
	return outbox.Terms{After: 7 * 24 * time.Hour, Keep: 90 * 24 * time.Hour}, nil
}

// runArchive runs the job once, like the archiver, and then waits until it is stopped.
func (cfg childConfig) runArchive(ctx context.Context, pool *pgxpool.Pool, reg *prometheus.Registry) error {
	archive, err := outbox.NewArchive(cfg.Archive, archiveTerms, pool, slog.Default(), reg)
	if err != nil {
		return err
	}
	err = jobs.WithLease(ctx, pool, "bench", func(ctx context.Context, h *jobs.Hold) error {
		_, err := h.Run(ctx, jobs.Job{Name: outbox.ArchiveJob,
			Run: func(ctx context.Context, h *jobs.Hold) error { return archive.Run(ctx, h) }})
		return err
	})
	if ctx.Err() != nil {
		return nil // stopped before the job's end
	}
	if err == nil {
		<-ctx.Done()
	}
	return err
}

// move starts a process that archives n ranges and then creates their indexes, and waits for its
// end. It calls progress with the number of ranges that are in the archive and the time so far.
func (o archiveOptions) move(ctx context.Context, s *servers, n int, progress func(ranges int, took time.Duration)) (
	took time.Duration, rss *float64, err error) {
	archived := func() (ended bool, ranges int, err error) {
		var failed string
		err = s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM job_runs WHERE job = $1 AND succeeded_at IS NOT NULL),
			(SELECT count(*) FROM outbox_ranges WHERE state = 'ARCHIVED'),
			coalesce((SELECT last_error FROM job_runs WHERE job = $1), '')`, outbox.ArchiveJob).Scan(&ended, &ranges, &failed)
		if err == nil && failed != "" {
			err = errors.New(failed)
		}
		return ended, ranges, err
	}
	_, before, err := archived()
	if err == nil {
		err = fallDue(ctx, s, n)
	}
	if err == nil {
		_, err = s.pool.Exec(ctx, `UPDATE job_runs SET succeeded_at = NULL`)
	}
	if err != nil {
		return 0, nil, err
	}
	start := time.Now()
	c, err := s.startChild(partArchive)
	if err != nil {
		return 0, nil, err
	}
	if err := await(ctx, 10*time.Millisecond, 0, func() (bool, error) {
		ended, ranges, err := archived()
		if err != nil {
			return false, err
		}
		took = time.Since(start)
		progress(ranges-before, took)
		if ended && ranges != before+n {
			err = fmt.Errorf("%d ranges were archived, want %d", ranges-before, n)
		}
		return ended, err
	}); err != nil {
		return 0, nil, err
	}
	_, rss, err = stop(c)
	return took, rss, err
}

func (o archiveOptions) runAlone(ctx context.Context, s *servers) error {
	r := result{Case: "archive", Payload: o.payload}
	if err := o.fill(ctx, s); err != nil {
		return err
	}
	if o.heldSnapshot {
		r.Case = "archive-held-snapshot"
		if err := s.holdSnapshot(ctx); err != nil {
			return err
		}
	}
	s.say("%s: moving them", r.Case)
	said := time.Duration(0)
	took, rss, err := o.move(ctx, s, o.ranges, func(ranges int, took time.Duration) {
		if ranges == o.ranges && r.Events == 0 {
			r.rate(o.rows, took)
		}
		if took-said > 5*time.Second {
			said = took
			s.say("%s: %d of %d ranges", r.Case, ranges, o.ranges)
		}
	})
	if err != nil {
		return err
	}
	s.say("%s: with the indexes %.1f s", r.Case, took.Seconds())
	var left, all, distinct int
	if err := s.pool.QueryRow(ctx, `
		SELECT (SELECT count(*) FROM outbox_messages), count(*), count(DISTINCT event_id) FROM outbox_messages_archive`).
		Scan(&left, &all, &distinct); err != nil {
		return err
	}
	r.PeakRSS, r.Missing, r.Duplicates = rss, ptr(o.rows-distinct), ptr(left+all-distinct)
	if err := s.print(&r); err != nil {
		return err
	}
	if *r.Missing != 0 || *r.Duplicates != 0 {
		return fmt.Errorf("%d missing, %d duplicates", *r.Missing, *r.Duplicates)
	}
	return nil
}

// besideResult is the output line of a slice of --with-writes.
type besideResult struct {
	writeResult
	EventsPerSecond float64  `json:"events_per_second"`      // events that the relay published
	EventsRatio     *float64 `json:"events_ratio,omitempty"` // to the mean of the slices before and after
	WritesRatio     *float64 `json:"writes_ratio,omitempty"` // likewise
	// rows of the range per second, from the start of the process until the range is archived and
	// indexed
	ArchivedPerSecond *float64 `json:"archived_per_second,omitempty"`
}

// besideSummary is the last output line of --with-writes.
type besideSummary struct {
	Case              string    `json:"case"`
	WritesRatio       float64   `json:"writes_ratio"` // medians
	EventsRatio       float64   `json:"events_ratio"`
	ArchivedPerSecond float64   `json:"archived_per_second"`
	LeftPerSecond     float64   `json:"left_outbox_per_second"` // archived rows per second of all slices with archiving
	WritesRatios      []float64 `json:"writes_ratios"`
	EventsRatios      []float64 `json:"events_ratios"`
	settings
}

func (o archiveOptions) runWithWrites(ctx context.Context, s *servers) error {
	if err := o.fill(ctx, s); err != nil {
		return err
	}
	a, err := s.startAPI(ctx, 1)
	if err != nil {
		return err
	}
	if _, err := s.startChild(partRelay); err != nil {
		return err
	}
	if _, err := newCallers(a, o.clients, integerIDs.follows).run(ctx, workload{duration: min(o.duration, 5*time.Second)}); err != nil {
		return err
	}

	all := make([]besideResult, 2*o.slices+1)
	for i := range all {
		if err := o.beside(ctx, s, a, i%2 == 1, &all[i]); err != nil {
			return err
		}
	}
	sum := besideSummary{Case: "archive-beside-writes"}
	var speeds []float64
	took := 0.0
	for i := 1; i < len(all); i += 2 {
		before, r, after := all[i-1], &all[i], all[i+1]
		r.WritesRatio = ptr(round(2*r.AcceptedPerSecond/(before.AcceptedPerSecond+after.AcceptedPerSecond), 3))
		r.EventsRatio = ptr(round(2*r.EventsPerSecond/(before.EventsPerSecond+after.EventsPerSecond), 3))
		sum.WritesRatios, sum.EventsRatios = append(sum.WritesRatios, *r.WritesRatio), append(sum.EventsRatios, *r.EventsRatio)
		speeds, took = append(speeds, *r.ArchivedPerSecond), took+r.Seconds
	}
	for i := range all {
		if err := s.print(&all[i]); err != nil {
			return err
		}
	}
	sum.WritesRatio, sum.EventsRatio = round(median(sum.WritesRatios), 3), round(median(sum.EventsRatios), 3)
	sum.ArchivedPerSecond, sum.LeftPerSecond = round(median(speeds), 3), round(float64(o.rows)/took, 0)
	return s.print(&sum)
}

// beside writes for the duration, while a process archives a range if archiving is set. It sets how
// many writes the API accepted and how many events the relay published meanwhile.
func (o archiveOptions) beside(ctx context.Context, s *servers, a *apiUnderTest, archiving bool, r *besideResult) error {
	r.Case, r.Clients = "writes", o.clients
	if archiving {
		r.Case = "writes-archiving"
	}
	s.say("%s: %d clients for %s", r.Case, o.clients, o.duration)
	storedBefore, err := s.stored(ctx)
	if err != nil {
		return err
	}
	c := newCallers(a, o.clients, integerIDs.follows)
	g, gctx := errgroup.WithContext(ctx)
	start := time.Now()
	g.Go(func() error {
		_, err := c.run(gctx, workload{duration: o.duration})
		return err
	})
	var moved time.Duration
	if archiving {
		g.Go(func() (err error) {
			moved, r.PeakRSS, err = o.move(gctx, s, 1, func(int, time.Duration) {})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	took := time.Since(start)
	if moved > o.duration {
		return fmt.Errorf("archiving the range took %s, longer than the slice: lower --rows, or raise --duration", moved)
	}
	stored, err := s.stored(ctx)
	if err != nil {
		return err
	}
	r.fill(c, took)
	r.EventsPerSecond = perSecond(stored-storedBefore, took)
	if archiving {
		r.ArchivedPerSecond = ptr(perSecond(o.rows/o.slices, moved))
	}
	return nil
}
