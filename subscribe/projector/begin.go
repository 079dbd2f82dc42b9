package projector

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// ErrBegun reports a projection that already has a position on the streams, also if an instance
// that still runs has just made it. Replay makes the projection begin again.
var ErrBegun = errors.New("projector: the projection has already begun")

// Position is the sequence up to which an export covers a stream. It is an element of "streams" in
// the first line of GET /v1/{kind}:export.
type Position = client.ExportPosition

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

// starts returns the earliest position after all exports on each stream. It does not have a stream
// that the exports do not cover at all: one that a partition did not have yet, and one that began
// and ended between two of the exports. Project reads it from its beginning.
func starts(exports [][]Position) map[int]consumers.Start {
	streams, last := make(map[int]consumers.Start), -1
	for _, positions := range exports {
		for _, p := range positions {
			if last = max(last, p.Partition); p.Stream != "" {
				streams[p.Partition] = consumers.Start{Stream: p.Stream, Created: p.Created, Seq: settings.Covered(exports, p.Partition)}
			}
		}
	}
	if len(streams) == 0 {
		return nil // the names of ended streams are unknown
	}
	for n := range last {
		if _, listed := streams[n]; !listed && settings.Covered(exports, n) == math.MaxUint64 {
			streams[n] = consumers.Start{Seq: math.MaxUint64}
		}
	}
	return streams
}
