package threadcache

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// childRow is a child with the columns that the projection derives. For a child of the truth,
// Verify computes these in Go.
type childRow struct {
	TenantID                     int64
	ObjectID                     event.ID
	Path, ChildID, ParentID      string
	Slug                         string
	AuthorID                     event.ID
	Body                         string
	Attributes                   json.RawMessage
	AuthorState, ModerationState string
	Version                      int64
	CreatedAt, UpdatedAt         time.Time
	Visible                      bool
	VisibleDescendants           int
	Shown                        bool

	versions int64 // of the child and of all children below it, added up
}

func wanted(s *store.State[event.Child]) *childRow {
	c := s.Object
	return &childRow{s.TenantID, c.Parent, c.Path, c.ID, c.ReplyTo, c.Slug, c.AuthorID, c.Body, c.Attributes,
		c.AuthorState, c.ModerationState, c.Version, c.CreatedAt.Time, c.UpdatedAt.Time, c.Visible(), 0, false, c.Version}
}

// order compares two children in the order in which Verify reads a kind: by thread, or by id.
func order(k kinds.Child) func(a, b *childRow) int {
	if k.Threaded {
		return func(a, b *childRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.ObjectID, b.ObjectID), cmp.Compare(a.Path, b.Path))
		}
	}
	return func(a, b *childRow) int {
		return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.ChildID, b.ChildID))
	}
}

// rowsSQL reads the children of a kind after a place, tenant by tenant, because keys have the
// tenant before the kind. A NULL limit means no limit. Index: child_lists_pkey, a probe per tenant;
// then the index of the order, one range. Locks: none.
func rowsSQL(behind, order string) string {
	return `
WITH RECURSIVE tenants AS (
  (SELECT tenant_id FROM child_lists WHERE tenant_id >= @tenant::bigint ORDER BY tenant_id LIMIT 1)
  UNION ALL
  SELECT (SELECT c.tenant_id FROM child_lists c WHERE c.tenant_id > t.tenant_id ORDER BY c.tenant_id LIMIT 1) FROM tenants t
  WHERE t.tenant_id IS NOT NULL
)
SELECT /* threadcache.verify */ t.tenant_id, page.*
  FROM tenants t
 CROSS JOIN LATERAL (
   SELECT object_id, coalesce(path, ''), child_id::text AS id, coalesce(parent_id::text, ''), coalesce(slug, ''), author_id,
          body, attributes, author_state, moderation_state, version, created_at, updated_at,
          visible, visible_descendants, shown
     FROM child_lists c
    WHERE c.tenant_id = t.tenant_id AND c.kind = @kind AND ` + behind + `
    ORDER BY ` + order + ` LIMIT @limit::bigint) page
 LIMIT @limit::bigint`
}

// threadRowsSQL is in the order of threads, by child_lists_path_idx.
var threadRowsSQL = rowsSQL(
	`c.path IS NOT NULL AND (c.object_id, c.path) > (CASE WHEN t.tenant_id = @tenant::bigint THEN @object::text ELSE '' END,
           CASE WHEN t.tenant_id = @tenant::bigint THEN @place::text ELSE '' END COLLATE "C")`, "c.object_id, c.path")

// flatRowsSQL is in the order of ids, by child_lists_flat_idx.
var flatRowsSQL = rowsSQL(`c.path IS NULL AND c.child_id > CASE WHEN t.tenant_id = @tenant::bigint THEN @place::uuid ELSE '`+zeroID+
	`'::uuid END`, "c.child_id")

func rows(ctx context.Context, projection *pgxpool.Pool, k kinds.Child, after childRow, limit *int) iter.Seq2[*childRow, error] {
	args := pgx.StrictNamedArgs{"kind": k.Name, "tenant": after.TenantID, "limit": limit}
	if k.Threaded {
		args["object"], args["place"] = after.ObjectID, after.Path
		return projections.Rows[childRow](ctx, projection, threadRowsSQL, args)
	}
	args["place"] = cmp.Or(after.ChildID, zeroID)
	return projections.Rows[childRow](ctx, projection, flatRowsSQL, args)
}

