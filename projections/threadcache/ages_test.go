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
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

// Ten years of comments: posts with 50 top-level comments each. Ids are in the order of time,
// authors are 200,000 at random.
const (
	perPost    = 50
	oldAuthors = 200_000
)

// oldSQL writes the comments from number $1 to $2, of $3 in all.
const oldSQL = `
INSERT INTO child_lists (tenant_id, kind, child_id, object_id, slug, path, author_id, body, author_state, moderation_state, version,
	created_at, updated_at, visible, shown)
SELECT 1, 'comment', (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1,
	3) || '8' || substr(md5(n::text), 4, 15))::uuid,
       n / 50 + 1, slug, lpad(to_hex((extract(epoch FROM at) * 1000000)::bigint), 14, '0') || slug, (random() * 199999)::int + 1,
       repeat('a word or two. ', 12),
       'ACTIVE', 'NONE', 1, at, at, true, true
  FROM (SELECT n, left(md5('s' || n), 8) AS slug, timestamptz '2016-12-30' + n * (interval '3650 days' / $3::bigint) AS at
  FROM generate_series($1::bigint, $2::bigint) n) t
 ORDER BY n`

// BenchmarkAges writes and reads the comments of 400 new posts, beside none, 500,000 and 2,000,000
// old ones. The server has just started, so the pages in its memory are the working set, by index.
// docs/adr/0006-buckets-are-counts.md has the figures.
func BenchmarkAges(b *testing.B) {
	for _, old := range []int{0, 500_000, 2_000_000} {
		b.Run(fmt.Sprint(old), func(b *testing.B) { ages(b, old) })
	}
}

func ages(b *testing.B, old int) {
	const posts, size, batches, active = 400, 4000, 5, 10_000
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
		exec(oldSQL, n, n+99_999, old)
	}
	exec(`INSERT INTO child_totals SELECT 1, 'comment', o, 50 FROM generate_series(1, $1::bigint) o`, old/perPost)
	exec(`INSERT INTO child_buckets SELECT 1, 'comment', o, l, '-infinity', '00000000-0000-0000-0000-000000000000', 50
		FROM generate_series(1, $1::bigint) o, generate_series(0, 1) l`, old/perPost)
	for _, table := range (Projection{}).Tables() {
		if old > 0 { // ANALYZE would tell the planner that an empty table is empty
			exec(`VACUUM (ANALYZE, INDEX_CLEANUP ON) ` + table)
		}
	}
	exec(`CHECKPOINT`)
	owner.Close()
	server.Restart(b)

	r := rand.New(rand.NewPCG(1, 2))
	threads := make([][]event.Child, posts)
	pool, api := db.Pool(b, postgres.RoleSystem), db.Pool(b, postgres.RoleAPI)
	now := time.Date(2026, 12, 30, 3, 4, 5, 0, time.UTC) // late in the year, when the year has the most index entries
	took := time.Duration(0)
	for n := range batches {
		events := make([]event.Event, size)
		for i := range events {
			p := r.IntN(posts)
			var parent *event.Child
			if t := threads[p]; len(t) > 0 && r.IntN(3) > 0 {
				if of := &t[r.IntN(len(t))]; strings.Count(of.Path, "/") < 7 {
					parent = of
				}
			}
			c := written(event.IDOf(old/perPost+p+1), len(threads[p]), parent)
			c.CreatedAt.Time = now.Add(time.Duration(n*size+i) * time.Millisecond)
			c.UpdatedAt, c.Slug = c.CreatedAt, fmt.Sprintf("%08x", r.Uint32())
			c.AuthorID = event.IDOf(r.IntN(active)*(oldAuthors/active) + 1)
			c.ID = fmt.Sprintf("%012x-7%03x-8%03x-%012x", c.CreatedAt.UnixMilli(), r.IntN(4096), r.IntN(4096), r.Int64N(1<<48))
			c.ID = c.ID[:8] + "-" + c.ID[8:]
			c.Path = fmt.Sprintf("%014x%s", c.CreatedAt.UnixMicro(), c.Slug)
			if parent != nil {
				c.ReplyTo, c.Path = parent.ID, parent.Path+"/"+c.Path
			}
			if i%10 == 9 && len(threads[p]) > 0 { // each tenth write edits, deletes or hides a new comment
				of := &threads[p][r.IntN(len(threads[p]))]
				of.Version++
				switch r.IntN(3) {
				case 0:
					of.Body += " edited"
				case 1:
					of.AuthorState, of.Body = event.AuthorDeleted, ""
				case 2:
					of.ModerationState = event.ModerationHidden
				}
				c = *of
			} else {
				threads[p] = append(threads[p], c)
			}
			events[i] = toEvent(1, c)
		}
		began := time.Now()
		if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
				return err
			}
			return New(kinds.Builtin).Apply(ctx, tx, events)
		}); err != nil {
			b.Fatal(err)
		}
		took += time.Since(began)
	}
	b.ReportMetric(size*batches/took.Seconds(), "events/s")
	read := func(fn func(tx pgx.Tx) error) {
		b.Helper()
		if err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{AccessMode: pgx.ReadOnly}, fn); err != nil {
			b.Fatal(err)
		}
	}
	for _, t := range threads {
		read(func(tx pgx.Tx) error {
			c := t[r.IntN(len(t))]
			for _, order := range []Order{Oldest, Newest} {
				if _, err := Page(ctx, tx, "comment", c.Parent, order, nil, 50); err != nil {
					return err
				}
			}
			if _, err := Threaded(ctx, tx, "comment", c.Parent, "", "", 50); err != nil {
				return err
			}
			if _, found, err := BySlug(ctx, tx, "comment", c.Parent, c.Slug); err != nil || !found {
				return fmt.Errorf("permalink: %t, %w", found, err)
			}
			return nil
		})
	}
	report(b, ctx, db, threads, r)
}

