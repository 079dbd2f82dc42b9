// Package versioned is the two-column object table. Every version of an object is a row of (object
// jsonb, metadata jsonb), and no row is physically removed within its retention. The key columns
// are generated from the object, so SQL can index them. The object's shape may grow without a
// migration. It is for the packages that keep versions: store, kinds, projections/history and
// upkeep.
//
//	Upsert ──▶ LATEST ──── Upsert ───▶ ARCHIVED, and a new LATEST
//	             │
//	             └──────── Delete ───▶ ARCHIVED, and a new DELETED ──── Upsert ───▶ ARCHIVED, and a new LATEST
//
// Invariants after every transaction: an object has exactly one head, which is LATEST or DELETED.
// Every ARCHIVED version has a later one. Each version has its creator and time, and none was made
// before its predecessor. The tables refuse a second head (a partial unique index) and a version
// without a state, a creator or a time (checks). Check verifies the other invariants.
//
// Writers of one object wait for each other: an advisory lock, taken in one order, so none of them
// fails because of the others. Callers of Record do not wait for each other: each keeps its objects
// to itself. They share one lock of the table. Retention takes it exclusively, and so does a caller
// whose objects others may record too (LockAll).
//
// Get, List and ListDeleted read heads by key, Query by the fields of an index. History and Recent
// read an object's versions. Retain deletes objects that are no longer valid, and purges objects
// that have been deleted long enough. Only Retain and Purge remove rows.
//
// Upsert and Delete make the next version. Record takes versions that were numbered elsewhere, in
// any order and any number of times, and puts each in its place: a history is built from events
// with it.
//
// Only code names tables and columns: New panics on a name that is not a plain identifier, and
// values are always arguments.
package versioned