// scan yields the truth's children of the kind in the same order.
func scan(ctx context.Context, truth *pgxpool.Pool, k kinds.Child, after *store.State[event.Child], limit int) iter.Seq2[*childRow, error] {
	if k.Threaded {
		return projections.Of(store.ScanObjects(ctx, truth, k, after, limit), wanted)
	}
	return projections.Of(store.ScanChildren(ctx, truth, k, after, limit), wanted)
}

// Verify compares every child with the truth's child. It computes visible, visible_descendants and
// shown from the truth. Then it compares the counts of each bucket and group, the totals and
// aggregates of each object, and the settings. It reports every difference and returns the number
// of compared children. An event that is not applied yet causes a difference, so the caller waits
// for a consumer's lag of 0. Both pools act as the system role. Memory is one row per level of one
// thread, and its buckets.
func (p Projection) Verify(ctx context.Context, truth, projection *pgxpool.Pool,
	report func(projections.Difference)) (checked int64, err error) {
	for _, k := range p.kinds().AllChildren() {
		n, err := verifyKind(ctx, truth, projection, k, report)
		checked += n
		if err != nil {
			return checked, fmt.Errorf("verify the children %s: %w", k.Name, err)
		}
	}
	if err := verifySettings(ctx, p.kinds(), truth, projection, report); err != nil {
		return checked, fmt.Errorf("verify settings of threads: %w", err)
	}
	return checked, nil
}

func verifyKind(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child,
	report func(projections.Difference)) (checked int64, err error) {
	f, n := fold{kind: k, visit: func(b projections.Diff) { b.Report(report) }}, counting{kind: k, report: report}
	next, stop := iter.Pull2(projections.Rows[countedRow](ctx, projection, countedSQL, pgx.StrictNamedArgs{"kind": k.Name}))
	defer stop()
	n.next = next
	err = projections.Compare(scan(ctx, truth, k, nil, 0), rows(ctx, projection, k, childRow{}, nil), order(k), func(want, got *childRow) {
		checked++
		f.add(want, got)
		if want != nil && k.Threaded {
			n.add(want)
		}
	})
	if err != nil {
		return checked, err
	}
	f.finish(nil)
	if !k.Threaded { // scan has the order of ids, and counting needs the order of objects
		for w, err := range projections.Of(store.ScanObjects(ctx, truth, k, nil, 0), wanted) {
			if err != nil {
				return checked, err
			}
			n.add(w)
		}
	}
	return checked, n.finish()
}

// fold takes the children in the order of their threads. The stack has the ancestors of the last
// child. A child is finished, with all its visible descendants counted, when a child comes that is
// not below it.
type fold struct {
	kind  kinds.Child
	visit func(projections.Diff)
	stack []open
}

type open struct{ want, got *childRow } // want.VisibleDescendants grows

func (f *fold) add(want, got *childRow) {
	if want == nil {
		f.visit(diffChild(f.kind, nil, got))
		return
	}
	f.finish(want)
	if got != nil {
		got.versions = got.Version
	}
	f.stack = append(f.stack, open{want, got})
}

// finish compares and removes the children that are not ancestors of next.
func (f *fold) finish(next *childRow) {
	for len(f.stack) > 0 {
		top := f.stack[len(f.stack)-1]
		w := top.want
		if next != nil && w.TenantID == next.TenantID && w.ObjectID == next.ObjectID && strings.HasPrefix(next.Path, w.Path+"/") {
			return
		}
		f.stack = f.stack[:len(f.stack)-1]
		w.Shown = w.Visible || w.VisibleDescendants > 0
		if len(f.stack) > 0 {
			above := f.stack[len(f.stack)-1]
			parent := above.want
			parent.VisibleDescendants += w.VisibleDescendants
			if w.Visible {
				parent.VisibleDescendants++
			}
			parent.versions += w.versions
			if above.got != nil && top.got != nil {
				above.got.versions += top.got.versions
			}
		}
		f.visit(diffChild(f.kind, w, top.got))
	}
}

