package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
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
				return o.runWithWrites(cmd.Context(), cmd.OutOrStdout(), progress(cmd))
			}
			o.ranges = benchRanges
			return o.runAlone(cmd.Context(), cmd.OutOrStdout(), progress(cmd))
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

func (o archiveOptions) fill(ctx context.Context, s *servers, say func(string, ...any)) error {
	say("writing %d rows that were published ten days ago", o.rows)
	owner, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return err
	}
	defer func() { _ = owner.Close(context.WithoutCancel(ctx)) }() // an error here changes no result
	for range o.ranges {
		if _, err := owner.Exec(ctx, `SELECT outbox_range_make(max(to_id), max(to_id) + 50000000) FROM outbox_ranges`); err != nil {
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
		if _, err := owner.Exec(ctx, `SELECT outbox_range_cut((SELECT to_id FROM outbox_ranges
			WHERE (SELECT last_value FROM outbox_messages_id_seq) BETWEEN from_id AND to_id - 1))`); err != nil {
			return err
		}
	}
	// The floors as a relay leaves them when every row is published.
	for _, sql := range []string{
		`UPDATE outbox_partitions SET floor_id = (SELECT last_value FROM outbox_messages_id_seq)`,
		`UPDATE outbox_ranges SET settled_at = now() WHERE to_id - 1 <= (SELECT last_value FROM outbox_messages_id_seq)`,
		`VACUUM ANALYZE outbox_messages`, `CHECKPOINT`,
	} {
		if _, err := owner.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
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

// archivePart runs the job once, like the archiver, and then waits until it is stopped.
type archivePart struct {
	archive *outbox.Archive
	pool    *pgxpool.Pool
}

func (p archivePart) Run(ctx context.Context) error {
	err := jobs.WithLease(ctx, p.pool, "bench", func(ctx context.Context, h *jobs.Hold) error {
		_, err := h.Run(ctx, jobs.Job{Name: outbox.ArchiveJob,
			Run: func(ctx context.Context, h *jobs.Hold) error { return p.archive.Run(ctx, h) }})
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

// archived reports whether the job has ended, and how many ranges are archived.
func archived(ctx context.Context, s *servers) (ended bool, ranges int, err error) {
	var failed string
	err = s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM job_runs WHERE job = $1 AND succeeded_at IS NOT NULL),
		(SELECT count(*) FROM outbox_ranges WHERE state = 'ARCHIVED'),
		coalesce((SELECT last_error FROM job_runs WHERE job = $1), '')`, outbox.ArchiveJob).Scan(&ended, &ranges, &failed)
	if err == nil && failed != "" {
		err = errors.New(failed)
	}
	return ended, ranges, err
}

func (o archiveOptions) runAlone(ctx context.Context, out io.Writer, say func(string, ...any)) (err error) {
	r := result{Case: "archive", Payload: o.payload}
	say("starting servers")
	s, err := startServers(ctx, syncDefault, slog.Default())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := o.fill(ctx, s, say); err != nil {
		return err
	}
	if o.heldSnapshot {
		r.Case = "archive-held-snapshot"
		if err := s.holdSnapshot(ctx); err != nil {
			return err
		}
	}
	say("%s: moving them", r.Case)
	if err := fallDue(ctx, s, o.ranges); err != nil {
		return err
	}
	start := time.Now()
	c, err := startChild(s, partArchive, leaseTTL, logTo(say))
	if err != nil {
		return err
	}
	defer c.kill()
	for said, moved := start, false; ; {
		ended, ranges, err := archived(ctx, s)
		if err != nil {
			return err
		}
		c.sample()
		if ranges == o.ranges && !moved {
			moved = true
			r.rate(o.rows, time.Since(start))
		}
		if ended {
			if !moved {
				return fmt.Errorf("%d of %d ranges were archived", ranges, o.ranges)
			}
			break
		}
		if time.Since(said) > 5*time.Second {
			said = time.Now()
			say("%s: %d of %d ranges", r.Case, ranges, o.ranges)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	say("%s: with the indexes %.1f s", r.Case, time.Since(start).Seconds())
	if _, err := c.stop(); err != nil {
		return err
	}
	r.PeakRSS = ptr(round(c.peak, 1))
	var left, all, distinct int
	if err := s.pool.QueryRow(ctx, `
		SELECT (SELECT count(*) FROM outbox_messages), count(*), count(DISTINCT event_id) FROM outbox_messages_archive`).
		Scan(&left, &all, &distinct); err != nil {
		return err
	}
	r.Missing, r.Duplicates = ptr(o.rows-distinct), ptr(left+all-distinct)
	if r.settings, err = s.settings(ctx); err != nil {
		return err
	}
	if err := r.write(out); err != nil {
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

func (o archiveOptions) runWithWrites(ctx context.Context, out io.Writer, say func(string, ...any)) (err error) {
	say("starting servers")
	s, err := startServers(ctx, syncDefault, slog.Default())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := declareStream(ctx, s); err != nil {
		return err
	}
	if err := o.fill(ctx, s, say); err != nil {
		return err
	}
	js, closeJS, err := s.stream(ctx, slog.Default())
	if err != nil {
		return err
	}
	defer closeJS()
	a, err := startAPI(ctx, s, 1, logTo(say))
	if err != nil {
		return err
	}
	defer a.child.kill()
	r, err := startChild(s, partRelay, leaseTTL, logTo(say))
	if err != nil {
		return err
	}
	defer r.kill()
	if err := newWriters(a, o.clients, follows).run(ctx, min(o.duration, 5*time.Second)); err != nil {
		return err
	}

	all := make([]besideResult, 2*o.slices+1)
	set, err := s.settings(ctx)
	if err != nil {
		return err
	}
	for i := range all {
		if all[i], err = o.beside(ctx, s, js, a, i%2 == 1, say); err != nil {
			return err
		}
		all[i].settings = set
	}
	sum := besideSummary{Case: "archive-beside-writes", settings: set}
	var speeds []float64
	took := 0.0
	for i := 1; i < len(all); i += 2 {
		before, r, after := all[i-1], &all[i], all[i+1]
		r.WritesRatio = ptr(round(2*r.AcceptedPerSecond/(before.AcceptedPerSecond+after.AcceptedPerSecond), 3))
		r.EventsRatio = ptr(round(2*r.EventsPerSecond/(before.EventsPerSecond+after.EventsPerSecond), 3))
		sum.WritesRatios, sum.EventsRatios = append(sum.WritesRatios, *r.WritesRatio), append(sum.EventsRatios, *r.EventsRatio)
		speeds, took = append(speeds, *r.ArchivedPerSecond), took+r.Seconds
	}
	for _, r := range all {
		if err := writeLine(out, r); err != nil {
			return err
		}
	}
	sum.WritesRatio, sum.EventsRatio, sum.ArchivedPerSecond = median(sum.WritesRatios), median(sum.EventsRatios), median(speeds)
	sum.LeftPerSecond = round(float64(o.rows)/took, 0)
	return writeLine(out, sum)
}

// beside writes for the duration, while a process archives a range if archiving is set. It returns
// how many writes the API accepted and how many events the relay published meanwhile.
func (o archiveOptions) beside(ctx context.Context, s *servers, js jetstream.JetStream, a *apiUnderTest, archiving bool,
	say func(string, ...any)) (r besideResult, err error) {
	r.Case, r.Clients = "writes", o.clients
	if archiving {
		r.Case = "writes-archiving"
	}
	say("%s: %d clients for %s", r.Case, o.clients, o.duration)
	storedBefore, err := countStored(ctx, js, s.broker)
	if err != nil {
		return r, err
	}
	w := newWriters(a, o.clients, follows)
	g, gctx := errgroup.WithContext(ctx)
	start := time.Now()
	g.Go(func() error { return w.run(gctx, o.duration) })
	var moved time.Duration
	if archiving {
		if moved, r.PeakRSS, err = o.archiveOne(gctx, s, say); err != nil {
			return r, errors.Join(err, g.Wait())
		}
	}
	if err := g.Wait(); err != nil {
		return r, err
	}
	took := time.Since(start)
	if moved > took {
		return r, fmt.Errorf("archiving the range took %s, longer than the slice: lower --rows, or raise --duration", moved)
	}
	stored, err := countStored(ctx, js, s.broker)
	if err != nil {
		return r, err
	}
	w.fill(&r.writeResult, took)
	r.EventsPerSecond = round(float64(stored-storedBefore)/took.Seconds(), 0)
	if archiving {
		r.ArchivedPerSecond = ptr(round(float64(o.rows/o.slices)/moved.Seconds(), 0))
	}
	return r, nil
}

// archiveOne starts a process that archives one range. It returns the time and the peak memory in
// MiB.
func (o archiveOptions) archiveOne(ctx context.Context, s *servers, say func(string, ...any),
) (took time.Duration, rss *float64, err error) {
	if err := fallDue(ctx, s, 1); err != nil {
		return 0, nil, err
	}
	if _, err := s.pool.Exec(ctx, `UPDATE job_runs SET succeeded_at = NULL`); err != nil {
		return 0, nil, err
	}
	_, before, err := archived(ctx, s)
	if err != nil {
		return 0, nil, err
	}
	start := time.Now()
	c, err := startChild(s, partArchive, leaseTTL, logTo(say))
	if err != nil {
		return 0, nil, err
	}
	defer c.kill()
	for {
		ended, ranges, err := archived(ctx, s)
		if err != nil {
			return 0, nil, err
		}
		if ended {
			if took = time.Since(start); ranges != before+1 {
				return 0, nil, fmt.Errorf("%d ranges were archived, want 1", ranges-before)
			}
			_, err := c.stop()
			return took, ptr(round(c.peak, 1)), err
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return 0, nil, err
		}
	}
}

// median returns the median of some numbers, rounded to three digits.
func median(all []float64) float64 {
	all = slices.Sorted(slices.Values(all))
	return round((all[(len(all)-1)/2]+all[len(all)/2])/2, 3)
}
