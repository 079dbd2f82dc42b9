// Package versioned is the two-column object table: every version of an object is a row of (object jsonb, metadata jsonb), and
// nothing is physically removed within its retention. The key columns are generated from the object, so SQL can index them;
// the object's shape may grow without a migration.
//
//	Upsert ──▶ LATEST ──── Upsert ───▶ ARCHIVED, and a new LATEST
//	             │
//	             └──────── Delete ───▶ ARCHIVED, and a new DELETED ──── Upsert ───▶ ARCHIVED, and a new LATEST
//
// What holds after every transaction: an object has exactly one head, which is LATEST or DELETED; every ARCHIVED version has a
// later one; each version names who made it and when, and none was made before its predecessor. The tables refuse a second head
// (a partial unique index), a version without a state, a creator or a time (checks); what they cannot hold, Check looks for.
// Writers of one object wait for each other (an advisory lock, taken in one order), so none of them fails for the others. Those who Record
// do not: each keeps its objects to itself, and they share one lock of the table that retention takes alone.
//
// Get, List and ListDeleted read heads by key, Query by the fields of an index; History and Recent read an object's versions. Retain
// deletes what is no longer valid and purges what has been deleted long enough: nothing else removes a row.
//
// Upsert and Delete make the next version. Record takes versions that somebody else numbered, in any order and any number of
// times, and puts each in its place: it is how a history is kept from events.
//
// Only code names tables and columns: New panics on a name that is not a plain identifier, and values are always arguments.
package versioned