// beside compares a child of the kind on both sides, either of which may be nil.
func diffChild(k kinds.Child, want, got *childRow) projections.Diff {
	of := cmp.Or(want, got)
	var none childRow
	return projections.NewDiff(projections.Difference{
		Projection: Name, TenantID: of.TenantID, Entity: fmt.Sprintf("%s %s of %s %s", k.Name, of.ChildID, k.Parent, of.ObjectID),
		Key:         projections.Key{Type: k.Name, TenantID: of.TenantID, Aggregate: of.ObjectID, Child: of.ChildID},
		WantVersion: cmp.Or(want, &none).Version, GotVersion: cmp.Or(got, &none).Version,
	}, want, got, fieldsOf)
}

func fieldsOf(want, got *childRow) []projections.Field {
	at := func(t time.Time) string { return t.UTC().Format(event.TimeFormat) }
	attributes := string(store.CanonicalAttributes(got.Attributes))
	return []projections.Field{
		projections.Compared("child_id", want.ChildID, got.ChildID),
		projections.Compared("parent_id", want.ParentID, got.ParentID),
		projections.Compared("slug", want.Slug, got.Slug),
		projections.Compared("author_id", want.AuthorID, got.AuthorID),
		projections.Compared("author_state", want.AuthorState, got.AuthorState),
		projections.Compared("moderation_state", want.ModerationState, got.ModerationState),
		projections.Compared("version", want.Version, got.Version),
		projections.Compared("created_at", at(want.CreatedAt), at(got.CreatedAt)),
		projections.Compared("updated_at", at(want.UpdatedAt), at(got.UpdatedAt)),
		projections.Compared("visible", want.Visible, got.Visible),
		{Name: visibleDescendants, Want: want.VisibleDescendants, Got: got.VisibleDescendants,
			WantVersion: want.versions, GotVersion: got.versions},
		{Name: shown, Want: want.Shown, Got: got.Shown, WantVersion: want.versions, GotVersion: got.versions},
		// attributes are content, too
		projections.Compared("attributes", size{len(want.Attributes), false}, size{len(attributes), string(want.Attributes) != attributes}),
		projections.Compared("body", size{len(want.Body), false}, size{len(got.Body), want.Body != got.Body}),
	}
}

// The fields that depend on the children below a child.
const (
	visibleDescendants = "visible_descendants"
	shown              = "shown"
)

// size replaces a text in a difference, because bodies must not be printed.
type size struct {
	bytes   int
	another bool // the content differs from the truth's
}

func (s size) String() string {
	if s.another {
		return fmt.Sprintf("%d different bytes", s.bytes)
	}
	return fmt.Sprintf("%d bytes", s.bytes)
}

// countedRow is a count of the projection for an object: all its children, the visible ones of a
// bucket or group that begins at At and ID, or those that have the attribute ID.
type countedRow struct {
	TenantID int64
	ObjectID event.ID
	Level    int // aggregated, totals, 0 (buckets) or 1 (groups)
	At       time.Time
	ID       string
	N, Sum   int64
}

// Levels that are not ranges.
const (
	aggregated = -2
	totals     = -1 // all children of an object
)

// countedSQL reads all counts of a kind. -infinity has no value in Go, so the year 1 replaces it.
// Index: none: a hundredth of the children, sorted. Locks: none.
const countedSQL = `
SELECT /* threadcache.verify */ * FROM (
  SELECT tenant_id, object_id, -2 AS level, '0001-01-01 00:00:00+00'::timestamptz AS at, attribute AS id, count, sum
    FROM child_aggregates WHERE kind = @kind
   UNION ALL
  SELECT tenant_id, object_id, -1, '0001-01-01 00:00:00+00', '', total, 0 FROM child_totals WHERE kind = @kind
   UNION ALL
  SELECT tenant_id, object_id, level, greatest(first_at, '0001-01-01 00:00:00+00'), first_id::text, visible, 0
    FROM child_buckets WHERE kind = @kind) counted
 ORDER BY tenant_id, object_id, level, at, id`

