package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Durable is a durable consumer of a stream: somebody's subscription, for Tidings' own consumers keep their offsets in their database.
type Durable struct {
	Name    string `json:"name"`
	Stream  string `json:"stream"`
	Behind  uint64 `json:"behind"`         // messages that it has not been given
	Unacked int    `json:"unacknowledged"` // that it was given and has not acknowledged
}

// maxDurables is how many Durables returns of a stream.
const maxDurables = 256

// Durables returns the durable consumers of a stream by name, the first 256 that the server lists; more says that there are others.
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
