package threadcache

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// commentRow is a comment with what the projection derives; of the truth's, that is computed here, in Go.
type commentRow struct {
	TenantID, PostID             int64
	Path, CommentID, ParentID    string
	Slug                         string
	AuthorID                     int64
	Body                         string
	AuthorState, ModerationState string
	Version                      int64
	CreatedAt, UpdatedAt         time.Time
	Visible                      bool
	VisibleDescendants           int
	Shown                        bool
}

func wanted(s *store.State[event.Comment]) *commentRow {
	c := s.Object
	return &commentRow{s.TenantID, int64(c.PostID), c.Path, c.CommentID, c.ParentID, c.Slug, int64(c.AuthorID), c.Body, c.AuthorState, c.ModerationState,
		c.Version, c.CreatedAt.Time, c.UpdatedAt.Time, c.Visible(), 0, false}
}

func (r *commentRow) compare(o *commentRow) int {
	return cmp.Or(cmp.Compare(r.TenantID, o.TenantID), cmp.Compare(r.PostID, o.PostID), cmp.Compare(r.Path, o.Path))
}

// rowsSQL reads the comments of the projection behind a place in the order of their threads; a limit of NULL is none.
// Index: thread_comments_path_idx, one range.   Locks: none.
const rowsSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, path, comment_id::text, coalesce(parent_id::text, ''), slug, author_id, body,
       author_state, moderation_state, version, created_at, updated_at, visible, visible_descendants, shown
  FROM thread_comments WHERE (tenant_id, post_id, path) > (@tenant::bigint, @post::bigint, @path::text COLLATE "C")
 ORDER BY tenant_id, post_id, path LIMIT @limit::bigint`

func rows(ctx context.Context, projection *pgxpool.Pool, after commentRow, limit *int) iter.Seq2[*commentRow, error] {
	return projections.Rows[commentRow](ctx, projection, rowsSQL,
		pgx.StrictNamedArgs{"tenant": after.TenantID, "post": after.PostID, "path": after.Path, "limit": limit})
}

// Verify compares every comment with the truth's, and visible, visible_descendants and shown with what the truth makes them; then
// what each bucket and group counts, and the totals and settings of each thread. It reports every difference and returns how many
// comments it compared. What has not been applied yet is a difference too, so it is run when the consumer's lag is 0. Both pools
// act as the system role. Memory is one row per level of one thread, and its buckets.
func (Projection) Verify(ctx context.Context, truth, projection *pgxpool.Pool, report func(projections.Difference)) (checked int64, err error) {
	f, n := fold{report: report}, counting{report: report}
	next, stop := iter.Pull2(projections.Rows[countedRow](ctx, projection, countedSQL, nil))
	defer stop()
	n.next = next
	err = projections.Compare(projections.Of(store.ScanThreads(ctx, truth, nil, 0), wanted), rows(ctx, projection, commentRow{}, nil), (*commentRow).compare,
		func(want, got *commentRow) {
			checked++
			f.add(want, got)
			if want != nil {
				n.add(want)
			}
		})
	if err != nil {
		return checked, fmt.Errorf("verify threads: %w", err)
	}
	f.finish(nil)
	if err := n.finish(); err != nil {
		return checked, fmt.Errorf("verify the counts of threads: %w", err)
	}
	if err := verifySettings(ctx, truth, projection, report); err != nil {
		return checked, fmt.Errorf("verify settings of threads: %w", err)
	}
	return checked, nil
}

// fold takes the comments in the order of their threads. The stack holds the ancestors of the last one: a comment is finished,
// its visible descendants known, when something comes that is not below it.
type fold struct {
	report func(projections.Difference)
	stack  []open
}

type open struct{ want, got *commentRow } // want.VisibleDescendants grows

func (f *fold) add(want, got *commentRow) {
	if want == nil {
		f.differ(got, "row", "absent", "present")
		return
	}
	f.finish(want)
	f.stack = append(f.stack, open{want, got})
}

// finish compares and pops what is not an ancestor of next.
func (f *fold) finish(next *commentRow) {
	for len(f.stack) > 0 {
		top := f.stack[len(f.stack)-1]
		w := top.want
		if next != nil && w.TenantID == next.TenantID && w.PostID == next.PostID && strings.HasPrefix(next.Path, w.Path+"/") {
			return
		}
		f.stack = f.stack[:len(f.stack)-1]
		w.Shown = w.Visible || w.VisibleDescendants > 0
		if len(f.stack) > 0 {
			parent := f.stack[len(f.stack)-1].want
			parent.VisibleDescendants += w.VisibleDescendants
			if w.Visible {
				parent.VisibleDescendants++
			}
		}
		f.compare(w, top.got)
	}
}

func (f *fold) compare(want, got *commentRow) {
	if got == nil {
		f.differ(want, "row", "present", "absent")
		return
	}
	at := func(t time.Time) string { return t.UTC().Format(event.TimeFormat) }
	for _, c := range []struct {
		field     string
		want, got any
	}{
		{"comment_id", want.CommentID, got.CommentID},
		{"parent_id", want.ParentID, got.ParentID},
		{"slug", want.Slug, got.Slug},
		{"author_id", want.AuthorID, got.AuthorID},
		{"author_state", want.AuthorState, got.AuthorState},
		{"moderation_state", want.ModerationState, got.ModerationState},
		{"version", want.Version, got.Version},
		{"created_at", at(want.CreatedAt), at(got.CreatedAt)},
		{"updated_at", at(want.UpdatedAt), at(got.UpdatedAt)},
		{"visible", want.Visible, got.Visible},
		{"visible_descendants", want.VisibleDescendants, got.VisibleDescendants},
		{"shown", want.Shown, got.Shown},
	} {
		if c.want != c.got {
			f.differ(want, c.field, fmt.Sprint(c.want), fmt.Sprint(c.got))
		}
	}
	if want.Body != got.Body { // a body is nobody's to print
		f.differ(want, "body", fmt.Sprintf("%d bytes", len(want.Body)), fmt.Sprintf("another %d bytes", len(got.Body)))
	}
}

func (f *fold) differ(of *commentRow, field, want, got string) {
	f.report(projections.Difference{
		Projection: Name, TenantID: of.TenantID, Entity: fmt.Sprintf("comment %s of post %d", of.CommentID, of.PostID), Field: field, Want: want, Got: got,
		Key: projections.Key{Type: event.AggregateComment, TenantID: of.TenantID, Aggregate: of.PostID},
	})
}

// countedRow is what the projection counts of a thread: its comments, or the visible ones of a bucket or group, which begins at At and ID.
type countedRow struct {
	TenantID, PostID int64
	Level            int // totals, 0 (buckets) or 1 (groups)
	At               time.Time
	ID               string
	N                int64
}

const totals = -1 // the Level of all comments of a thread

// countedSQL reads all counts. -infinity has no time in Go: the year 1 stands for it.
// Index: none: a hundredth of the comments, sorted.   Locks: none.
const countedSQL = `
SELECT /* threadcache.verify */ * FROM (
  SELECT tenant_id, post_id, -1 AS level, '0001-01-01 00:00:00+00'::timestamptz AS at, '' AS id, total FROM thread_totals
   UNION ALL
  SELECT tenant_id, post_id, level, greatest(first_at, '0001-01-01 00:00:00+00'), first_id::text, visible FROM thread_buckets) counted
 ORDER BY tenant_id, post_id, level, at, id`

// counting compares what the projection counts of one thread after the other with the truth's comments, which come in the order of threads.
// A comment is in the last range that begins before it; one before all ranges is in one that the projection lacks.
type counting struct {
	report func(projections.Difference)
	next   func() (*countedRow, error, bool)
	ahead  *countedRow // not of the thread yet; nil at the end
	err    error       // which ended it

	tenant, post int64
	got          [3][]*countedRow // by Level, of the thread
	want         [3][]int64
	lacks        [3]*countedRow // that the projection does not have
}

// add counts a comment of the truth.
func (c *counting) add(w *commentRow) {
	if w.TenantID != c.tenant || w.PostID != c.post {
		c.begin(w.TenantID, w.PostID)
	}
	for i, got := range c.got {
		if level := i + totals; level != totals && !w.Visible {
			return
		}
		n, same := slices.BinarySearchFunc(got, w, func(r *countedRow, w *commentRow) int {
			return cmp.Or(r.At.Compare(w.CreatedAt), cmp.Compare(r.ID, w.CommentID))
		})
		if same {
			n++
		}
		if n > 0 {
			c.want[i][n-1]++
			continue
		}
		lack := c.lacks[i]
		if lack == nil {
			lack = &countedRow{At: w.CreatedAt, ID: w.CommentID}
			c.lacks[i] = lack
		}
		if cmp.Or(w.CreatedAt.Compare(lack.At), cmp.Compare(w.CommentID, lack.ID)) < 0 {
			lack.At, lack.ID = w.CreatedAt, w.CommentID
		}
		lack.N++
	}
}

// begin ends the thread, and those up to the next one, of which the truth has nothing.
func (c *counting) begin(tenant, post int64) {
	if c.tenant == 0 {
		c.ahead, c.err, _ = c.next()
	}
	c.end()
	for c.ahead != nil && cmp.Or(cmp.Compare(c.ahead.TenantID, tenant), cmp.Compare(c.ahead.PostID, post)) < 0 {
		c.load(c.ahead.TenantID, c.ahead.PostID)
		c.end()
	}
	c.load(tenant, post)
}

// load takes what the projection counts of the thread.
func (c *counting) load(tenant, post int64) {
	*c = counting{report: c.report, next: c.next, ahead: c.ahead, err: c.err, tenant: tenant, post: post}
	for c.ahead != nil && c.ahead.TenantID == tenant && c.ahead.PostID == post {
		i := c.ahead.Level - totals
		c.got[i], c.want[i] = append(c.got[i], c.ahead), append(c.want[i], 0)
		c.ahead, c.err, _ = c.next()
	}
}

// end compares the counts of the thread.
func (c *counting) end() {
	for i, got := range c.got {
		if lack := c.lacks[i]; lack != nil {
			c.differ(i+totals, lack, lack.N, map[bool]string{true: "0", false: "absent"}[i+totals == totals])
		}
		for n, r := range got {
			if r.N != c.want[i][n] {
				c.differ(i+totals, r, c.want[i][n], fmt.Sprint(r.N))
			}
		}
	}
}

func (c *counting) differ(level int, r *countedRow, want int64, got string) {
	if c.err != nil {
		return // what is not read is not known
	}
	d := projections.Difference{Projection: Name, TenantID: c.tenant, Field: "visible", Want: fmt.Sprint(want), Got: got,
		Key: projections.Key{Type: event.AggregateComment, TenantID: c.tenant, Aggregate: c.post}}
	if level == totals {
		d.Entity, d.Field = fmt.Sprintf("thread of post %d", c.post), "total"
	} else {
		d.Entity = fmt.Sprintf("%s from %s %s of post %d", [...]string{"bucket", "group"}[level], r.At.UTC().Format(event.TimeFormat), r.ID, c.post)
	}
	c.report(d)
}

func (c *counting) finish() error {
	c.begin(math.MaxInt64, math.MaxInt64)
	return c.err
}

// settingsRow is what is set for a thread.
type settingsRow struct {
	TenantID, PostID     int64
	Locked, Premoderated bool
	Title                string
	Version              int64
}

// settingsRowsSQL reads the projection's settings.
// Index: thread_settings_pkey, all of it.   Locks: none.
const settingsRowsSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, locked, premoderated, title, version FROM thread_settings ORDER BY tenant_id, post_id`

