package erase

import (
	"context"
	"errors"
	"fmt"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/replay"
	"github.com/tidings/tidings/outbox/coldstore"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Deps are the dependencies of an erasure. Run sets Fence, Excluded and Cold.
type Deps struct {
	erasure.Deps
	ProjectionsURL string          // the database in which locks keep replays out
	Postgres       postgres.Config // the settings of these connections
}

// Run erases a person, or with o.DryRun counts the person's rows and messages. It waits for the
// lease of the jobs. Its errors are those of erasure.Run. It also returns erasure.ErrUnfinished
// while a replay of a projection runs.
func Run(ctx context.Context, d Deps, o erasure.Options) (report erasure.Report, err error) {
	d.Cold = cold(d.Truth, nil)
	if o.DryRun {
		return erasure.Run(ctx, d.Deps, o)
	}
	err = jobs.WithLease(ctx, d.Truth, "erase", func(ctx context.Context, h *jobs.Hold) (err error) {
		x, err := replay.Exclude(ctx, replay.Deps{URL: d.ProjectionsURL, Postgres: d.Postgres}, d.Fleet...)
		if errors.Is(err, replay.ErrRunning) {
			return fmt.Errorf("%w: %w", erasure.ErrUnfinished, err)
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, x.Close(ctx)) }()
		d.Fence, d.Excluded, d.Cold = h.Fence, x.Check, cold(d.Truth, h.Fence)
		report, err = erasure.Run(ctx, d.Deps, o)
		return err
	})
	return report, err
}

// cold returns the function that erases from the exports of the archive.
func cold(truth *pgxpool.Pool, fence coldstore.Fence) func(context.Context, erasure.ColdRequest) (erasure.ColdReport, error) {
	return func(ctx context.Context, c erasure.ColdRequest) (erasure.ColdReport, error) {
		s := coldstore.New(truth, "", fence, nil, nil)
		var failed error
		redact := func(row *coldstore.Row) bool {
			payload, off, err := c.Redact(row.AggregateType, row.EventType, row.Payload)
			failed = errors.Join(failed, err)
			if payload == nil || err != nil {
				return false
			}
			if row.Payload = payload; off {
				row.StreamSeq = nil // its message is no longer in the stream; the table's row says the same
			}
			return true
		}
		do := s.Redact
		if c.DryRun {
			do = s.PreviewRedaction
		}
		r, err := do(ctx, c.TenantID, c.Person, redact)
		return erasure.ColdReport{Rows: r.Rows, Remains: r.Remains, Unread: r.Unread}, errors.Join(err, failed, s.Close())
	}
}
