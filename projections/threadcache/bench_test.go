package threadcache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// asConsumersDoSQL is what the consumer's transaction begins with.
const asConsumersDoSQL = `SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_seqscan', 'off', true),
       set_config('random_page_cost', '1.1', true), set_config('jit', 'off', true)`

// written is comment n of a post, half a millisecond after the one before it.
func written(post int64, n int, parent *event.Comment) event.Comment {
	c := event.Comment{
		CommentID: fmt.Sprintf("00000000-0000-7000-%04x-%012x", 0x8000+post%0x4000, n), PostID: event.ID(post), Slug: fmt.Sprintf("%08x", n),
		AuthorID: event.ID(n%1000 + 1), Body: strings.Repeat("a word or two. ", 12), AuthorState: event.AuthorActive,
		ModerationState: event.ModerationNone, Version: 1, Actor: "bench",
	}
	c.CreatedAt.Time = start.Add(time.Duration(n) * 500 * time.Microsecond)
	c.UpdatedAt = c.CreatedAt
	c.Path = fmt.Sprintf("%014x%s", c.CreatedAt.UnixMicro(), c.Slug)
	if parent != nil {
		c.ParentID, c.Path = parent.CommentID, parent.Path+"/"+c.Path
	}
	return c
}

// BenchmarkApply applies batches of 4000 new comments of 180 bytes: first comments of one post, replies at random in one post,
// replies at random in 400 posts. events/s counts the projection alone: decoding the payload, rows, counts.
func BenchmarkApply(b *testing.B) {
	const size, posts = 4000, 400
	r := rand.New(rand.NewPCG(1, 2))
	for _, bench := range []struct {
		name  string
		posts int
		depth int
	}{{"hot", 1, 1}, {"hotreplies", 1, 8}, {"spread", posts, 8}} {
		b.Run(bench.name, func(b *testing.B) {
			pool := testkit.Postgres(b).Pool(b, postgres.RoleSystem)
			ctx := context.Background()
			threads := make([][]event.Comment, bench.posts)
			n := 0
			for b.Loop() {
				b.StopTimer()
				events := make([]event.Event, size)
				for i := range events {
					p := r.IntN(bench.posts)
					var parent *event.Comment
					if t := threads[p]; len(t) > 0 && r.IntN(3) > 0 {
						if of := &t[r.IntN(len(t))]; strings.Count(of.Path, "/")+1 < bench.depth {
							parent = of
						}
					}
					c := written(int64(p+1), len(threads[p]), parent)
					threads[p] = append(threads[p], c)
					events[i] = toEvent(1, c)
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
