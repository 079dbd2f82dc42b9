// Package kinds describes the kinds of an installation: kinds of edges (follow, like, ...) and of
// children (comment, review, ...). It is for everyone who reads what an installation may store, in
// Tidings and downstream. It is supported: CHANGELOG.md names every change that a program of yours
// would notice.
//
// A kind is data, not code. builtin.json has the kinds of every installation, and `tidings kinds
// apply` adds others without a restart. The rest of the code knows the two archetypes, and reads
// the names and capabilities of a kind from a Set:
//
//	edge   from ──kind──▶ to        one row per pair, ACTIVE or REMOVED; lists both ways, counts of both ends
//	child  parent ◀──kind── child   one row per child, with an author and a body; threaded or flat, moderated or not
//
// A Set is immutable. Package catalog has the Set in force and reads it again from the database.
package kinds
