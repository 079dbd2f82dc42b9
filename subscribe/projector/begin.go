package projector

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// ErrBegun reports a projection that already has a position on the streams, also if an instance
// that still runs has just made it. Replay makes the projection begin again.
var ErrBegun = errors.New("projector: the projection has already begun")

// Position is the sequence up to which an export covers a stream. It is an element of "streams" in
// the first line of GET /v1/{kind}:export.
type Position struct {
	Partition int       `json:"partition"`
	Stream    string    `json:"stream"` // empty before the stream exists
	Created   time.Time `json:"created"`
	Sequence  uint64    `json:"sequence,string"`
}

// Begin makes a projection that has not run yet continue after the states of exports, one for each
// kind. Call it in the transaction that writes the last state. Events that an export already
// includes may come again: apply an edge if (created_at, version) is newer, anything else if
// version is. It returns ErrBegun.
func Begin(ctx context.Context, tx pgx.Tx, name string, exports ...[]Position) error {
	if _, err := settings.New(name, settings.Project, nil); err != nil {
		return err
	}
	begun, err := consumers.HasOffset(ctx, tx, name)
	if err != nil {
		return err
	}
	if begun {
		return fmt.Errorf("%w: %s", ErrBegun, name)
	}
	return consumers.StartAt(ctx, tx, name, starts(exports))
}

// starts returns the earliest position after all exports on each stream.
func starts(exports [][]Position) map[int]consumers.Start {
	streams := make(map[int]consumers.Start)
	for _, positions := range exports {
		for _, p := range positions {
			if p.Stream == "" {
				continue // Project reads it from its beginning
			}
			at := uint64(math.MaxUint64)
			for _, other := range exports {
				at = min(at, covered(other, p.Partition))
			}
			streams[p.Partition] = consumers.Start{Stream: p.Stream, Created: p.Created, Seq: at}
		}
	}
	return streams
}

// covered returns the sequence up to which an export covers a partition's stream. An unlisted
// stream with a lower number than a listed one is covered; an unlisted newer stream is not.
func covered(positions []Position, partition int) uint64 {
	newest := -1
	for _, p := range positions {
		if p.Partition == partition {
			return p.Sequence
		}
		newest = max(newest, p.Partition)
	}
	if partition < newest {
		return math.MaxUint64
	}
	return 0
}
