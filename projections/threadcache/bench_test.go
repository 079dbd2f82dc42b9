package threadcache

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

// asConsumersDoSQL is the first statement of a consumer's transaction.
const asConsumersDoSQL = `SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_seqscan', 'off', true),
       set_config('random_page_cost', '1.1', true), set_config('jit', 'off', true)`

// written returns comment n of a post, half a millisecond after the one before it.
func written(post event.ID, n int, parent *event.Child) event.Child {
	c := event.Child{
		ID: fmt.Sprintf("00000000-0000-7000-%04x-%012x", 0x8000+testkit.Number(post)%0x4000, n), Parent: post, Slug: fmt.Sprintf("%08x", n),
		AuthorID: event.IDOf(n%1000 + 1), Body: strings.Repeat("a word or two. ", 12), AuthorState: event.AuthorActive,
		ModerationState: event.ModerationNone, Version: 1, Actor: "bench",
	}
	c.CreatedAt.Time = start.Add(time.Duration(n) * 500 * time.Microsecond)
	c.UpdatedAt = c.CreatedAt
	c.Path = fmt.Sprintf("%014x%s", c.CreatedAt.UnixMicro(), c.Slug)
	if parent != nil {
		c.ReplyTo, c.Path = parent.ID, parent.Path+"/"+c.Path
	}
	return c
}