func report(b *testing.B, ctx context.Context, db *testkit.DB, threads [][]event.Child, r *rand.Rand) {
	cached := db.CachedPages(b)
	var all int64
	for name, n := range cached {
		if strings.HasPrefix(name, "child_") {
			all += n
		}
	}
	b.ReportMetric(float64(cached["child_lists_author_idx"]), "author-pages")
	b.ReportMetric(float64(cached["child_lists_slug_idx"]), "slug-pages")
	b.ReportMetric(float64(all-cached["child_lists_author_idx"]-cached["child_lists_slug_idx"]), "other-pages")
	b.ReportMetric(0, "ns/op")
	api := db.Pool(b, postgres.RoleAPI)
	authors(b, ctx, api, "active-author", func() event.ID { t := threads[r.IntN(len(threads))]; return t[r.IntN(len(t))].AuthorID })
	authors(b, ctx, api, "any-author", func() event.ID { return event.IDOf(r.Int64N(oldAuthors) + 1) })
}

// authors reads first pages of authors.
func authors(b *testing.B, ctx context.Context, api *pgxpool.Pool, who string, author func() event.ID) {
	const reads = 500
	var took time.Duration
	for range reads {
		if err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			began := time.Now()
			_, err := ByAuthor(ctx, tx, "comment", author(), nil, 50)
			took += time.Since(began)
			return err
		}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((took / reads).Microseconds()), who+"-us")
}

// TestNewCommentsTouchThePagesOfNewComments writes beside ten years of comments by many authors. A
// write must change only the pages of its own rows.
func TestNewCommentsTouchThePagesOfNewComments(t *testing.T) {
	db := testkit.Postgres(t)
	ctx := t.Context()
	const old, young, posts = 40_000, 1000, 10
	owner := db.Pool(t, postgres.RoleOwner)
	for _, sql := range []string{`ALTER TABLE child_lists SET (autovacuum_enabled = false)`,
		strings.NewReplacer("$1", "0", "$2", fmt.Sprint(old-1), "$3", fmt.Sprint(old)).Replace(oldSQL), `CHECKPOINT`} {
		if _, err := owner.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	args := writing(young, func(n int) event.Child {
		c := written(event.IDOf(old/perPost+n%posts+1), n, nil)
		c.CreatedAt.Time = time.Date(2027, 1, 2, 3, 4, 5, n*1000, time.UTC)
		c.ID = fmt.Sprintf("0%x-%04x-7000-8000-%012x", c.CreatedAt.UnixMilli()>>16, c.CreatedAt.UnixMilli()&0xffff, n)
		c.Slug, c.AuthorID = fmt.Sprintf("%08x", r.Uint32()), event.IDOf(r.IntN(oldAuthors)+1)
		c.Path = fmt.Sprintf("%014x%s", c.CreatedAt.UnixMicro(), c.Slug)
		return c
	})
	if err := postgres.InTx(ctx, db.Pool(t, postgres.RoleSystem), pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
			return err
		}
		var raw []byte
		if err := tx.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+childrenSQL, args).Scan(&raw); err != nil {
			return err
		}
		var plans []struct {
			Plan struct {
				Dirtied int `json:"Shared Dirtied Blocks"`
			}
		}
		if err := json.Unmarshal(raw, &plans); err != nil {
			return err
		}
		// The writes change about 60 pages of the table and 10 pages of each of six indexes. An
		// index by slug, or by author without the time, would add some 300 pages.
		if n := plans[0].Plan.Dirtied; n < 50 || n > 200 {
			t.Errorf("%d new comments changed %d pages", young, n)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// writing returns the arguments of childrenSQL for n new comments.
func writing(n int, child func(n int) event.Child) pgx.StrictNamedArgs {
	var (
		tenants, objects, authors, versions = make([]int64, n), make([]event.ID, n), make([]event.ID, n), make([]int64, n)
		names, ids, slugs, paths, bodies    = make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]string, n)
		nothing                             = make([]*string, n)
		states, moderation                  = make([]string, n), make([]string, n)
		times                               = make([]time.Time, n)
		visibles                            = make([]bool, n)
	)
	for i := range n {
		c := child(i)
		tenants[i], names[i], ids[i], objects[i], slugs[i], paths[i], authors[i] = 1, "comment", c.ID, c.Parent, c.Slug,
			c.Path, c.AuthorID
		bodies[i], states[i], moderation[i], versions[i], times[i], visibles[i] = c.Body, c.AuthorState, c.ModerationState,
			c.Version, c.CreatedAt.Time, true
	}
	return pgx.StrictNamedArgs{"tenants": tenants, "kinds": names, "ids": ids, "objects": objects, "parents": nothing,
		"slugs": slugs, "paths": paths,
		"authors": authors, "bodies": bodies, "attributes": nothing, "author_states": states,
		"moderation_states": moderation, "versions": versions, "created_ats": times, "updated_ats": times, "visibles": visibles}
}

