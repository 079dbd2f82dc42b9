package consumers_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/projections/followercounts"
)

// applyKindSQL is the first statement of `tidings kinds apply`.
const applyKindSQL = `INSERT INTO projection_kinds (tenant_id, object, metadata) VALUES (0,
	'{"name": "installation", "kinds": {"edges": {"block": {"plural": "blocks", "from": "user", "to": "user",
		"ends": ["blocker_id", "blocked_id"], "forward": "blocked", "reverse": "blockers"}}}}',
	'{"version_id": 1, "version_state": "LATEST", "created_by": "test",
		"creation_time": "2026-01-01T00:00:00Z", "last_update_time": "2026-01-01T00:00:00Z"}')`

func block(blocker, blocked event.ID, version int64) event.Event {
	e := event.Edge{From: blocker, To: blocked, Status: event.StatusActive, Version: version, Actor: "test"}
	payload, err := e.Encode(event.EdgeNames{From: "blocker_id", To: "blocked_id"})
	if err != nil {
		panic(err)
	}
	return event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: "block", AggregateID: blocked, Type: event.Created, Version: 1,
		OccurredAt: time.Unix(1700000000, 0).UTC(), Payload: payload}
}

// TestAnEventOfAKindAppliedMeanwhileIsNotPassedOver adds a kind to the projections' database while
// a consumer runs with an old catalog. Before that it publishes events whose type is the kind's
// name.
func TestAnEventOfAKindAppliedMeanwhileIsNotPassedOver(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	catalog := catalog.New(r.system, catalog.Projections, testkit.Logger(t))
	in := r.start(config(), consumers.Deps{Pool: r.system, Kinds: catalog, JetStream: r.js}, followercounts.New(catalog.Now))
	settled := func() {
		t.Helper()
		testkit.Eventually(t, "all to be applied", func() (bool, error) {
			all, err := consumers.Lag(context.Background(), r.system, r.js, r.cfg, followercounts.Name)
			return err == nil && all[0].Messages == 0, err
		})
	}
	r.publish(follow("7", "3", 1), block("7", "3", 1))
	settled()
	in.awaitMetric(t, "tidings_consumer_skipped_total", 1) // of an unknown type
	r.exec(applyKindSQL)
	r.publish(follow("8", "3", 1), block("8", "3", 1), block("9", "3", 1))
	settled()
	err := postgres.InTenant(t.Context(), r.system, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
		got, err := followercounts.ReadCounts(t.Context(), tx, []string{"follow", "block"}, []event.ID{"3"})
		for kind, want := range map[string]int64{"follow": 2, "block": 2} {
			if n := got[followercounts.Object{Kind: kind, ID: "3"}].Incoming; n != want {
				t.Errorf("3 has %d incoming edges of %s, want %d", n, kind, want)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	in.awaitMetric(t, "tidings_consumer_applied_total", 4)
	if got := in.metric(t, "tidings_consumer_skipped_total"); got != 1 {
		t.Errorf("the consumer skipped %v events, want only the one from before the kind", got)
	}
}
