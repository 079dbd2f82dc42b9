package projector

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

func TestOnlyADifferenceThatNoEventExplainsIsDrift(t *testing.T) {
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	ctx := t.Context()
	js, err := jetstream.New(nats.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(ctx, js, nats.Config(), broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	pool, p := db.Pool(t, postgres.RoleSystem), followercounts.New(kinds.Builtin)
	reg := prometheus.NewRegistry()
	d, err := NewDrift(VerifyConfig{Interval: time.Minute, Window: 2}, pool, pool, js, nats.Config(), p, reg, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	compare := func(times int, wantDrift float64) {
		t.Helper()
		for range times {
			if err := d.step(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if got := testkit.Metric(t, reg, "tidings_projection_differences_total"); got != wantDrift {
			t.Errorf("drift %v, want %v", got, wantDrift)
		}
	}
	s := store.New(db.Pool(t, postgres.RoleAPI), func(int) {})
	var writes []store.EdgeWrite
	for followee := int64(2); followee <= 5; followee++ {
		writes = append(writes, store.EdgeWrite{Meta: store.Meta{Actor: "test"}, From: "1", To: event.IDOf(followee)})
	}
	if _, err := s.PutEdges(ctx, 1, kinds.Builtin().Edges["follow"], writes); err != nil {
		t.Fatal(err)
	}
	compare(5, 0) // no event is applied or published: pending events explain all differences
	apply := func() {
		t.Helper()
		for e, err := range p.Truth(ctx, pool) {
			if err == nil {
				err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
					return p.Apply(context.WithoutCancel(ctx), tx, []event.Event{e})
				})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if _, err := pool.Exec(ctx, `UPDATE outbox_messages SET processed_at = now()`); err != nil {
			t.Fatal(err)
		}
	}
	apply()
	compare(10, 0)
	if got := testkit.Metric(t, reg, "tidings_projection_verified_entities_total"); got < 4 {
		t.Errorf("verified %v", got)
	}
	comparison := func() projections.Comparison {
		t.Helper()
		all, err := projections.Comparisons(ctx, pool)
		if err != nil || len(all) != 1 || all[0].Consumer != p.Name() || all[0].Cell != nats.Config().Stream || all[0].Last == nil {
			t.Fatalf("the comparisons are %+v, %v", all, err)
		}
		return all[0]
	}
	if c := comparison(); c.Last.Checked < 4 || c.Last.Different != 0 || c.Different != 0 {
		t.Errorf("a clean comparison is %+v, of %+v", c, c.Last)
	}
	for _, damage := range []string{
		`UPDATE edge_lists SET version = 9 WHERE to_id = '3'`,
		`DELETE FROM edge_lists WHERE to_id = '5'`,
		`INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at)
			VALUES (1, 'follow', 1, 900, true, 1, now())`,
		`UPDATE edge_counts SET incoming = 7 WHERE object_id = '4'`,
	} {
		before := testkit.Metric(t, reg, "tidings_projection_differences_total")
		if _, err := pool.Exec(ctx, damage); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, damage, func() (bool, error) {
			return testkit.Metric(t, reg, "tidings_projection_differences_total") > before, d.step(ctx)
		})
		if c := comparison(); c.Different == 0 && c.Last.Different == 0 {
			t.Errorf("%s: the comparison is %+v, of %+v", damage, c, c.Last)
		}
		for _, sql := range []string{`DELETE FROM edge_lists`, `DELETE FROM edge_counts`} {
			if _, err := pool.Exec(ctx, sql); err != nil {
				t.Fatal(err)
			}
		}
		apply()
		d.after, d.suspected, d.round = nil, nil, projections.Comparison{}
	}
}

// TestADifferenceOfALaterVersionIsNoDrift: an entity toggles, so two comparisons find one
// difference of two states, each of which an event explains. A difference that no event explains is
// drift all the same, however often its entity changes.
func TestADifferenceOfALaterVersionIsNoDrift(t *testing.T) {
	const parent, reply = "0196b2d4-7c00-7000-8000-00000000000a", "0196b2d4-7c00-7000-8000-00000000000b"
	for _, c := range []struct {
		name        string
		p           projections.Projection
		make, other string
		damage      string // to the projection, at the present version
		stale       string // the projection misses the last change
	}{
		{"an edge", followercounts.New(kinds.Builtin),
			`INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, 2, 3)`,
			`UPDATE follows SET version = version + 1, status = CASE status WHEN 'ACTIVE' THEN 'REMOVED' ELSE 'ACTIVE' END`,
			`UPDATE edge_lists SET active = NOT active`,
			`UPDATE edge_lists SET positioned_at = positioned_at - interval '1 day', version = version - 1`},
		{"a comment's replies", threadcache.New(kinds.Builtin),
			`INSERT INTO comments (tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body) VALUES
				(1, '` + parent + `', 42, NULL, 'aaaaaaaa', '0000000000000aaaaaaaaa', 7, 'text'),
				(1, '` + reply + `', 42, '` + parent + `', 'bbbbbbbb', '0000000000000aaaaaaaaa/0000000000000bbbbbbbbb', 8, 'text')`,
			`UPDATE children_comment SET version = version + 1,
				moderation_state = CASE moderation_state WHEN 'HIDDEN' THEN 'APPROVED' ELSE 'HIDDEN' END WHERE child_id = '` + reply + `'`,
			`UPDATE child_lists SET visible_descendants = 1 - visible_descendants WHERE child_id = '` + parent + `'`,
			`UPDATE child_lists SET visible_descendants = 1 - visible_descendants, version = version - (child_id = '` + reply + `')::int`},
	} {
		t.Run(c.name, func(t *testing.T) {
			db, nats := testkit.Postgres(t), testkit.NATS(t)
			ctx := t.Context()
			js, err := jetstream.New(nats.Connect(t))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := broker.Declare(ctx, js, nats.Config(), broker.Partition{LastSlot: event.Slots - 1},
				testkit.Logger(t)); err != nil {
				t.Fatal(err)
			}
			pool := db.Pool(t, postgres.RoleSystem)
			reg := prometheus.NewRegistry()
			d, err := NewDrift(VerifyConfig{Interval: time.Minute, Window: 10}, pool, pool, js, nats.Config(), c.p, reg, testkit.Logger(t))
			if err != nil {
				t.Fatal(err)
			}
			exec := func(sql string) {
				t.Helper()
				if _, err := pool.Exec(ctx, sql); err != nil {
					t.Fatal(err)
				}
			}
			change := func() { t.Helper(); exec(c.other) }
			apply := func() {
				t.Helper()
				for e, err := range c.p.Truth(ctx, pool) {
					if err == nil {
						err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
							return c.p.Apply(context.WithoutCancel(ctx), tx, []event.Event{e})
						})
					}
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			compare := func(what string, want bool) {
				t.Helper()
				before := testkit.Metric(t, reg, "tidings_projection_differences_total")
				if err := d.step(ctx); err != nil {
					t.Fatal(err)
				}
				if got := testkit.Metric(t, reg, "tidings_projection_differences_total") > before; got != want {
					t.Errorf("%s: drift %t, want %t", what, got, want)
				}
			}
			exec(c.make)
			apply()
			change()
			compare("a change that is not applied yet", false)
			apply()
			change()
			apply()
			change()
			compare("a later one like it, not applied either", false)
			apply()
			compare("nothing", false)

			change()
			compare("one that is not applied yet", false)
			change()
			change()
			compare("one that should have been applied", true)
			apply()
			compare("nothing", false)

			exec(c.damage)
			compare("damage that an event may explain", false)
			compare("lasting damage", true)
			exec(c.damage)
			exec(c.stale)
			compare("a change that was lost", false)
			change()
			change()
			compare("a lost change below others", true)
		})
	}
}
