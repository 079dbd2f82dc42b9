package verify_test

import (
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/status"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/verify"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestARepairBringsTheKeysAloneToTheTruth has three edges that are not applied. Repair gets the keys of two of them, one of
// which is in the outbox's DLQ.
func TestARepairBringsTheKeysAloneToTheTruth(t *testing.T) {
	db, ctx := testkit.Postgres(t), t.Context()
	pool, p := db.Pool(t, postgres.RoleSystem), followercounts.New(kinds.Builtin)
	var writes []store.EdgeWrite
	for to := int64(2); to <= 4; to++ {
		writes = append(writes, store.EdgeWrite{Meta: store.Meta{Actor: "test"}, From: 1, To: to})
	}
	if _, err := store.New(db.Pool(t, postgres.RoleAPI), func(int) {}).PutEdges(ctx, 1,
		kinds.Builtin().Edges["follow"], writes); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(ctx, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version,
		payload, occurred_at, available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 9, event_id,
		inserted_at, slot FROM outbox_messages WHERE aggregate_id = 3`); err != nil {
		t.Fatal(err)
	}
	d := verify.Deps{Sources: status.Sources{Truth: pool, Projections: pool}, Fleet: []projections.Projection{p}, Kinds: kinds.Builtin}
	for _, to := range []int64{2, 3} {
		if err := verify.RepairKeys(ctx, d, p, projections.Key{Type: "follow", TenantID: 1, Aggregate: to, Other: 1}); err != nil {
			t.Fatal(err)
		}
	}
	var there []int64
	if err := pool.QueryRow(ctx, `SELECT array_agg(to_id ORDER BY to_id) FROM edge_lists WHERE active`).Scan(&there); err != nil ||
		len(there) != 1 || there[0] != 2 {
		t.Errorf("edges to %v, want only the one to 2: %v", there, err)
	}
}
