// Package consumers delivers events to projections, each exactly once. It knows no read table.
//
//	lease partitions ──▶ read their offsets ──▶ ordered consumer from the lowest offset + 1
//	       ▲                                            │ what is there, up to a batch
//	       │ leases moved, stream or database failed    ▼
//	       └──────────────────────────────── one transaction: offsets (guarded by their old value),
//	                                         then the projection, then dead letters
//
// The offset is written in the transaction of its effect, so an event is applied once whatever is killed, paused or delivered
// twice. A lease only saves work: two instances that both believe in one are told apart by the offset's guard.
//
// Gaps are proven from the messages (see session.check): what was erased on purpose is passed over, what expired before it was
// read stops the partition, and so does a stream that is not the one the offsets belong to. A stopped partition is shown by
// consumer_partitions_stuck and Ready, and looked at again from time to time; the others go on. Messages that no relay wrote, and copies of events,
// are skipped and counted.
//
// A poison event is parked with every later event of its aggregate in consumer_dead_letters, in the same transaction. DeadLetters
// retries and discards them:
//
//	poison ──▶ parked ◀── later events of the aggregate
//	             │ Retry: in order, through the projection, until one fails again        Discard: the first one alone
//	             ▼
//	           none left: the aggregate goes on
//
// Whoever parks or unparks holds the partition's offset, so an event that arrives meanwhile is either behind those in the
// dead letters or applied after them.
//
// A row of consumer_pauses makes every instance of a consumer finish its batch and take no more (Pause, Resume).
package consumers
