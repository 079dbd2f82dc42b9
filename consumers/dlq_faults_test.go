//go:build faults

package consumers_test

import (
	"context"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
)

func TestManyDeadLettersAreRetriedInSeveralTransactions(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 1)
	r.run(r.system, logbook{hook: defect.hook})
	const n = 2*consumers.MaxDeadLetters + 100
	events, want := make([]event.Event, n), make([]line, n)
	for i := range events {
		events[i], want[i] = follow(event.IDOf(i+1), "3", 1), line{event.IDOf(i + 1), "3", 1}
	}
	r.publish(events...)
	r.awaitLag(0)
	var transactions []int
	counting := func(_ context.Context, _ pgx.Tx, events []event.Event) error {
		transactions = append(transactions, len(events))
		return nil
	}
	res, err := consumers.NewDeadLetters(r.system, logbook{hook: counting}).Retry(t.Context(),
		consumers.DeadLetterRequest{ID: r.first("3").ID, Actor: "ann"})
	if err != nil || res.Gone != n || res.Left != 0 ||
		!slices.Equal(transactions, []int{consumers.MaxDeadLetters, consumers.MaxDeadLetters, 100}) {
		t.Errorf("%+v, %v, in transactions of %v", res, err, transactions)
	}
	r.wantLines(want)
}
