// Command mailer tells users who follows them. It prints the mails instead of sending them.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/subscribe"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	nc, err := nats.Connect(os.Getenv("NATS_URL"), nats.Name("mailer"), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort())
	if err != nil {
		return err
	}
	defer nc.Close()
	return subscribe.Handle(ctx, nc, "mailer", "follow.created", send,
		subscribe.InOrder(),                // a user gets the mails in the order of the events
		subscribe.Takeover(2*time.Second),  // another instance takes over soon after one has died
		subscribe.Timeout(10*time.Second),  // per mail
		subscribe.Attempts(5),              // then it is a dead letter
		subscribe.Concurrency(concurrency)) // mails at once
}

const concurrency = 32

// send sends a mail. After an error package subscribe calls it again, except after
// subscribe.Permanent(err). For a mail service, e.ID is the idempotency key. Version 1 is the first
// follow of a pair.
func send(_ context.Context, e subscribe.Event[event.Edge]) error {
	_, err := fmt.Printf("to user %s: user %s follows you (version %d)\n", e.Data.To, e.Data.From, e.Data.Version)
	return err
}
