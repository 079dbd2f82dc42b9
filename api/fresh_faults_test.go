//go:build faults

package api_test

import (
	"context"
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
	token := f.follow(t, "PUT", "7/42")
	begin := func() pgx.Tx {
		tx, err := f.system.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }) // before the pool closes
		e := event.Event{ID: "e", TenantID: tenant, AggregateType: event.AggregateFollow, AggregateID: 42, Type: event.Created, Version: 1}
		if err := f.system.QueryRow(t.Context(), `SELECT payload FROM outbox_messages`).Scan(&e.Payload); err != nil {
			t.Fatal(err)
		}
		if err := followercounts.New(kinds.Builtin).Apply(t.Context(), tx, []event.Event{e}); err != nil {
			t.Fatal(err)
		}
		return tx
	}
	consumer := begin()
	if a := f.do(t, "GET", "/v1/users/42/counts", "", token); a.StatusCode != 503 || a.Header.Get("Retry-After") == "" {
		t.Errorf("while the consumer has the rows: %d %s", a.StatusCode, a.body)
	}
	if err := consumer.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	consumer = begin()
	var answers chan answer
	var asked time.Time
	ask := func() {
		to := make(chan answer, 1)
		answers, asked = to, time.Now()
		go func() { to <- f.do(t, "GET", "/v1/users/42/counts", "", token) }()
	}
	ask()
	testkit.Eventually(t, "the read to wait for the consumer's rows", func() (waiting bool, err error) {
		select {
		case a := <-answers: // it gave up before the test looked: the machine stood still
			if took := time.Since(asked); a.StatusCode != 503 || took < 2*time.Second {
				t.Fatalf("a read beside the consumer: %d %s after %s", a.StatusCode, a.body, took)
			}
			ask()
		default:
		}
		err = f.system.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
			OR NOT granted AND locktype = 'transactionid')`).Scan(&waiting)
		return waiting, err
	})
	if err := consumer.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	late := time.Since(asked) > time.Second // the read gives up after two: the machine stood still
	if a := <-answers; !late && (a.StatusCode != 200 || a.json["followers"] != 1.0) {
		t.Errorf("once the consumer had committed: %d %s", a.StatusCode, a.body)
	}
	if a := f.want(t, 200, "GET", "/v1/users/42/counts", "", token); a.json["followers"] != 1.0 {
		t.Errorf("the consumer's own: %s", a.body)
	}
}
