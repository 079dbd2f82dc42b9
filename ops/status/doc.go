// Package status reads the state of an installation, which `tidings status` prints. The state has
// the pending messages of the outbox, the partitions with their streams, and the lags and pauses of
// consumers. It also has the holders of leases, the running jobs and the blocked sessions. The
// package changes nothing. It is for operators' commands and for the console. It may change in any
// release.
//
//	PostgreSQL (truth) ──────> outbox, leases of relays, jobs ─┐
//	NATS ────────────────────> streams of the partitions ──────┼─> State
//	PostgreSQL (projections) ─> lags, pauses, leases ──────────┘
//
// A server that does not answer is part of the state. Everything that the other servers cannot know
// then is unknown.
package status
