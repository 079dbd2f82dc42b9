package history

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
	"github.com/tidings/tidings/kinds"
)

// BenchmarkAges records the creation of 20,000 comments by 10,000 of 200,000 authors, beside empty
// histories and beside the histories of 1,000,000 comments. The server has just started, so the
// pages in its memory are the working set. docs/adr/0006-buckets-are-counts.md has the figures.
func BenchmarkAges(b *testing.B) {
	for _, old := range []int{0, 1_000_000} {
		b.Run(fmt.Sprint(old), func(b *testing.B) { ages(b, old) })
	}
}

func ages(b *testing.B, old int) {
	const size, batches, authors, active = 4000, 5, 200_000, 10_000
	server := testkit.PostgresProcess(b, "shared_buffers=3GB", "autovacuum=off", "max_wal_size=20GB", "checkpoint_timeout=1h")
	db := server.DB(b)
	ctx := context.Background()
	owner := db.Pool(b, postgres.RoleOwner)
	exec := func(sql string, args ...any) {
		b.Helper()
		if _, err := owner.Exec(ctx, sql, args...); err != nil {
			b.Fatal(err)
		}
	}
	for n := 0; n < old; n += 100_000 {
		exec(`INSERT INTO comment_history (tenant_id, object, metadata)
		  SELECT 1, jsonb_build_object('comment_id', '01' || lpad(to_hex(n), 6, '0') || '-0000-7000-8000-000000000000', 'version', 1,
		  'author_id', ((random() * ($3::int - 1))::int + 1)::text, 'body', repeat('a word or two. ', 12)),
		         jsonb_build_object('version_id', n + 1, 'version_state', 'LATEST', 'created_by', 'x', 'last_update_time',
		         '2026-01-01T00:00:00.000000Z')
		    FROM generate_series($1::int, $2::int) n`, n, n+99_999, authors)
	}
	exec(`VACUUM (ANALYZE) comment_history`)
	exec(`CHECKPOINT`)
	owner.Close()
	server.Restart(b)
	pool, r := db.Pool(b, postgres.RoleSystem), rand.New(rand.NewPCG(1, 2))
	for n := range batches {
		events := make([]event.Event, size)
		for i := range events {
			c := event.Child{ID: fmt.Sprintf("02000000-0000-7000-8000-%012d", n*size+i), Parent: "5",
				AuthorID: event.IDOf(r.IntN(active)*(authors/active) + 1), Body: strings.Repeat("a word or two. ", 12),
				AuthorState: event.AuthorActive, ModerationState: event.ModerationNone, Version: 1, Actor: "bench"}
			c.CreatedAt.Time, c.UpdatedAt.Time = start.Add(time.Duration(i)), start.Add(time.Duration(i))
			events[i] = toEvent(event.AggregateComment, event.Created, c)
		}
		if err := postgres.InTx(ctx, pool, pgx.TxOptions{},
			func(tx pgx.Tx) error { return New(kinds.Builtin).Apply(ctx, tx, events) }); err != nil {
			b.Fatal(err)
		}
	}
	cached := db.CachedPages(b)
	for unit, name := range map[string]string{"table-pages": "comment_history", "key-pages": "comment_history_pkey",
		"head-pages":    "comment_history_head_idx",
		"version-pages": "comment_history_version_idx", "author-pages": "comment_history_author_idx"} {
		b.ReportMetric(float64(cached[name]), unit)
	}
	b.ReportMetric(0, "ns/op")
}
