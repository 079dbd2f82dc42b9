// Package projections has what the system asks of a projection (Projection), and what the projections share: how a difference from
// the truth is named, and reading two ordered results side by side.
//
// A projection is a package below this one. It turns a batch of events into changes of its own tables, inside a transaction that its
// caller owns. Every one of them guards by the entity's version, so events may come twice or late. None knows the stream, and none
// knows another. cmd/internal/fleet names them all.
package projections
