package verify_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestARepairBringsTheKeysAloneToTheTruth has three edges that are not applied. Repair gets the
// keys of two of them, one of which is in the outbox's DLQ.
func TestARepairBringsTheKeysAloneToTheTruth(t *testing.T) {
	db, ctx := testkit.Postgres(t), t.Context()
	pool, p := db.Pool(t, postgres.RoleSystem), followercounts.New(kinds.Builtin)
	var writes []store.EdgeWrite
	for to := int64(2); to <= 4; to++ {
		writes = append(writes, store.EdgeWrite{Meta: store.Meta{Actor: "test"}, From: "1", To: event.IDOf(to)})
	}
	if _, err := store.New(db.Pool(t, postgres.RoleAPI), func(int) {}).PutEdges(ctx, 1,
		kinds.Builtin().Edges["follow"], writes); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(ctx, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version,
		payload, occurred_at, available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 9, event_id,
		inserted_at, slot FROM outbox_messages WHERE aggregate_id = '3'`); err != nil {
		t.Fatal(err)
	}
	d := verify.Deps{Sources: status.Sources{Truth: pool, Projections: pool}, Fleet: []projections.Projection{p}, Kinds: kinds.Builtin}
	for _, to := range []event.ID{"2", "3"} {
		if err := verify.RepairKeys(ctx, d, p, projections.Key{Type: "follow", TenantID: 1, Aggregate: to, Other: "1"}); err != nil {
			t.Fatal(err)
		}
	}
	var there []event.ID
	if err := pool.QueryRow(ctx, `SELECT array_agg(to_id ORDER BY to_id) FROM edge_lists WHERE active`).Scan(&there); err != nil ||
		len(there) != 1 || there[0] != "2" {
		t.Errorf("edges to %v, want only the one to 2: %v", there, err)
	}
}

// whileMended calls read when a repair has changed rows and not committed them.
type whileRepaired struct {
	projections.Projection
	read func()
}

func (p whileRepaired) Repair(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key,
	parked projections.Parked) ([]projections.Key, error) {
	rest, err := p.Projection.Repair(ctx, tx, truth, keys, parked)
	p.read()
	return rest, err
}

// TestReadersDoNotWaitForARepair reads a damaged count while its repair is not committed. A read
// that waited would time out.
func TestReadersDoNotWaitForARepair(t *testing.T) {
	db, ctx := testkit.Postgres(t), t.Context()
	pool, api, follows := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI), kinds.Builtin().Edges["follow"]
	if _, err := store.New(api, func(int) {}).PutEdges(ctx, 1, follows,
		[]store.EdgeWrite{{Meta: store.Meta{Actor: "test"}, From: "1", To: "2"}}); err != nil {
		t.Fatal(err)
	}
	followers := func() (n int64) {
		t.Helper()
		if err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			all, err := followercounts.ReadCounts(ctx, tx, []string{follows.Name}, []event.ID{"2"})
			n = all[followercounts.Object{Kind: follows.Name, ID: "2"}].Incoming
			return err
		}); err != nil {
			t.Error(err)
		}
		return n
	}
	p, during := followercounts.New(kinds.Builtin), int64(-1)
	repair := func(p projections.Projection) {
		t.Helper()
		d := verify.Deps{Sources: status.Sources{Truth: pool, Projections: pool}, Fleet: []projections.Projection{p}, Kinds: kinds.Builtin}
		if err := verify.RepairKeys(ctx, d, p, projections.Key{Type: follows.Name, TenantID: 1, Aggregate: "2", Other: "1"}); err != nil {
			t.Fatal(err)
		}
	}
	repair(p) // makes the row
	if tag, err := pool.Exec(ctx, `UPDATE edge_counts SET incoming = 5 WHERE object_id = '2'`); err != nil || tag.RowsAffected() != 1 {
		t.Fatal(tag, err)
	}
	repair(whileRepaired{p, func() { during = followers() }})
	if after := followers(); during != 5 || after != 1 {
		t.Errorf("%d followers during the repair, and %d after it: want 5 and 1", during, after)
	}
}
