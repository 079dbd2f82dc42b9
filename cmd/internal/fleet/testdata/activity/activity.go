// Package activity counts the children that each author writes per day, and keeps the beginning of
// each text. It is the example of docs/adding-a-projection.md. A test adds it to the system; no
// other file of the repository knows it.
package activity

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// Name is the projection's name, and its consumer's.
const Name = "activity"

// Projection applies the events of children of every kind in force.
type Projection struct{ kinds func() *kinds.Set }

// New returns the projection. now returns the kinds in force.
func New(now func() *kinds.Set) Projection { return Projection{now} }

// Name returns the projection's name.
func (Projection) Name() string { return Name }

// Tables returns the tables that a replay rebuilds.
func (Projection) Tables() []string { return []string{"activity_texts", "activity_days"} }

// Wants reports whether the aggregate type is a kind of children.
func (p Projection) Wants(aggregateType string) bool {
	_, ok := p.kinds().Child(aggregateType)
	return ok
}

// Reached returns true: the API does not read this projection.
func (Projection) Reached(context.Context, pgx.Tx, []event.Ref) (bool, error) { return true, nil }

// text is a row of activity_texts.
type text struct {
	TenantID       int64
	Kind, Child    string
	Object, Author event.ID
	Day            string
	Version        int64
	Counts         bool
	Begins         string
}

func textOf(tenant int64, kind string, c *event.Child) *text {
	return &text{tenant, kind, c.ID, c.Parent, c.AuthorID, c.CreatedAt.UTC().Format(time.DateOnly), c.Version,
		c.AuthorState == event.AuthorActive, string([]rune(c.Body)[:min(20, len([]rune(c.Body)))])}
}

func (t *text) compare(o *text) int {
	return cmp.Or(cmp.Compare(t.TenantID, o.TenantID), cmp.Compare(t.Child, o.Child))
}

// applySQL writes the texts that are newer than the projection's, and changes the counts of their
// days by the difference. Index: activity_texts_pkey, activity_days_pkey. Locks: the texts and the
// days, in key order.
const applySQL = `
WITH newer AS MATERIALIZED (
  SELECT i.*, i.day::date AS written_on, coalesce(t.counts, false) AS before
    FROM unnest(@tenants::bigint[], @kinds::text[], @children::uuid[], @objects::text[], @authors::text[], @days::text[],
                @versions::bigint[], @counts::boolean[], @begins::text[])
           AS i(tenant_id, kind, child_id, object_id, author_id, day, version, counts, begins)
    LEFT JOIN activity_texts t USING (tenant_id, kind, child_id)
   WHERE i.version > coalesce(t.version, 0)
), written AS (
  INSERT INTO activity_texts SELECT tenant_id, kind, child_id, object_id, author_id, written_on, version, counts, begins FROM newer
  ORDER BY tenant_id, kind, child_id
      ON CONFLICT (tenant_id, kind, child_id) DO UPDATE SET version = excluded.version, counts = excluded.counts, begins = excluded.begins
)
INSERT /* activity.apply */ INTO activity_days AS d (tenant_id, author_id, day, written)
SELECT tenant_id, author_id, written_on, sum(counts::int - before::int) FROM newer GROUP BY 1, 2, 3
 HAVING sum(counts::int - before::int) <> 0 ORDER BY tenant_id, author_id COLLATE "C", written_on
    ON CONFLICT (tenant_id, author_id, day) DO UPDATE SET written = d.written + excluded.written`

// Apply keeps the newest version of each child, in the caller's transaction.
func (p Projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	type key struct {
		tenant      int64
		kind, child string
	}
	newest := make(map[key]*text)
	for i := range events {
		e := &events[i]
		k, ok := p.kinds().Child(e.AggregateType)
		if !ok {
			return event.Permanent(fmt.Errorf("event %s: %s is not a kind of children", e.ID, e.AggregateType))
		}
		c, err := e.DecodeChild(k.Names())
		if err != nil {
			return err
		}
		t := textOf(e.TenantID, k.Name, &c)
		if old := newest[key{t.TenantID, t.Kind, t.Child}]; old == nil || old.Version < t.Version {
			newest[key{t.TenantID, t.Kind, t.Child}] = t
		}
	}
	var tenants, versions []int64
	var objects, authors []event.ID
	var kinds, children, days, begins []string
	var counts []bool
	for _, t := range newest {
		tenants, objects, authors, versions = append(tenants, t.TenantID), append(objects, t.Object), append(authors, t.Author),
			append(versions, t.Version)
		kinds, children, begins = append(kinds, t.Kind), append(children, t.Child), append(begins, t.Begins)
		days, counts = append(days, t.Day), append(counts, t.Counts)
	}
	if _, err := tx.Exec(ctx, applySQL, postgres.Args{"tenants": tenants, "kinds": kinds, "children": children, "objects": objects,
		"authors": authors, "days": days, "versions": versions, "counts": counts, "begins": begins}); err != nil {
		return fmt.Errorf("write %d texts: %w", len(newest), err)
	}
	return nil
}