// counting compares the projection's counts, thread after thread, with the truth's children, which
// come in the order of threads. A child belongs to the last range that begins before it. A child
// before all ranges belongs to a range that the projection lacks.
type counting struct {
	kind   kinds.Child
	report func(projections.Difference)
	next   func() (*countedRow, error, bool)
	ahead  *countedRow // the first row of a later thread; nil at the end
	err    error       // the error that ended next

	tenant int64
	object event.ID
	got    [3][]*countedRow // the thread's rows by Level
	want   [3][]int64
	lacks  [3]*countedRow          // ranges that the projection lacks
	sums   map[aggregate]Aggregate // the truth's aggregates minus the projection's
	has    []Aggregate
}

// add counts a child of the truth.
func (c *counting) add(w *childRow) {
	if w.TenantID != c.tenant || w.ObjectID != c.object {
		c.begin(w.TenantID, w.ObjectID)
	}
	move(c.sums, object{w.TenantID, c.kind.Name, w.ObjectID}, c.kind.Aggregates(), w.Attributes, w.Visible, 1)
	for i, got := range c.got {
		if level := i + totals; level != totals && !w.Visible {
			return
		}
		n, same := slices.BinarySearchFunc(got, w, func(r *countedRow, w *childRow) int {
			return cmp.Or(r.At.Compare(w.CreatedAt), cmp.Compare(r.ID, w.ChildID))
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
			lack = &countedRow{At: w.CreatedAt, ID: w.ChildID}
			c.lacks[i] = lack
		}
		if cmp.Or(w.CreatedAt.Compare(lack.At), cmp.Compare(w.ChildID, lack.ID)) < 0 {
			lack.At, lack.ID = w.CreatedAt, w.ChildID
		}
		lack.N++
	}
}

// begin ends the thread, and the threads before the next one of which the truth has no child.
func (c *counting) begin(tenant int64, id event.ID) {
	if c.tenant == 0 {
		c.ahead, c.err, _ = c.next()
	}
	c.end()
	for c.ahead != nil && cmp.Or(cmp.Compare(c.ahead.TenantID, tenant), cmp.Compare(c.ahead.ObjectID, id)) < 0 {
		c.load(c.ahead.TenantID, c.ahead.ObjectID)
		c.end()
	}
	c.load(tenant, id)
}

// load reads the projection's counts of the thread.
func (c *counting) load(tenant int64, id event.ID) {
	*c = counting{kind: c.kind, report: c.report, next: c.next, ahead: c.ahead, err: c.err, tenant: tenant, object: id,
		sums: make(map[aggregate]Aggregate)}
	for c.ahead != nil && c.ahead.TenantID == tenant && c.ahead.ObjectID == id {
		if r := c.ahead; r.Level == aggregated {
			c.sums[aggregate{object{tenant, c.kind.Name, id}, r.ID}] = Aggregate{r.ID, -r.N, -r.Sum}
			c.has = append(c.has, Aggregate{r.ID, r.N, r.Sum})
		} else {
			i := r.Level - totals
			c.got[i], c.want[i] = append(c.got[i], r), append(c.want[i], 0)
		}
		c.ahead, c.err, _ = c.next()
	}
}

// end compares the counts of the thread.
func (c *counting) end() {
	for k, d := range c.sums {
		if c.err != nil || d.Count == 0 && d.Sum == 0 {
			continue
		}
		var got Aggregate
		if i := slices.IndexFunc(c.has, func(a Aggregate) bool { return a.Attribute == k.attribute }); i >= 0 {
			got = c.has[i]
		}
		c.report(projections.Difference{Projection: Name, TenantID: c.tenant,
			Entity: fmt.Sprintf("%s of %s %s", c.kind.Plural, c.kind.Parent, c.object),
			Field:  "aggregate of " + k.attribute, Want: fmt.Sprintf("%d with a sum of %d", got.Count+d.Count, got.Sum+d.Sum),
			Got: fmt.Sprintf("%d with a sum of %d", got.Count, got.Sum),
			Key: projections.Key{Type: c.kind.Name, TenantID: c.tenant, Aggregate: c.object}})
	}
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
		return // rows are missing after an error
	}
	d := projections.Difference{Projection: Name, TenantID: c.tenant, Field: "visible", Want: fmt.Sprint(want), Got: got,
		Key: projections.Key{Type: c.kind.Name, TenantID: c.tenant, Aggregate: c.object}}
	if level == totals {
		d.Entity, d.Field = fmt.Sprintf("thread of %s %s", c.kind.Parent, c.object), "total"
	} else {
		d.Entity = fmt.Sprintf("%s from %s %s of %s %s", [...]string{"bucket", "group"}[level], r.At.UTC().Format(event.TimeFormat), r.ID,
			c.kind.Parent, c.object)
	}
	c.report(d)
}

