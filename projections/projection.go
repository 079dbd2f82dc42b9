package projections

import (
	"context"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// Projection is all that the system asks of a projection. The pools act as the system role; truth and projection may be of two servers.
// docs/adding-a-projection.md says how to write one, and TestEveryProjectionKeepsTheContract holds each of them to this.
type Projection interface {
	// Name is also the consumer's, in consumer_offsets and leases.
	Name() string
	// Wants reports whether events of the aggregate type are Apply's.
	Wants(aggregateType string) bool
	// Apply changes the projection's tables in tx, by events in stream order. See consumers.Projection.
	Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error

	// Tables names the projection's tables, all of them. One without tables of its own keeps a record, which is only added to.
	Tables() []string
	// Truth yields events that say what state each entity of the truth is in, in bounded memory. It ends at its first error.
	Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error]

	// Verify compares everything with the truth, reports each difference, and returns how many rows it compared. What has not been
	// applied yet is a difference too, so it is run when the consumer's lag is 0. Memory does not grow with the tables.
	Verify(ctx context.Context, truth, projection *pgxpool.Pool, report func(Difference)) (checked int64, err error)
	// Window compares a bounded number of entities from after on; nil is the beginning, and, as next, the end. A difference may be an
	// event on its way. The functions Window and Kinds do the most of it.
	Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int, report func(Difference)) (checked int64, next any, err error)
	// Mend brings what the keys name to the truth, except what is parked. The caller holds the consumer's offsets in tx: an event that
	// is on its way finds that its version is there. It returns what is left, for which the caller begins another transaction: the consumer waits for a bounded step.
	Mend(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []Key, parked Parked) (rest []Key, err error)

	// Reached reports whether the projection has each of the entities, of types that it wants, at the version that the ref names, or a
	// later one. The transaction's tenant is set.
	Reached(ctx context.Context, tx pgx.Tx, refs []event.Ref) (bool, error)
	// Redact takes the content of these children out, whoever reads it, and returns of how many rows. With look it only counts them.
	Redact(ctx context.Context, tx pgx.Tx, tenant int64, children []string, look bool) (n int64, err error)
	// RedactActor makes event.ErasedActor of an actor among a bounded number of rows behind after (nil: the first), returns of how many rows, and behind what the next step
	// begins; nil at the end. With look it only counts them. Nothing to do where nobody keeps who did what.
	RedactActor(ctx context.Context, tx pgx.Tx, tenant int64, actor string, after any, look bool) (n int64, next any, err error)
	// Forget deletes what the projection keeps of an object's edges behind after, in a bounded step, as if each had been removed before. It returns how many rows these
	// were, and behind which pair the next step begins; nil at the end. With look it only counts, what it would find now; else the caller holds the consumer's offsets in tx.
	Forget(ctx context.Context, tx pgx.Tx, of EdgesOf, after Pair, look bool) (n int64, next *Pair, err error)
}
