package cloudevents

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	cejetstream "github.com/cloudevents/sdk-go/protocol/nats_jetstream/v2"
	"github.com/cloudevents/sdk-go/v2/client"
	ce "github.com/cloudevents/sdk-go/v2/event"
	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/event/contracts"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/kinds"
)

// sample returns an event of the type, with the golden message's payload if there is one.
func sample(t *testing.T, n int, typ contracts.Type) event.Event {
	t.Helper()
	e := event.Event{ID: "5b0f6a52-7d9c-4f0a-9d39-0a3c8a1f0001", TenantID: 1, AggregateType: typ.Kind, AggregateID: event.IDOf(n + 1),
		Type: typ.Event, Version: 1, OutboxID: int64(n),
		OccurredAt:  time.Date(2026, 5, 1, 12, 30, 0, 123456000, time.UTC),
		TraceParent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Payload: json.RawMessage(`{"version":1}`)}
	raw, err := os.ReadFile("../../testdata/" + strings.TrimPrefix(typ.Name, "tidings.") + ".json")
	if os.IsNotExist(err) {
		return e
	}
	var golden struct{ Data json.RawMessage }
	if err == nil {
		err = json.Unmarshal(raw, &golden)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.Payload = golden.Data
	return e
}

// TestTheOfficialSDKReadsEveryType reads events as relays write them from a stream, with the SDK's
// consumer.
func TestTheOfficialSDKReadsEveryType(t *testing.T) {
	server, err := natsserver.Start(natsserver.Config{Dir: t.TempDir(), LazySync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Shutdown()
	cfg := broker.Config{URL: server.URL(), Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1,
		MaxAge: 720 * time.Hour, MaxBytes: -1, Timeout: 5 * time.Second, Ping: time.Second}
	nc, err := broker.Connect(cfg, "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1},
		slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	var sent []event.Event
	for n, typ := range contracts.Types(kinds.Builtin(), nil) {
		e := sample(t, n, typ)
		if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: e.Subject(cfg.Prefix, 0), Header: e.Headers(),
			Data: e.Payload}); err != nil {
			t.Fatal(err)
		}
		sent = append(sent, e)
	}
	if len(sent) < 20 {
		t.Fatalf("%d types", len(sent))
	}

	consumer, err := cejetstream.NewConsumerFromConn(nc, cfg.StreamName(0), cfg.Prefix+".0.>", nil,
		[]nats.SubOpt{nats.BindStream(cfg.StreamName(0)), nats.DeliverAll()})
	if err != nil {
		t.Fatal(err)
	}
	receiver, err := client.New(consumer, client.WithPollGoroutines(1), client.WithBlockingCallback())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	read := make(map[string]ce.Event)
	err = receiver.StartReceiver(ctx, func(e ce.Event) {
		if read[e.Type()] = e; len(read) == len(sent) {
			cancel()
		}
	})
	if err != nil && ctx.Err() == nil {
		t.Fatal(err)
	}
	for _, e := range sent {
		got, ok := read[e.CloudEventsType()]
		if !ok {
			t.Errorf("%s was not read", e.CloudEventsType())
			continue
		}
		if err := got.Validate(); err != nil {
			t.Errorf("%s: %v", got.Type(), err)
		}
		want := ce.New(ce.CloudEventsVersionV1)
		want.SetID(e.ID)
		want.SetType(e.CloudEventsType())
		want.SetSource(event.Source)
		want.SetSubject(json.Number(e.Headers()[event.HeaderSubject][0]).String())
		want.SetTime(e.OccurredAt)
		want.SetDataSchema(e.DataSchema())
		want.SetExtension("tenant", "1")
		if err := want.SetData("application/json", e.Payload); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want.String(), got.String()); diff != "" {
			t.Errorf("%s (-want +read by the SDK):\n%s", e.CloudEventsType(), diff)
		}
	}
}
