// Package replay builds a projection anew beside the live one, from the stream or from the truth, and puts it in its place.
//
//	lock (one replay of a consumer at a time) ──▶ drop what an interrupted one left ──▶ from the stream or the truth?
//	                                                                                        │
//	   ┌────────────────────────────────────────────────────────────────────────────────────┘
//	   ▼
//	a schema of its own, made by the projections' migrations: every table, index, policy and grant under its usual name
//	   ▼
//	truth only: each stream's last sequence, then the truth's entities as events, page by page
//	   ▼
//	a consumer of its own (NAME-replay, with offsets and dead letters in that schema) applies the streams from there on
//	   ▼  it has caught up
//	one transaction: hold the live offsets, so that live batches wait ─▶ wait until the new tables are at least as far
//	                 ─▶ move the tables between the schemas ─▶ the live offsets become those of the new tables
//
// The projection's own code runs unchanged: search_path leads its unqualified names to the new tables. Live instances and readers
// go on throughout; readers wait only while the tables change places, for a lock at most as long as lock_timeout. A reader sees the
// old tables or the new ones, which have every event that the old ones had.
//
// Nothing outlives an interrupted replay but its schema, which the next one drops.
//
// A record, such as the archiver's histories, is never built anew: its replay applies the events to the live tables, which add
// what is missing.
package replay
