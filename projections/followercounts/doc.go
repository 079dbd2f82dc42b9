// Package followercounts is the read side of edges, of every kind: each object's counts, and the pages of its edges both ways.
//
//	edge events ──▶ fold per edge ──▶ edge_lists (newer versions only) ──▶ active(after) - active(before)
//	                                                                        summed per kind and object
//	                                                                                  │
//	                                                                             edge_counts
//
// The projector keeps its own copy of every edge, so that a count moves only when an edge's state does: duplicates, old events
// and whole replays change nothing. Counts are written last for each kind of the batch and in key order, so two batches that share objects
// wait for each other instead of deadlocking.
//
// The incoming edges of an object with very many are spread over shards of the reverse index (shards.go); pages merge them.
//
// What it does not do: read the truth (verify.go does, to compare), or know where events come from.
package followercounts
