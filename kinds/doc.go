// Package kinds describes what an installation stores: the kinds of edges (follow, like, ...) and of children (comment, review, ...).
//
// A kind is data, not code: builtin.yaml has those of every installation, and `tidings kinds apply` adds others while everything runs. The
// rest of the code knows the two archetypes and asks a Set for the names and capabilities of a kind:
//
//	edge   from ──kind──▶ to        one row per pair, ACTIVE or REMOVED; lists both ways, counts of both ends
//	child  parent ◀──kind── child   one row per child, with an author and a body; threaded or flat, moderated or not
//
// A Set is immutable. A Catalog holds the Set that is in force and reads it again from the database.
package kinds
