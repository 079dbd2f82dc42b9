package cli

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
)

const (
	maxMends   = 100_000 // differences in memory; a projection that has more is built anew
	mendAtOnce = 100     // keys per transaction, for which the consumer waits
)

// flaw is what is wrong, whatever its values are.
type flaw struct {
	key   projections.Key
	field string
}

// mend brings what differs to the truth and returns how many keys it mended. Only what differs twice counts, with a wait for what lags
// in between: the first look may have met events on their way.
func (y *system) mend(ctx context.Context, p projections.Projection, wait time.Duration) (int64, error) {
	first, err := y.flaws(ctx, p)
	if err != nil || len(first) == 0 {
		return 0, err
	}
	if _, err := y.await(ctx, wait, systemState.settled); err != nil {
		return 0, err
	}
	second, err := y.flaws(ctx, p)
	if err != nil {
		return 0, err
	}
	found := make(map[projections.Key]bool)
	for f := range second {
		if first[f] {
			found[f.key] = true
		}
	}
	keys := make([]projections.Key, 0, len(found))
	for k := range found {
		keys = append(keys, k)
	}
	dead, err := outbox.Dead(ctx, y.truth)
	if err != nil {
		return 0, err
	}
	for chunk := range slices.Chunk(keys, mendAtOnce) {
		if err := postgres.InTx(ctx, y.projections, pgx.TxOptions{}, func(tx pgx.Tx) error {
			parked, err := consumers.Hold(ctx, tx, p.Name())
			if err != nil {
				return err
			}
			return p.Mend(ctx, tx, y.truth, chunk, func(tenant int64, aggregateType string, aggregateID int64) bool {
				return parked(tenant, aggregateType, aggregateID) || dead(tenant, aggregateType, aggregateID)
			})
		}); err != nil {
			return 0, fmt.Errorf("mend %d differences of %s: %w", len(chunk), p.Name(), err)
		}
	}
	return int64(len(keys)), nil
}

func (y *system) flaws(ctx context.Context, p projections.Projection) (map[flaw]bool, error) {
	all := make(map[flaw]bool)
	_, err := p.Verify(ctx, y.truth, y.projections, func(d projections.Difference) {
		if len(all) < maxMends {
			all[flaw{d.Key, d.Field}] = true
		}
	})
	if err == nil && len(all) == maxMends {
		err = fmt.Errorf("%s or more differences: run `tidings replay --consumer %s`", count(maxMends), p.Name())
	}
	if err != nil {
		return nil, fmt.Errorf("verify %s: %w", p.Name(), err)
	}
	return all, nil
}
