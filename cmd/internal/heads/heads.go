package heads

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/broker"
)

// wait limits the time that an answer of the API waits for the broker. The API also answers without
// it.
const wait = time.Second

// Of returns a function that reads the heads of the partitions' streams from the broker.
func Of(nc *nats.Conn, cfg broker.Config) api.Streams {
	return func(ctx context.Context) (map[string]api.StreamHead, error) {
		ctx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		js, err := jetstream.New(nc)
		if err != nil {
			return nil, err
		}
		streams, err := broker.Streams(ctx, js, cfg)
		all := make(map[string]api.StreamHead, len(streams))
		for _, s := range streams {
			all[s.Name] = api.StreamHead{Created: s.Created, First: s.First}
		}
		return all, err
	}
}