// BenchmarkApply applies batches of 4,000 new comments of 180 bytes: top-level comments of one
// post, random replies in one post, random replies in 400 posts, and messages of one conversation.
// events/s measures the projection only: decoding the payload, rows, counts.
func BenchmarkApply(b *testing.B) {
	const size, posts = 4000, 400
	r := rand.New(rand.NewPCG(1, 2))
	for _, bench := range []struct {
		name  string
		posts int
		depth int
		kind  string
	}{{"hot", 1, 1, event.AggregateComment}, {"hotreplies", 1, 8, event.AggregateComment}, {"spread", posts, 8, event.AggregateComment},
		{"flat", 1, 1, "message"}} {
		b.Run(bench.name, func(b *testing.B) {
			pool := testkit.Postgres(b).Pool(b, postgres.RoleSystem)
			ctx := context.Background()
			threads := make([][]event.Child, bench.posts)
			n := 0
			for b.Loop() {
				b.StopTimer()
				events := make([]event.Event, size)
				for i := range events {
					p := r.IntN(bench.posts)
					var parent *event.Child
					if t := threads[p]; len(t) > 0 && r.IntN(3) > 0 {
						if of := &t[r.IntN(len(t))]; strings.Count(of.Path, "/")+1 < bench.depth {
							parent = of
						}
					}
					c := written(event.IDOf(p+1), len(threads[p]), parent)
					threads[p] = append(threads[p], c)
					kind := kinds.Builtin().Children[bench.kind]
					if !kind.Threaded {
						c.Slug, c.Path = "", ""
					}
					events[i] = eventOf(b, kind, c)
					n++
				}
				b.StartTimer()
				if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
						return err
					}
					return New(kinds.Builtin).Apply(ctx, tx, events)
				}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// documentsSQL stores buckets as documents, for comparison: one row with all visible comments of
// the bucket.
const documentsSQL = `
CREATE TABLE thread_documents AS
SELECT b.tenant_id, b.object_id, b.first_at, b.first_id,
       (SELECT jsonb_agg(jsonb_build_object('child_id', c.child_id, 'object_id', c.object_id::text, 'slug', c.slug, 'path', c.path,
       'author_id', c.author_id::text,
                 'body', c.body, 'author_state', c.author_state, 'moderation_state', c.moderation_state, 'version', c.version,
                 'created_at', c.created_at, 'updated_at', c.updated_at) ORDER BY c.created_at, c.child_id)
          FROM child_lists c WHERE c.tenant_id = b.tenant_id AND c.object_id = b.object_id AND c.visible
           AND (c.created_at, c.child_id) >= (b.first_at, b.first_id) AND (c.created_at, c.child_id) < (b.next_at, b.next_id)) AS comments
  FROM (SELECT *, lead(first_at, 1, 'infinity') OVER w AS next_at, lead(first_id, 1, first_id) OVER w AS next_id
          FROM child_buckets WHERE level = 0 WINDOW w AS (PARTITION BY tenant_id, object_id ORDER BY first_at, first_id)) b`

// skipDocumentsSQL is skipOldestSQL with documents: it reads the bucket's document and the next
// one.
var skipDocumentsSQL = skipOldestSQL[:strings.Index(skipOldestSQL, "SELECT /* threadcache")] + `
SELECT comments, (SELECT @skip - before FROM bucket_at) FROM thread_documents
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND object_id = @object
   AND (first_at, first_id) >= ((SELECT first_at FROM bucket_at), (SELECT first_id FROM bucket_at))
 ORDER BY first_at, first_id LIMIT 2`

func skipDocuments(ctx context.Context, tx pgx.Tx, skip int64, limit int) (page []event.Child, err error) {
	rows, _ := tx.Query(ctx, skipDocumentsSQL, pgx.StrictNamedArgs{"kind": "comment", "object": 1, "skip": skip})
	var document []byte
	var rest int
	_, err = pgx.ForEachRow(rows, []any{&document, &rest}, func() error {
		var comments []event.Child
		if err := json.Unmarshal(document, &comments); err != nil {
			return err
		}
		if page == nil {
			comments = comments[rest:]
		}
		page = append(page, comments[:min(len(comments), limit-len(page))]...)
		return nil
	})
	return page, err
}

// BenchmarkPages reads pages of 50 of one post with 1,000,000 comments of 180 bytes, 10,000 of
// which are deleted. It reads the first page and pages at random places between 850,000 and
// 950,000. It reads the latter from documents as well, for the comparison in
// docs/adr/0006-buckets-are-counts.md. Each page has its own transaction as in the API. The
// benchmark reads the four kinds of pages in turn.
func BenchmarkPages(b *testing.B) {
	const size, batch, deleted, limit = 1_000_000, 4000, 10_000, 50
	db := testkit.Postgres(b)
	pool, api := db.Pool(b, postgres.RoleSystem), db.Pool(b, postgres.RoleAPI)
	ctx := context.Background()
	r := rand.New(rand.NewPCG(1, 2))
	began := time.Now()
	load := func(events []event.Event) {
		if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
				return err
			}
			return New(kinds.Builtin).Apply(ctx, tx, events)
		}); err != nil {
			b.Fatal(err)
		}
	}
	for n := 0; n < size; n += batch {
		events := make([]event.Event, batch)
		for i := range events {
			events[i] = toEvent(1, written("1", n+i, nil))
		}
		load(events)
	}
	b.Logf("%d comments in one post: %.0f events/s", size, size/time.Since(began).Seconds())
	began = time.Now()
	gone := r.Perm(size)[:deleted]
	for n := 0; n < deleted; n += batch / 2 {
		var events []event.Event
		for _, i := range gone[n : n+batch/2] {
			c := written("1", i, nil)
			c.Version, c.AuthorState, c.Body = 2, event.AuthorDeleted, ""
			events = append(events, toEvent(1, c))
		}
		load(events)
	}
	b.Logf("%d deletions: %.0f events/s", deleted, deleted/time.Since(began).Seconds())
	owner := db.Pool(b, postgres.RoleOwner)
	for _, sql := range []string{documentsSQL, `ALTER TABLE thread_documents ADD PRIMARY KEY (tenant_id, object_id, first_at, first_id)`,
		`GRANT SELECT ON thread_documents TO tidings_api`, `VACUUM ANALYZE child_lists, child_buckets, thread_documents`} {
		if _, err := owner.Exec(ctx, sql); err != nil {
			b.Fatal(err)
		}
	}
	deep := func() int64 { return 850_000 + r.Int64N(100_000) }
	reads := []struct {
		name string
		read func(tx pgx.Tx) ([]event.Child, error)
		took []time.Duration
	}{
		{name: "first", read: func(tx pgx.Tx) ([]event.Child, error) { return Page(ctx, tx, "comment", "1", Oldest, nil, limit) }},
		{name: "deep", read: func(tx pgx.Tx) ([]event.Child, error) { return Skip(ctx, tx, "comment", "1", Oldest, deep(), limit) }},
		{name: "deepnewest", read: func(tx pgx.Tx) ([]event.Child, error) { return Skip(ctx, tx, "comment", "1", Newest, deep(), limit) }},
		{name: "documents", read: func(tx pgx.Tx) ([]event.Child, error) { return skipDocuments(ctx, tx, deep(), limit) }},
	}
	for b.Loop() {
		for i := range reads {
			began := time.Now()
			err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
				page, err := reads[i].read(tx)
				if err == nil && len(page) != limit {
					err = fmt.Errorf("%s: %d comments", reads[i].name, len(page))
				}
				return err
			})
			if err != nil {
				b.Fatal(err)
			}
			reads[i].took = append(reads[i].took, time.Since(began))
		}
	}
	for _, r := range reads {
		slices.Sort(r.took)
		b.ReportMetric(float64(r.took[len(r.took)/2].Microseconds()), r.name+"-p50-us")
	}
}
