package docs_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestTheLeavingPageWorks leaves with tables of one's own, and exports kinds.
func TestTheLeavingPageWorks(t *testing.T) {
	t.Parallel()
	m := startMove(t, "leaving.md", testkit.EmptyPostgres(t))
	exported := func(db *pgxpool.Pool, query string) (all []map[string]any) {
		t.Helper()
		rows, _ := db.Query(t.Context(), query)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		for _, line := range lines {
			var o map[string]any
			if err := json.Unmarshal([]byte(line), &o); err != nil {
				t.Errorf("%s: %v", line, err)
			}
			all = append(all, o)
		}
		return all
	}
	for version := range 3 {
		m.exec(fmt.Sprintf(`BEGIN; UPDATE orders SET version = %[1]d WHERE id = 1;
			INSERT INTO tidings.outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (1, 'order', '1', 'paid', '{"id": 1, "version": %[1]d, "note": "a \"quoted\" word"}'); COMMIT`, version+1))
	}
	stopRelay := m.relay()
	drained := m.block("outbox_messages_dlq")
	testkit.Eventually(t, "an empty outbox", func() (bool, error) {
		var waiting, dead int
		err := m.owner.QueryRow(t.Context(), drained).Scan(&waiting, &dead)
		return waiting+dead == 0, err
	})
	stopRelay()
	events := exported(m.owner, m.block("to_jsonb(m)"))
	for i, e := range events {
		if payload, ok := e["payload"].(map[string]any); !ok || payload["version"] != float64(i+1) || e["stream_seq"] == nil {
			t.Errorf("line %d: %v", i, e)
		}
	}
	if len(events) != 3 {
		t.Errorf("the export has %d events", len(events))
	}
	m.run("DROP SCHEMA tidings CASCADE")

	// Another relay continues on the same subject, and a plain consumer sees no change.
	cfg := m.broker.Config()
	if _, err := m.js.Publish(t.Context(), cfg.Prefix+".0.t1.order.paid", []byte(`{"id": 1, "version": 4}`)); err != nil {
		t.Fatal(err)
	}
	m.exec(`UPDATE orders SET version = 4 WHERE id = 1`)
	c, err := m.js.CreateConsumer(t.Context(), cfg.StreamName(0), jetstream.ConsumerConfig{
		FilterSubject: cfg.Prefix + ".*.t1.order.>", AckPolicy: jetstream.AckExplicitPolicy})
	if err != nil {
		t.Fatal(err)
	}
	for version := 1; version <= 4; version++ {
		msg, err := c.Next(jetstream.FetchMaxWait(5 * time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(msg.Data()), fmt.Sprintf(`"version": %d`, version)) {
			t.Errorf("message %d is %s", version, msg.Data())
		}
	}

	all := testkit.Postgres(t).Pool(t, postgres.RoleOwner)
	const follow = `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, '7', '42')`
	if _, err := all.Exec(t.Context(), follow); err != nil {
		t.Fatal(err)
	}
	for i, query := range strings.Split(strings.TrimSpace(m.block("FROM follows")), "\n") {
		if lines := exported(all, query); i == 0 && (len(lines) != 1 || lines[0]["follower_id"] != "7") {
			t.Errorf("%s: %v", query, lines)
		}
	}
	if len(m.blocks) > 0 {
		t.Errorf("the test runs no %q", m.blocks)
	}
}