func (c *counting) finish() error {
	c.begin(math.MaxInt64, "\x7f")
	return c.err
}

// settingsRow has the settings of a thread.
type settingsRow struct {
	TenantID             int64
	ObjectID             event.ID
	Kind                 string
	Locked, Premoderated bool
	Title                string
	Version              int64
}

// settingsRowsSQL reads the projection's settings. Index: child_settings_pkey, all of it, sorted.
// Locks: none.
const settingsRowsSQL = `
SELECT /* threadcache.verify */ tenant_id, object_id, kind, locked, premoderated, title, version FROM child_settings
 ORDER BY tenant_id, object_id, kind`

func verifySettings(ctx context.Context, set *kinds.Set, truth, projection *pgxpool.Pool, report func(projections.Difference)) error {
	return projections.Compare(projections.Of(store.ScanSettings(ctx, truth, nil, 0), func(s *store.State[event.Thread]) *settingsRow {
		t := s.Object
		return &settingsRow{s.TenantID, t.PostID, t.Of(), t.Locked, t.Premoderate, t.Title, t.Version}
	}), projections.Rows[settingsRow](ctx, projection, settingsRowsSQL, nil),
		func(a, b *settingsRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.ObjectID, b.ObjectID), cmp.Compare(a.Kind, b.Kind))
		},
		func(want, got *settingsRow) {
			of := cmp.Or(want, got)
			diffSettings(set.Children[of.Kind], cmp.Or(want, &settingsRow{TenantID: of.TenantID, ObjectID: of.ObjectID, Kind: of.Kind}),
				cmp.Or(got, &settingsRow{})).Report(report)
		})
}

// besideSettings compares the settings of a thread on both sides. A missing row has the defaults.
func diffSettings(k kinds.Child, want, got *settingsRow) projections.Diff {
	return projections.NewDiff(projections.Difference{Projection: Name, TenantID: want.TenantID,
		Entity:      fmt.Sprintf("thread of %s %s", k.Parent, want.ObjectID),
		Key:         projections.Key{Type: event.AggregateThread, TenantID: want.TenantID, Aggregate: want.ObjectID, Kind: want.Kind},
		WantVersion: want.Version, GotVersion: got.Version}, want,
		got, func(want, got *settingsRow) []projections.Field {
			return []projections.Field{
				projections.Compared("locked", want.Locked, got.Locked),
				projections.Compared("premoderated", want.Premoderated, got.Premoderated),
				projections.Compared("title", want.Title, got.Title),
				projections.Compared("settings version", want.Version, got.Version),
			}
		})
}
