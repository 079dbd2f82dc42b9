// Package threadcache is the read side of comments: a post's thread by age, in its own order, as a tree, in numbers.
//
//	comment events ──▶ fold per comment ──▶ child_lists (newer versions only) ──▶ visible(after) - visible(before)
//	                                              ▲                                     │            │
//	                                              └── visible_descendants, shown ◀── per ancestor    ▼
//	                                                                        child_buckets: per bucket and per group of buckets
//	thread events ──▶ child_settings                                       child_totals: comments that are new, per post
//
// There is one row per comment. A row is visible when its two states say so, and shown in a threaded page when it is visible
// or has something visible below it: then it is a tombstone. Ancestors are found by the prefixes of the path, whose levels
// are LevelLen characters joined by '/'.
//
// A bucket is a range of the chronological order and the count of the visible comments in it; a group is a range of buckets:
//
//	group   -inf ............................ k100 ...          a page behind N comments: the group by the groups' counts, the
//	bucket  -inf .. k1 .. k2 ......... k99 .. k100 .. k101 ...  bucket by those of its buckets, the rest in the bucket's rows
//
// A range begins at a comment's key and ends where the next begins. It is split when it has grown to twice its size, and else
// stays where it is: nothing is numbered, so what comes late or goes moves the counts of its own bucket and group alone.
//
// Duplicates and old events change nothing. A parent that comes after its replies finds them by path and ends up right.
package threadcache
