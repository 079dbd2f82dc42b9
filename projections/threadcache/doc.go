// Package threadcache is the read side of comments: a post's comments by age, in the order of the
// thread, as a tree, and in numbers. It is for its consumer, and for the API and the console, which
// read its tables. It may change in any release.
//
//	comment events ──▶ fold per comment ──▶ child_lists (newer versions only) ──▶ visible(after) - visible(before)
//	                                              ▲                                     │            │
//	                                              └── visible_descendants, shown ◀── per ancestor    ▼
//	                                                                        child_buckets: per bucket and per group of buckets
//	thread events ──▶ child_settings                                       child_totals: new comments per post
//
// There is one row per comment. The two states of a row decide whether it is visible. A threaded
// page shows a visible row. It also shows a row with a visible descendant, as a tombstone. The
// prefixes of a path name the ancestors; its levels have LevelLen characters and are joined by '/'.
//
// A bucket is a range of the chronological order with the count of its visible comments. A group is
// a range of buckets:
//
//	group   -inf ............................ k100 ...          a page after N comments: the groups' counts lead to the group,
//	bucket  -inf .. k1 .. k2 ......... k99 .. k100 .. k101 ...  its buckets' counts to the bucket; the rest are the bucket's rows
//
// A range begins at a comment's key and ends where the next range begins. It is split when it has
// grown to twice its size, and otherwise keeps its place. Rows have no numbers, so a late or a
// deleted comment changes only the counts of its own bucket and group.
//
// Duplicates and old events change nothing. A parent that comes after its replies finds them by
// path, so its count is right.
package threadcache
