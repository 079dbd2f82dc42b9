package broker_test

import (
	"context"
	"errors"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAStepDownNeedsNoAnswer: a refusal or silence says nothing about the loss, because the next
// probe does. Only a caller that gave up gets an error.
func TestAStepDownNeedsNoAnswer(t *testing.T) {
	nc := testkit.NATS(t).Connect(t)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := broker.StepDown(t.Context(), js, "EVENTS-0"); err != nil {
		t.Errorf("a server without a cluster refuses: %v", err)
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if err := broker.StepDown(stopped, js, "EVENTS-0"); !errors.Is(err, context.Canceled) {
		t.Errorf("the caller gave up: %v", err)
	}
	nc.Close()
	if err := broker.StepDown(t.Context(), js, "EVENTS-0"); err != nil {
		t.Errorf("the connection is closed: %v", err)
	}
}
