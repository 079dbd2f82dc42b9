// Package followercounts is the read side of follows: each account's counts, and the pages of who follows whom.
//
//	follow events ──▶ fold per pair ──▶ follow_edges (newer versions only) ──▶ active(after) - active(before)
//	                                                                            summed per account
//	                                                                                   │
//	                                                                            follower_counts
//
// The projector keeps its own copy of every pair, so that a count moves only when a pair's state does: duplicates, old events
// and whole replays change nothing. Counts are written last in the batch and in key order, so two batches that share accounts
// wait for each other instead of deadlocking.
//
// The followers of an account with very many are spread over shards of the reverse index (shards.go); pages merge them.
//
// What it does not do: read the truth (verify.go does, to compare), or know where events come from.
package followercounts
