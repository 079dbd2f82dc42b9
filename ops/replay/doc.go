// Package replay rebuilds a projection beside the live one, from the stream or from the truth, and
// then swaps the two. It is for operators' commands and for the console. It may change in any
// release.
//
//	lock (one replay of a consumer at a time) ──▶ drop the schema of an interrupted one ──▶ from the stream or the truth?
//	                                                                                        │
//	   ┌────────────────────────────────────────────────────────────────────────────────────┘
//	   ▼
//	its own schema, created by the projections' migrations: every table, index, policy and grant under its usual name
//	   ▼
//	truth only: each stream's last sequence, then the truth's entities as events, page by page
//	   ▼
//	its own consumer (NAME-replay, with offsets and dead letters in that schema) applies the streams from there
//	   ▼  it has caught up
//	one transaction: hold the live offsets, so that live batches wait ─▶ wait until the new tables have reached the live ones
//	                 ─▶ move the tables between the schemas ─▶ the live offsets become those of the new tables
//
// The projection's code runs unchanged: search_path directs its unqualified names to the new
// tables. Live instances and readers continue during the replay. Readers wait only while the tables
// are swapped, for a lock at most as long as lock_timeout. A reader sees either the old tables or
// the new ones, which contain every event of the old ones.
//
// An interrupted replay leaves only its schema, which the next replay drops.
//
// A record, for example the archiver's histories, is never rebuilt. Its replay applies the events
// to the live tables, which adds missing rows.
package replay
