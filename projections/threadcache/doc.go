// Package threadcache is the read side of comments: a post's thread, oldest first or in its own order.
//
//	comment events ──▶ fold per comment ──▶ thread_comments (newer versions only) ──▶ visible(after) - visible(before)
//	                                              ▲                                    summed per ancestor
//	                                              └──────── visible_descendants, shown ────────┘
//
// There is one row per comment. A row is visible when its two states say so, and shown in a threaded page when it is visible
// or has something visible below it: then it is a tombstone. Ancestors are found by the prefixes of the path, whose levels
// are LevelLen characters joined by '/'.
//
// Duplicates and old events change nothing. A parent that comes after its replies finds them by path and ends up right.
package threadcache