// Truth yields the state of each child of the truth as an event.
func (p Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	var all []iter.Seq2[event.Event, error]
	for _, k := range p.kinds().AllChildren() {
		all = append(all, store.ChildEvents(k, store.ScanChildren(ctx, truth, k, nil, 0)))
	}
	return projections.Concat(all...)
}

// textsSQL reads texts of a kind after a key. A NULL limit reads all. Index: activity_texts_pkey.
// Locks: none.
const textsSQL = `
SELECT /* activity.texts */ tenant_id, kind, child_id::text, object_id, author_id, day::text, version, counts, begins
  FROM activity_texts WHERE kind = @kind AND (tenant_id, child_id) > (@tenant::bigint, @child::uuid) ORDER BY tenant_id, child_id
  LIMIT nullif(@limit::bigint, 0)`

// window compares at most limit texts of a kind after a key (limit 0: all).
func window(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child, after *text, limit int,
	report func(projections.Difference)) (checked int64, last *text, err error) {
	from := &store.State[event.Child]{}
	args := pgx.StrictNamedArgs{"kind": k.Name, "tenant": int64(0), "child": "00000000-0000-0000-0000-000000000000", "limit": limit}
	if after != nil {
		from.TenantID, from.Object.ID = after.TenantID, after.Child
		args["tenant"], args["child"] = after.TenantID, after.Child
	}
	want := projections.Of(store.ScanChildren(ctx, truth, k, from, limit),
		func(s *store.State[event.Child]) *text { return textOf(s.TenantID, k.Name, &s.Object) })
	last, err = projections.Window(want, projections.Rows[text](ctx, projection, textsSQL, args), limit,
		(*text).compare, func(want, got *text) {
			checked++
			one := want
			if want == nil {
				one = got
			}
			if want == nil || got == nil || *want != *got {
				report(projections.Difference{Projection: Name, TenantID: one.TenantID, Entity: k.Name + " " + one.Child, Field: "row",
					Want: fmt.Sprint(want), Got: fmt.Sprint(got),
					Key: projections.Key{Type: k.Name, TenantID: one.TenantID, Aggregate: one.Object, Child: one.Child}})
			}
		})
	return checked, last, err
}

// Window compares the texts of the truth with the projection's.
func (p Projection) Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int,
	report func(projections.Difference)) (int64, any, error) {
	return projections.Kinds(p.kinds().AllChildren(), func(k kinds.Child) string { return k.Name }, after, limit,
		func(k kinds.Child, after *text, limit int) (int64, *text, error) {
			return window(ctx, truth, projection, k, after, limit, report)
		})
}

// daysSQL finds the days whose counts differ from the texts. Index: activity_texts_author_idx, and
// all of activity_days. Locks: none.
const daysSQL = `
SELECT /* activity.days */ tenant_id, author_id, day::text, coalesce(t.written, 0), coalesce(d.written, 0)
  FROM (SELECT tenant_id, author_id, day, count(*) AS written FROM activity_texts WHERE counts GROUP BY 1, 2, 3) t
  FULL JOIN activity_days d USING (tenant_id, author_id, day) WHERE coalesce(t.written, 0) <> coalesce(d.written, 0)`

// Verify compares every text with the truth, and the days with the texts.
func (p Projection) Verify(ctx context.Context, truth, projection *pgxpool.Pool,
	report func(projections.Difference)) (checked int64, err error) {
	for _, k := range p.kinds().AllChildren() {
		n, _, err := window(ctx, truth, projection, k, nil, 0, report)
		if checked += n; err != nil {
			return checked, fmt.Errorf("verify the texts of %s: %w", k.Name, err)
		}
	}
	type day struct {
		TenantID  int64
		Author    event.ID
		Day       string
		Want, Got int64
	}
	for d, err := range projections.Rows[day](ctx, projection, daysSQL, nil) {
		if err != nil {
			return checked, fmt.Errorf("verify the days: %w", err)
		}
		report(projections.Difference{Projection: Name, TenantID: d.TenantID,
			Entity: fmt.Sprintf("day %s of author %s", d.Day, d.Author), Field: "written",
			Want: fmt.Sprint(d.Want), Got: fmt.Sprint(d.Got), Key: projections.Key{TenantID: d.TenantID, Other: d.Author}})
	}
	return checked, nil
}

