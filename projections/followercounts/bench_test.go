package followercounts

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

// asConsumersDoSQL is the first statement of a consumer's transaction.
const asConsumersDoSQL = `SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_seqscan', 'off', true),
       set_config('random_page_cost', '1.1', true), set_config('jit', 'off', true)`

// BenchmarkApply applies batches of 4,000 new follows. events/s measures the projection only:
// decoding payloads, edges, counts.
func BenchmarkApply(b *testing.B) {
	const size, users = 4000, 1_000_000
	r := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct {
		name    string
		splitAt int64
		pick    func(n int64) (follower, followee event.ID)
	}{
		{"random", splitAt, func(int64) (event.ID, event.ID) {
			return event.IDOf(1 + r.Int64N(users)), event.IDOf(1 + users + r.Int64N(users))
		}},
		{"celebrity in one shard", math.MaxInt64 / maxShards, func(n int64) (event.ID, event.ID) { return event.IDOf(10 + n), "1" }},
		{"celebrity in 64 shards", 1, func(n int64) (event.ID, event.ID) { return event.IDOf(10 + n), "1" }},
		{"massfollower", splitAt, func(n int64) (event.ID, event.ID) { return "1", event.IDOf(10 + n) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			pool := testkit.Postgres(b).Pool(b, postgres.RoleSystem)
			ctx := context.Background()
			n := int64(0)
			for b.Loop() {
				b.StopTimer()
				events := make([]event.Event, size)
				for i := range events {
					follower, followee := c.pick(n)
					events[i] = tested[0].event(1, follower, followee, 1)
					n++
				}
				b.StartTimer()
				if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
						return err
					}
					return Projection{kinds.Builtin, c.splitAt}.Apply(ctx, tx, events)
				}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// BenchmarkIncoming reads first pages of 51 entries of an account with 200,000 followers in several
// numbers of shards. us/page is the time of a page in the database and on the connection.
func BenchmarkIncoming(b *testing.B) {
	for _, shards := range []int{1, 2, 8, 64} {
		b.Run(fmt.Sprint(shards), func(b *testing.B) {
			db := testkit.Postgres(b)
			pool := db.Pool(b, postgres.RoleSystem)
			ctx := context.Background()
			for _, sql := range []string{
				fmt.Sprintf(`INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at, shard_id)
					SELECT 1, 'follow', g, 1000000, true, 1, timestamptz '2026-01-01' + g * interval '1 s', hashint8(g) & %d
					FROM generate_series(1, 200000) g`, shards-1),
				fmt.Sprintf(`INSERT INTO edge_shards SELECT 1, 'follow', 1000000, %d WHERE %[1]d > 1`, shards),
			} {
				if _, err := pool.Exec(ctx, sql); err != nil {
					b.Fatal(err)
				}
			}
			if _, err := db.Pool(b, postgres.RoleOwner).Exec(ctx, `VACUUM ANALYZE edge_lists, edge_shards`); err != nil {
				b.Fatal(err)
			}
			api := db.Pool(b, postgres.RoleAPI)
			inTenant(b, api, 1, func(ctx context.Context, tx pgx.Tx) error {
				n := 0
				for b.Loop() {
					edges, err := Incoming(ctx, tx, tested[0].Edge, "1000000", "", nil, 51)
					if err != nil || len(edges) != 51 {
						return fmt.Errorf("%d edges: %w", len(edges), err)
					}
					n++
				}
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(n), "us/page")
				return nil
			})
		})
	}
}
