package followercounts

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// asConsumersDoSQL is what the consumer's transaction begins with.
const asConsumersDoSQL = `SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_seqscan', 'off', true),
       set_config('random_page_cost', '1.1', true), set_config('jit', 'off', true)`

// BenchmarkApply applies batches of 4000 new follows. events/s counts the projection alone: decoding the payload, edges, counts.
func BenchmarkApply(b *testing.B) {
	const size, users = 4000, 1_000_000
	r := rand.New(rand.NewPCG(1, 2))
	for name, pick := range map[string]func(n int64) (follower, followee int64){
		"random":       func(int64) (int64, int64) { return 1 + r.Int64N(users), 1 + users + r.Int64N(users) },
		"celebrity":    func(n int64) (int64, int64) { return 10 + n, 1 },
		"massfollower": func(n int64) (int64, int64) { return 1, 10 + n },
	} {
		b.Run(name, func(b *testing.B) {
			pool := testkit.Postgres(b).Pool(b, postgres.RoleSystem)
			ctx := context.Background()
			n := int64(0)
			for b.Loop() {
				b.StopTimer()
				events := make([]event.Event, size)
				for i := range events {
					follower, followee := pick(n)
					events[i] = follow(1, follower, followee, 1)
					n++
				}
				b.StartTimer()
				if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
						return err
					}
					return New().Apply(ctx, tx, events)
				}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
		})
	}
}
