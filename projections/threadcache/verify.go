package threadcache

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
)

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

// truthSQL reads every comment of the truth, archived or not, in the order of its thread. What the projection derives is computed here, in Go.
// Index: comments_path_key and comments_archive_path_key, all of them, merged.   Locks: none.
const truthSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, path, comment_id::text, coalesce(parent_id::text, ''), slug, author_id, body,
       author_state, moderation_state, version, created_at, updated_at, false, 0, false
  FROM all_comments ORDER BY tenant_id, post_id, path`

// rowsSQL reads every comment of the projection likewise.
// Index: thread_comments_path_idx, all of it.   Locks: none.
const rowsSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, path, comment_id::text, coalesce(parent_id::text, ''), slug, author_id, body,
       author_state, moderation_state, version, created_at, updated_at, visible, visible_descendants, shown
  FROM thread_comments ORDER BY tenant_id, post_id, path`

// Verify compares every comment with the truth's, and visible, visible_descendants and shown with what the truth makes them; then
// what each bucket and group counts, and the totals and settings of each thread. It reports every difference and returns how many
// comments it compared. What has not been applied yet is a difference too, so it is run when the consumer's lag is 0. Both pools
// act as the system role. Memory is one row per level of one thread.
func (Projection) Verify(ctx context.Context, truth, projection *pgxpool.Pool, report func(projections.Difference)) (checked int64, err error) {
	f := fold{report: report}
	err = projections.Compare(ctx, truth, projection, truthSQL, rowsSQL,
		func(a, b *commentRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.PostID, b.PostID), cmp.Compare(a.Path, b.Path))
		},
		func(want, got *commentRow) error {
			checked++
			f.add(want, got)
			return nil
		})
	if err != nil {
		return checked, fmt.Errorf("verify threads: %w", err)
	}
	f.finish(nil)
	if err := verifyRanges(ctx, truth, projection, report); err != nil {
		return checked, fmt.Errorf("verify the counts of threads: %w", err)
	}
	if err := verifyThreads(ctx, truth, projection, report); err != nil {
		return checked, fmt.Errorf("verify totals and settings of threads: %w", err)
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
		w.Visible = event.Visible(w.AuthorState, w.ModerationState)
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
	if !event.BodyTravels(want.AuthorState, want.ModerationState) {
		want.Body = "" // the truth keeps it, no event has it
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

// placeRow is a comment of the truth in the chronological order, or the beginning of a bucket, of a group, or of both.
type placeRow struct {
	TenantID, PostID             int64
	At                           time.Time
	ID                           string
	AuthorState, ModerationState string
	Bucket, Group                *int // visible, of what begins here
}

// truthPlacesSQL reads every comment of the truth in the chronological order.
// Index: none: all rows, sorted.   Locks: none.
const truthPlacesSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, created_at, comment_id::text, author_state, moderation_state, NULL::int, NULL::int
  FROM all_comments ORDER BY tenant_id, post_id, created_at, comment_id`

// rangesSQL reads where buckets and groups begin. -infinity has no time in Go: the year 1 stands for it.
// Index: thread_buckets_pkey, all of it.   Locks: none.
const rangesSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, greatest(first_at, '0001-01-01 00:00:00+00') AS at, first_id::text, '', '', b.visible, g.visible
  FROM (SELECT * FROM thread_buckets WHERE level = 0) b
  FULL JOIN (SELECT * FROM thread_buckets WHERE level = 1) g USING (tenant_id, post_id, first_at, first_id)
 ORDER BY tenant_id, post_id, first_at, first_id`

func verifyRanges(ctx context.Context, truth, projection *pgxpool.Pool, report func(projections.Difference)) error {
	bucket, group := &counting{level: "bucket", report: report}, &counting{level: "group", report: report}
	err := projections.Compare(ctx, truth, projection, truthPlacesSQL, rangesSQL,
		func(a, b *placeRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.PostID, b.PostID), a.At.Compare(b.At), cmp.Compare(a.ID, b.ID))
		},
		func(want, got *placeRow) error {
			if got != nil {
				if got.Bucket != nil {
					bucket.begin(got, got.Bucket)
				}
				if got.Group != nil {
					group.begin(got, got.Group)
				}
			}
			if want != nil && event.Visible(want.AuthorState, want.ModerationState) {
				bucket.count(want)
				group.count(want)
			}
			return nil
		})
	bucket.end()
	group.end()
	return err
}

// counting counts the visible comments of the truth in the range that began last.
type counting struct {
	level  string
	report func(projections.Difference)
	from   *placeRow // nil before the first
	got    *int      // nil when the projection has no range there
	want   int
}

func (c *counting) begin(from *placeRow, got *int) {
	c.end()
	c.from, c.got, c.want = from, got, 0
}

func (c *counting) count(comment *placeRow) {
	if c.from == nil || c.from.TenantID != comment.TenantID || c.from.PostID != comment.PostID {
		c.begin(comment, nil)
	}
	c.want++
}

func (c *counting) end() {
	if c.from == nil || c.got != nil && *c.got == c.want {
		return
	}
	d := projections.Difference{
		Projection: Name, TenantID: c.from.TenantID, Field: "visible", Want: fmt.Sprint(c.want), Got: "absent",
		Entity: fmt.Sprintf("%s from %s %s of post %d", c.level, c.from.At.UTC().Format(event.TimeFormat), c.from.ID, c.from.PostID),
		Key:    projections.Key{Type: event.AggregateComment, TenantID: c.from.TenantID, Aggregate: c.from.PostID},
	}
	if c.got != nil {
		d.Got = fmt.Sprint(*c.got)
	}
	c.report(d)
}

// threadRow is what is known of a thread besides its comments.
type threadRow struct {
	TenantID, PostID     int64
	Total                int64
	Locked, Premoderated bool
	Title                string
	Version              int64
}

// truthThreadsSQL counts the truth's comments per post and reads its settings.
// Index: comments_path_key and comments_archive_path_key, all of them; threads_head_idx; threads_purged_pkey.   Locks: none.
const truthThreadsSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, coalesce(c.total, 0), coalesce((t.object ->> 'locked')::boolean, false),
       coalesce((t.object ->> 'premoderated')::boolean, false), coalesce(t.object ->> 'title', ''), coalesce((t.object ->> 'version')::bigint, 0)
  FROM (SELECT tenant_id, post_id, count(*) AS total FROM all_comments GROUP BY tenant_id, post_id) c
  FULL JOIN (` + settledSQL + `) t USING (tenant_id, post_id)
 ORDER BY tenant_id, post_id`

// threadsSQL reads the projection's likewise.
// Index: thread_totals_pkey, thread_settings_pkey, all of them.   Locks: none.
const threadsSQL = `
SELECT /* threadcache.verify */ tenant_id, post_id, coalesce(total, 0), coalesce(locked, false), coalesce(premoderated, false), coalesce(title, ''),
       coalesce(version, 0)
  FROM thread_totals FULL JOIN thread_settings USING (tenant_id, post_id)
 ORDER BY tenant_id, post_id`

func verifyThreads(ctx context.Context, truth, projection *pgxpool.Pool, report func(projections.Difference)) error {
	return projections.Compare(ctx, truth, projection, truthThreadsSQL, threadsSQL,
		func(a, b *threadRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.PostID, b.PostID))
		},
		func(want, got *threadRow) error {
			of := cmp.Or(want, got)
			want, got = cmp.Or(want, &threadRow{}), cmp.Or(got, &threadRow{}) // what is absent is nothing
			for _, f := range []struct {
				field     string
				want, got any
			}{
				{"total", want.Total, got.Total},
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
			return nil
		})
}
