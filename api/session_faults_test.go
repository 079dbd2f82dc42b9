//go:build faults

package api_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
)

// The consumer is applying the write: its transaction holds the rows.
func TestAReadWaitsForTheConsumerThatIsWritingWhatItMustSee(t *testing.T) {
	f := open(t)
	begin := func(user event.ID) pgx.Tx {
		tx, err := f.system.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }) // before the pool closes
		e := event.Event{ID: "e", TenantID: tenant, AggregateType: event.AggregateFollow, AggregateID: user,
			Type: event.Created, Version: 1}
		if err := f.system.QueryRow(t.Context(), `SELECT payload FROM outbox_messages WHERE aggregate_id = $1`,
			user).Scan(&e.Payload); err != nil {
			t.Fatal(err)
		}
		if err := followercounts.New(kinds.Builtin).Apply(t.Context(), tx, []event.Event{e}); err != nil {
			t.Fatal(err)
		}
		return tx
	}
	path := func(user event.ID) string { return fmt.Sprintf("/v1/users/%s/counts", user) }
	token := f.follow(t, "PUT", "7/42")
	consumer := begin("42")
	if a := f.do(t, "GET", path("42"), "", token); a.StatusCode != 503 || a.Header.Get("Retry-After") == "" {
		t.Errorf("while the consumer has the rows: %d %s", a.StatusCode, a.body)
	}
	if err := consumer.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A read gives up after two seconds. If the machine stood still for a second of it, the test
	// tries again.
	for user := int64(100); ; user++ {
		token := f.follow(t, "PUT", fmt.Sprintf("7/%d", user))
		consumer := begin(event.IDOf(user))
		asked, answers := time.Now(), make(chan answer, 1)
		go func() { answers <- f.do(t, "GET", path(event.IDOf(user)), "", token) }()
		testkit.Eventually(t, "the read to wait for the consumer's rows", func() (waiting bool, err error) {
			err = f.system.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted
				AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
				OR NOT granted AND locktype = 'transactionid')`).Scan(&waiting)
			return waiting || len(answers) > 0, err
		})
		if err := consumer.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		took := time.Since(asked)
		a := <-answers
		if b := f.want(t, 200, "GET", path(event.IDOf(user)), "", token); b.json["followers"] != 1.0 {
			t.Errorf("the consumer's own: %s", b.body)
		}
		if a.StatusCode == 503 && took > time.Second && user < 120 {
			continue
		}
		if a.StatusCode != 200 || a.json["followers"] != 1.0 {
			t.Errorf("once the consumer had committed, %s after the question: %d %s", took, a.StatusCode, a.body)
		}
		return
	}
}
