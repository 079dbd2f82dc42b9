package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Durable is a durable consumer of a stream. It is a subscriber's, because Tidings' own consumers keep their offsets in
// their database.
type Durable struct {
	Name    string `json:"name"`
	Stream  string `json:"stream"`
	Behind  uint64 `json:"behind"`         // messages not yet delivered to it
	Unacked int    `json:"unacknowledged"` // messages delivered to it and not yet acknowledged
}

// maxDurables is the limit of Durables for one stream.
const maxDurables = 256

// Durables returns the durable consumers of a stream by name. It stops after 256 in the server's order; more reports
// that others exist.
func Durables(ctx context.Context, js jetstream.JetStream, stream string) (all []Durable, more bool, err error) {
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return nil, false, fmt.Errorf("look up stream %s: %w", stream, unanswered(js, err))
	}
	ctx, cancel := context.WithCancel(ctx) // ends the listing
	defer cancel()
	list := s.ListConsumers(ctx)
	for c := range list.Info() {
		if c.Config.Durable == "" {
			continue
		}
		if more = len(all) == maxDurables; more {
			break
		}
		all = append(all, Durable{Name: c.Name, Stream: stream, Behind: c.NumPending, Unacked: c.NumAckPending})
	}
	if err := list.Err(); !more && err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, false, fmt.Errorf("list the consumers of stream %s: %w", stream, unanswered(js, err))
	}
	slices.SortFunc(all, func(a, b Durable) int { return strings.Compare(a.Name, b.Name) })
	return all, more, nil
}