func verifySettings(ctx context.Context, truth, projection *pgxpool.Pool, report func(projections.Difference)) error {
	return projections.Compare(projections.Of(store.ScanSettings(ctx, truth, nil, 0), func(s *store.State[event.Thread]) *settingsRow {
		t := s.Object
		return &settingsRow{s.TenantID, int64(t.PostID), t.Locked, t.Premoderate, t.Title, t.Version}
	}), projections.Rows[settingsRow](ctx, projection, settingsRowsSQL, nil),
		func(a, b *settingsRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.PostID, b.PostID))
		},
		func(want, got *settingsRow) {
			of := cmp.Or(want, got)
			want, got = cmp.Or(want, &settingsRow{}), cmp.Or(got, &settingsRow{}) // what is absent is nothing
			for _, f := range []struct {
				field     string
				want, got any
			}{
				{"locked", want.Locked, got.Locked},
				{"premoderated", want.Premoderated, got.Premoderated},
				{"title", want.Title, got.Title},
				{"settings version", want.Version, got.Version},
			} {
				if f.want != f.got {
					report(projections.Difference{Projection: Name, TenantID: of.TenantID, Entity: fmt.Sprintf("thread of post %d", of.PostID),
						Field: f.field, Want: fmt.Sprint(f.want), Got: fmt.Sprint(f.got),
						Key: projections.Key{Type: event.AggregateThread, TenantID: of.TenantID, Aggregate: of.PostID}})
				}
			}
		})
}
