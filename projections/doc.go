// Package projections defines the contract of a projection (Projection) and the code that
// projections share: names for differences from the truth, and the comparison of two ordered
// results. It is for those who write a projection, and for the commands that verify, repair and
// replay it. It may change in any release.
//
// A projection is a package below this one. It turns a batch of events into changes of its own
// tables, inside a transaction that its caller owns. Each projection compares the entity's version,
// so events may come twice or late. No projection uses the stream or another projection.
// cmd/internal/fleet has the list of all projections.
package projections
