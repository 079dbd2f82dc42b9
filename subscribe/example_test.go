package subscribe_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/subscribe"
)

// mail stands for your mail service.
func mail(context.Context, event.ID, string) error { return nil }

func ExampleHandle() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	nc, err := nats.Connect(os.Getenv("NATS_URL"), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort())
	if err != nil {
		panic(err)
	}
	defer nc.Close()
	err = subscribe.Handle(ctx, nc, "mailer", "follow.created", func(ctx context.Context, e subscribe.Event[event.Edge]) error {
		if e.Data.Version > 1 {
			return nil // they followed before
		}
		return mail(ctx, e.Data.To, "user "+e.Data.From.String()+" follows you")
	})
	if err != nil {
		panic(err)
	}
}

// With options: mails in the order of the events, and soon by another instance if this one dies.
func ExampleHandle_options() {
	ctx := context.Background()
	nc, err := nats.Connect(os.Getenv("NATS_URL"))
	if err != nil {
		panic(err)
	}
	defer nc.Close()
	var health subscribe.Health // for a readiness probe: health.Ready
	err = subscribe.Handle(ctx, nc, "mailer", "comment.*", func(ctx context.Context, e subscribe.Event[event.Child]) error {
		return mail(ctx, e.Data.AuthorID, e.Type+": "+e.Data.Body)
	}, subscribe.InOrder(), subscribe.Takeover(2*time.Second), subscribe.Attempts(5), subscribe.Report(&health))
	if err != nil {
		panic(err)
	}
}

// Decode reads a payload of projector.Project. The kinds say which members have the ids.
func ExampleDecode() {
	e := event.Event{TenantID: 1, AggregateType: "follow", AggregateID: "42", Type: event.Created, Version: 1, Payload: []byte(`{
		"follower_id": "7", "followee_id": "42", "status": "ACTIVE", "version": 3, "created_at": "2026-05-01T12:30:00Z",
		"positioned_at": "2026-05-01T12:30:00Z", "updated_at": "2026-05-01T12:30:00Z", "actor": "user:7"}`)}
	follow, err := subscribe.Decode[event.Edge](kinds.Builtin(), &e)
	fmt.Println(follow.From, "follows", follow.To, follow.Active(), err)
	// Output: 7 follows 42 true <nil>
}

// A cache begins with all follows of a tenant, and stays up to date.
func ExampleBootstrap() {
	ctx := context.Background()
	nc, err := nats.Connect(os.Getenv("NATS_URL"))
	if err != nil {
		panic(err)
	}
	defer nc.Close()
	c, err := client.New(os.Getenv("TIDINGS_URL"), client.WithToken(os.Getenv("TIDINGS_TOKEN"))) // with the role export
	if err != nil {
		panic(err)
	}
	type pair struct{ from, to event.ID }
	var mu sync.Mutex
	cache := make(map[pair]event.Edge)
	err = subscribe.Handle(ctx, nc, "cache", "follow.*", func(_ context.Context, e subscribe.Event[event.Edge]) error {
		mu.Lock()
		defer mu.Unlock()
		key := pair{e.Data.From, e.Data.To}
		have, ok := cache[key]
		newer := e.Data.CreatedAt.After(have.CreatedAt.Time) ||
			e.Data.CreatedAt.Equal(have.CreatedAt.Time) && e.Data.Version > have.Version
		if !ok || newer { // states and events come more than once, and in any order
			cache[key] = e.Data
		}
		return nil
	}, subscribe.Bootstrap(c))
	if err != nil {
		panic(err)
	}
}

func ExampleHandlerDeadLetters() {
	ctx := context.Background()
	nc, err := nats.Connect(os.Getenv("NATS_URL"))
	if err != nil {
		panic(err)
	}
	defer nc.Close()
	letters, err := subscribe.HandlerDeadLetters(nc)
	if err != nil {
		panic(err)
	}
	for l, err := range letters.List(ctx, "mailer-follow-created", 0) { // of that durable consumer, after id 0
		if err != nil {
			panic(err)
		}
		if err := letters.Retry(ctx, l.ID); err != nil { // or letters.Discard(ctx, l.ID)
			panic(err)
		}
	}
}
