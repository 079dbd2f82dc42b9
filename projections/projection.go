package projections

import (
	"context"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// Projection is the contract of a projection. The pools act as the system role; the truth and the
// projection may be on two servers. docs/adding-a-projection.md describes how to write one, and
// TestEveryProjectionKeepsTheContract tests each.
type Projection interface {
	// Name returns the name of the projection and of its consumer, in consumer_offsets and leases.
	Name() string
	// Wants reports whether Apply takes events of the aggregate type.
	Wants(aggregateType string) bool
	// Apply changes the projection's tables in tx by events in stream order. See
	// consumers.Projection.
	Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error

	// Tables returns the names of all tables of the projection. A projection without tables of its
	// own keeps a record, to which it only adds rows.
	Tables() []string
	// Truth yields one event per entity of the truth, with the entity's current state, in bounded
	// memory. It ends at its first error.
	Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error]

	// Verify compares everything with the truth, reports each difference, and returns the number of
	// compared rows. An event that is not applied yet causes a difference, so the caller waits for
	// a consumer's lag of 0. Memory does not grow with the tables.
	Verify(ctx context.Context, truth, projection *pgxpool.Pool, report func(Difference)) (checked int64, err error)
	// Window compares at most limit entities after the given place. A nil after means the
	// beginning; a nil next means the end. A difference may be an event that is not applied yet.
	// The functions Window and Kinds do most of the work.
	Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int,
		report func(Difference)) (checked int64, next any, err error)
	// Repair sets the rows of the keys to the truth, except rows of parked aggregates. The caller
	// holds the consumer's offsets in tx. A later event of a repaired version changes nothing,
	// because the row already has that version. Repair returns the remaining keys, for which the
	// caller begins another transaction: each step is bounded, because the consumer waits for it.
	Repair(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []Key, parked Parked) (rest []Key, err error)

	// Reached reports whether the projection has each of the entities at the version of the ref, or
	// a later one. The entities are of types that the projection wants. The transaction's tenant is
	// set.
	Reached(ctx context.Context, tx pgx.Tx, refs []event.Ref) (bool, error)
	// Redact removes the content of these children for all readers, and returns the number of
	// changed rows. With dryRun it only counts them.
	Redact(ctx context.Context, tx pgx.Tx, tenant int64, children []string, dryRun bool) (n int64, err error)
	// RedactActor replaces an actor by event.ErasedActor in a bounded number of rows after the
	// given place; nil means the first. It returns the number of these rows and the place of the
	// next step, which is nil at the end. With dryRun it only counts. It does nothing if the
	// projection does not keep actors.
	RedactActor(ctx context.Context, tx pgx.Tx, tenant int64, actor string, after any, dryRun bool) (n int64, next any, err error)
	// Forget deletes an object's edges after the given pair in a bounded step, with the effect of a
	// removal of each edge. It returns the number of deleted rows and the pair after which the next
	// step begins, which is nil at the end. With dryRun it only counts the rows that exist now.
	// Without dryRun the caller holds the consumer's offsets in tx.
	Forget(ctx context.Context, tx pgx.Tx, of EdgesOf, after Pair, dryRun bool) (n int64, next *Pair, err error)
}

// Record is a projection that a replay adds to while the live consumer does, because it has no
// tables of its own to build.
type Record interface {
	Projection
	// ForReplay returns the projection that the replay uses.
	ForReplay() Projection
}