// TestAnAuthorsPagesGoBackThroughTheYears reads, page by page, an author who wrote in some years,
// and a lot in one of them.
func TestAnAuthorsPagesGoBackThroughTheYears(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	ctx := t.Context()
	const lots = 400
	var events []event.Event
	var want []string
	write := func(author event.ID, at time.Time) {
		c := written("5", len(events), nil)
		c.AuthorID, c.CreatedAt.Time, c.UpdatedAt.Time = author, at, at
		c.Path = fmt.Sprintf("%014x%s", at.UnixMicro(), c.Slug)
		if author == "4" {
			c.AuthorState = event.AuthorDeleted
		}
		if author == "1" {
			want = append(want, c.ID)
		}
		events = append(events, toEvent(1, c))
	}
	for year := 2016; year <= 2026; year++ {
		n := map[int]int{2018: lots, 2019: 3, 2024: 1, 2026: 2}[year]
		for i := range n {
			write("1", time.Date(year, 1, 1, 0, i, 0, 0, time.UTC))
			write("4", time.Date(year, 1, 1, 0, i, 0, 0, time.UTC)) // and deletes them: the index has none of these
		}
		write("2", time.Date(year, 6, 1, 0, 0, 0, 0, time.UTC))
		if n > 0 { // the last moment of the year, and the first moment of the next
			write("1", time.Date(year+1, 1, 1, 0, 0, 0, -1000, time.UTC))
		}
	}
	slices.Reverse(want)
	if err := apply(ctx, pool, New(kinds.Builtin), events); err != nil {
		t.Fatal(err)
	}
	if err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		for _, limit := range []int{1, 2, 3, 7, 500} {
			var got []string
			for after := (*Key)(nil); ; {
				page, err := ByAuthor(ctx, tx, "comment", "1", after, limit)
				if err != nil {
					return err
				}
				for _, c := range page {
					got = append(got, c.ID)
					after = &Key{c.CreatedAt.Time, c.ID}
				}
				if len(page) < limit {
					break
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("pages of %d: %d comments, want %d:\n%q\n%q", limit, len(got), len(want), got, want)
			}
		}
		for _, at := range []struct {
			author event.ID
			limit  int
			rows   float64
		}{{"1", 2, 50}, {"1", 10, 70}, {"2", 50, 11 + 2}, {"3", 50, 2}, {"4", 50, 2}} {
			rows, indexes, err := explain(ctx, tx, byAuthorSQL,
				pgx.StrictNamedArgs{"kind": "comment", "author": at.author, "year": 9999, "created_at": "infinity",
					"child_id": zeroID, "limit": at.limit})
			if err != nil {
				return err
			}
			if rows["child_lists"] > at.rows || !indexes["child_lists_author_idx"] || len(indexes) != 1 {
				t.Errorf("a page of %d of author %s reads %v by %v", at.limit, at.author, rows, indexes)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
