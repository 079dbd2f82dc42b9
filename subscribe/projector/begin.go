package projector

import (
	"context"
	"errors"
	"fmt"

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

// starts returns the earliest position after all exports on each stream.
func starts(exports [][]Position) map[int]consumers.Start {
	streams := make(map[int]consumers.Start)
	for _, positions := range exports {
		for _, p := range positions {
			if p.Stream == "" {
				continue // Project reads it from its beginning
			}
			streams[p.Partition] = consumers.Start{Stream: p.Stream, Created: p.Created, Seq: settings.Covered(exports, p.Partition)}
		}
	}
	return streams
}
