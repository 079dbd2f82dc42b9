// Package followercounts is the read side of edges of every kind: each object's counts and what the
// attributes of its edges add up to, the pages of its edges in both directions, and the order of
// children that edges rank. It is for its consumer, and for the API, which reads its
// tables. It may change in any release.
//
//	edge events ──▶ fold per edge ──▶ edge_lists (newer versions only) ──▶ active(after) - active(before)
//	                                                                        summed per kind and object
//	                                                                                  │
//	                                                                edge_counts, edge_aggregates ──▶ score
//	                                                                                                   │
//	events of ranked children ──▶ newer versions only ────────────────────────────────────────────▶ child_ranks
//
// The projection keeps its own copy of every edge, so a count changes only when an edge's state
// does: duplicates, old events and whole replays change nothing. Apply writes the counts last for
// each kind of the batch, in key order, and the ranks after all. So two batches that share objects
// wait for each other instead of deadlocking.
//
// If an object has very many incoming edges, they are spread over shards of the reverse index
// (shards.go), and pages merge the shards.
//
// The projection does not read the truth, except to compare itself with it (verify.go). It does not
// know where events come from.
package followercounts
