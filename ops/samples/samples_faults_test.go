//go:build faults

package samples

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAFrozenDatabaseLeavesAGap has two samplers, of two processes, which then go on.
func TestAFrozenDatabaseLeavesAGap(t *testing.T) {
	pg := testkit.PostgresProcess(t)
	db := pg.DB(t)
	read := func(context.Context) (map[string]float64, error) { return map[string]float64{Pending: 1}, nil }
	two := []Sampler{{Pool: db.Pool(t, postgres.RoleSystem), Read: read}, {Pool: db.Pool(t, postgres.RoleSystem), Read: read}}
	pg.Freeze(t)
	for _, s := range two {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if err := s.sample(ctx); !postgres.IsTransient(err) && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a frozen database: %v", err)
		}
		cancel()
	}
	pg.Thaw(t)
	frozen := count(t, two[0].Pool)
	testkit.Eventually(t, "a sample", func() (bool, error) {
		for _, s := range two {
			if err := s.sample(t.Context()); err != nil {
				return false, err
			}
		}
		return count(t, two[0].Pool) > 0, nil
	})
	if n := count(t, two[0].Pool); frozen != 0 || n > 2 {
		t.Errorf("%d samples while the database was frozen, %d in all", frozen, n)
	}
}
