package settings

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
)

// stopper ends a context at the first line of a log.
type stopper struct {
	strings.Builder
	stop context.CancelFunc
}

func (s *stopper) Write(line []byte) (int, error) {
	s.stop()
	return s.Builder.Write(line)
}

func TestASubscriberThatWaitsForNATSNamesTheServer(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	nc, err := nats.Connect("nats://ann:secret@127.0.0.1:1", nats.RetryOnFailedConnect(true))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	log := &stopper{stop: stop}
	s := &Settings{Log: slog.New(slog.NewTextHandler(log, nil)), Broker: broker.Config{Timeout: time.Minute}}
	if _, err := s.AwaitStreams(ctx, js, func(context.Context) ([]broker.Stream, error) {
		return nil, context.DeadlineExceeded
	}); err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "no connection to nats://127.0.0.1:1") || strings.Contains(log.String(), "secret") {
		t.Errorf("it logs %s", log)
	}
}