// dropSQL deletes texts before Repair writes them again, and returns their authors. Index:
// activity_texts_pkey. Locks: the texts.
const dropSQL = `
DELETE /* activity.drop */ FROM activity_texts WHERE tenant_id = @tenant AND kind = ANY(@kinds::text[])
AND child_id = ANY(@children::uuid[]) RETURNING author_id`

// dropDaysSQL and countSQL count the days of authors again from the texts. Index:
// activity_texts_author_idx, activity_days_pkey. Locks: the days.
const (
	dropDaysSQL = `DELETE /* activity.drop_days */ FROM activity_days WHERE tenant_id = @tenant AND author_id = ANY(@authors)`
	countSQL    = `
INSERT /* activity.count */ INTO activity_days (tenant_id, author_id, day, written)
SELECT tenant_id, author_id, day, count(*) FROM activity_texts WHERE counts AND tenant_id = @tenant AND author_id = ANY(@authors)
GROUP BY 1, 2, 3`
)

// Repair sets the texts of the keys to the truth, and counts the days of their authors again.
func (p Projection) Repair(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key,
	parked projections.Parked) ([]projections.Key, error) {
	byTenant := make(map[int64][]projections.Key)
	for _, k := range keys {
		if !parked(k.TenantID, k.Type, k.Aggregate) {
			byTenant[k.TenantID] = append(byTenant[k.TenantID], k)
		}
	}
	for tenant, keys := range byTenant {
		if err := p.repairKeys(ctx, tx, truth, tenant, keys); err != nil {
			return nil, fmt.Errorf("repair %d texts and days of tenant %d: %w", len(keys), tenant, err)
		}
	}
	return nil, nil
}

func (p Projection) repairKeys(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, tenant int64, keys []projections.Key) error {
	var refs []event.Ref
	var kinds, children []string
	var authors []event.ID
	for _, k := range keys {
		if k.Child == "" {
			authors = append(authors, k.Other)
			continue
		}
		refs, kinds, children = append(refs, k.Ref()), append(kinds, k.Type), append(children, k.Child)
	}
	events, err := store.States(ctx, truth, tenant, p.kinds(), refs)
	if err != nil {
		return err
	}
	for i := range events {
		k, _ := p.kinds().Child(events[i].AggregateType)
		c, err := events[i].DecodeChild(k.Names())
		if err != nil {
			return err
		}
		authors = append(authors, c.AuthorID)
	}
	rows, _ := tx.Query(ctx, dropSQL, pgx.StrictNamedArgs{"tenant": tenant, "kinds": kinds, "children": children})
	of, err := pgx.CollectRows(rows, pgx.RowTo[event.ID])
	if err != nil {
		return err
	}
	if err := p.Apply(ctx, tx, events); err != nil {
		return err
	}
	for _, sql := range []string{dropDaysSQL, countSQL} {
		if _, err := tx.Exec(ctx, sql, pgx.StrictNamedArgs{"tenant": tenant, "authors": slices.Concat(authors, of)}); err != nil {
			return err
		}
	}
	return nil
}

// redactSQL blanks the beginnings of texts. Index: activity_texts_pkey. Locks: the texts.
const redactSQL = `
UPDATE /* activity.redact */ activity_texts SET begins = '' WHERE tenant_id = @tenant AND kind = ANY(@kinds::text[])
AND child_id = ANY(@children::uuid[]) AND begins <> ''`

const heldSQL = `
SELECT /* activity.held */ count(*) FROM activity_texts
 WHERE tenant_id = @tenant AND kind = ANY(@kinds::text[]) AND child_id = ANY(@children::uuid[]) AND begins <> ''`

// Redact blanks the beginnings of the children's texts. With dryRun it only counts them.
func (p Projection) Redact(ctx context.Context, tx pgx.Tx, tenant int64, children []string, dryRun bool) (n int64, err error) {
	args := pgx.StrictNamedArgs{"tenant": tenant, "kinds": []string{}, "children": children}
	for _, k := range p.kinds().AllChildren() {
		args["kinds"] = append(args["kinds"].([]string), k.Name)
	}
	if dryRun {
		err = tx.QueryRow(ctx, heldSQL, args).Scan(&n)
	} else {
		tag, e := tx.Exec(ctx, redactSQL, args)
		n, err = tag.RowsAffected(), e
	}
	if err != nil {
		return 0, fmt.Errorf("redact the texts of %d children: %w", len(children), err)
	}
	return n, nil
}

// RedactActor does nothing: the projection keeps no actors.
func (Projection) RedactActor(context.Context, pgx.Tx, int64, string, any, bool) (int64, any, error) {
	return 0, nil, nil
}

// Forget does nothing: the projection keeps no edges.
func (Projection) Forget(context.Context, pgx.Tx, projections.EdgesOf, projections.Pair, bool) (int64, *projections.Pair, error) {
	return 0, nil, nil
}
