// Package status reads how a whole installation is: what waits in the outbox, the partitions and their streams, the consumers with their lags
// and pauses, who holds which leases, the jobs that run, and who blocks whom. It is what `tidings status` prints. It changes nothing.
//
//	PostgreSQL (truth) ──────> outbox, leases of relays, jobs ─┐
//	NATS ────────────────────> streams of the partitions ──────┼─> State
//	PostgreSQL (projections) ─> lags, pauses, leases ──────────┘
//
// A server that does not answer is part of the state. So is what the others then cannot know.
package status
