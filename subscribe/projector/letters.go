package projector

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/consumers"
)

// These types and errors belong to what this package returns, so your program imports no other one.
type (
	// Lagging is how far a projection is behind the streams.
	Lagging = consumers.ConsumerLag
	// Letters has the operations on the dead letters of a projection.
	Letters = consumers.DeadLetters
	// Letter is a parked event.
	Letter = consumers.DeadLetter
	// LetterFilter selects dead letters.
	LetterFilter = consumers.DeadLetterFilter
	// LetterRequest names a dead letter, and who retries or discards it and why.
	LetterRequest = consumers.DeadLetterRequest
	// LetterResult is what a retry or a discard did.
	LetterResult = consumers.DeadLetterResult
	// NotFirstError reports a dead letter behind an earlier one of its aggregate.
	NotFirstError = consumers.NotFirstError
)

// ErrNoLetter reports a dead letter that does not exist. It may have been retried or discarded.
var ErrNoLetter = consumers.ErrNotParked

// Pause makes every instance of a projection finish its batch in hand and take no more events until
// Resume, also after a restart. If the projection is already paused, Pause changes nothing and
// returns false. It does not check that the projection exists.
func Pause(ctx context.Context, pool *pgxpool.Pool, name, actor, reason string) (bool, error) {
	return consumers.Pause(ctx, pool, name, consumers.Paused{Actor: actor, Reason: reason})
}

// Resume ends the pause of a projection. It returns false if the projection was not paused.
func Resume(ctx context.Context, pool *pgxpool.Pool, name string) (bool, error) {
	return consumers.Resume(ctx, pool, name)
}
