package projector_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// TestANewInstallationPartitionsBuiltInKinds rehearses the plan of ADR 13 for follows and comments
// that will pass 100 million rows: the first migration, then a file that gives them partitions,
// then everything else.
func TestANewInstallationPartitionsBuiltInKinds(t *testing.T) {
	ctx, db, b := t.Context(), testkit.EmptyPostgres(t), testkit.NATS(t)
	migrate := func() {
		t.Helper()
		for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
			if _, err := migrations.Up(ctx, db.URL, set, testkit.Logger(t)); err != nil {
				t.Fatal(err)
			}
		}
	}
	migrate()
	l := line{pool: db.Pool(t, postgres.RoleSystem), api: db.Pool(t, postgres.RoleAPI), cfg: b.Config()}
	grown := testkit.Kinds(t, strings.Replace(songKinds, "children:\n",
		"  follow: {partitions: 16}\nchildren:\n  comment: {partitions: 16}\n", 1))
	if _, err := catalog.Apply(ctx, catalog.Databases{Truth: l.pool, Projections: l.pool},
		catalog.Request{Kinds: grown, Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	migrate() // the next release finds the tables as the kinds in force want them

	l.js = system.Streams(t, b)
	system.Start(t, system.Relay(t, system.RelayConfig(), l.pool, l.cfg).Run)
	catalog := catalog.New(l.pool, catalog.Projections, testkit.Logger(t))
	if err := catalog.Load(ctx); err != nil {
		t.Fatal(err)
	}
	all := fleet.Projections(catalog.Now)
	for _, p := range all {
		deps := consumers.Deps{Pool: l.pool, Kinds: catalog, JetStream: l.js}
		system.Start(t, system.Consumer(t, system.ConsumerConfig(), deps, l.cfg, p).Run)
	}

	s, set := store.New(l.api, nil), catalog.Now()
	writeEverything(t, s, set)
	meta := store.Meta{Actor: "test"}
	var edges []store.EdgeWrite
	var comments []store.NewChild
	for n := range 200 {
		edges = append(edges, store.EdgeWrite{Meta: meta, From: event.IDOf(100 + n), To: "7"})
		comments = append(comments, store.NewChild{Meta: meta, Object: event.IDOf(100 + n), AuthorID: "7", Body: "x"})
	}
	if _, err := s.PutEdges(ctx, tenant, set.Edges["follow"], edges); err != nil {
		t.Fatal(err)
	}
	written, err := s.CreateChildren(ctx, tenant, set.Children["comment"], comments)
	if err != nil {
		t.Fatal(err)
	}
	if e, err := s.GetEdge(ctx, tenant, set.Edges["follow"], "142", "7"); err != nil || !e.Active() {
		t.Errorf("%+v, %v", e, err)
	}
	for _, o := range written[:3] {
		if c, err := s.GetChild(ctx, tenant, set.Children["comment"], o.Child.ID); err != nil || c.Parent != o.Child.Parent {
			t.Errorf("%+v, %v", c, err)
		}
	}
	for _, table := range []string{"edges_follow", "children_comment"} {
		var used, parts int
		if err := l.pool.QueryRow(ctx, `SELECT (SELECT count(DISTINCT tableoid) FROM `+table+`),
			(SELECT count(*) FROM pg_inherits WHERE inhparent = $1::text::regclass)`, table).Scan(&used, &parts); err != nil ||
			parts != 16 || used < 12 {
			t.Errorf("%s has %d partitions, %d with rows, %v", table, parts, used, err)
		}
	}

	system.AwaitPublished(t, l.pool)
	system.AwaitApplied(t, l.pool, l.js, l.cfg, fleet.Names()...)
	for _, p := range all {
		n, err := p.Verify(ctx, l.pool, l.pool, func(d projections.Difference) { t.Errorf("%s: %v", p.Name(), d) })
		if err != nil || n < 200 {
			t.Errorf("%s: %d compared, %v", p.Name(), n, err)
		}
	}
	var followers, dead int64
	if err := postgres.InTx(ctx, l.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT incoming, (SELECT count(*) FROM consumer_dead_letters) FROM edge_counts
			WHERE tenant_id = 1 AND kind = 'follow' AND object_id = '7'`).Scan(&followers, &dead)
	}); err != nil || followers != 200 || dead > 0 {
		t.Errorf("%d followers, %d dead letters, %v", followers, dead, err)
	}
}
