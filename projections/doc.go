// Package projections has what the projections share: how a difference from the truth is named, and reading two ordered
// results side by side.
//
// A projection is a package below this one. It turns a batch of events into changes of its own tables, inside a transaction
// that its caller owns:
//
//	Name() string                                          also its name in consumer_offsets
//	Aggregates() []string                                  the aggregate types that it wants
//	Apply(ctx, tx pgx.Tx, events []event.Event) error      in stream order; event.Permanent marks an event's own fault
//
// Every one of them guards by the entity's version, so events may come twice or late. None knows the stream, and none knows
// another. verify.go of each compares its tables with the truth.
package projections
