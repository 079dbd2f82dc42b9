// Package consumers delivers events to projections, each exactly once. It knows no read table.
//
//	lease partitions ──▶ a reader each: read the offset of its stream ──▶ ordered consumer from the offset + 1
//	       ▲                                            │ what is there, up to a batch
//	       │ the stream, its leader or the database failed   ▼
//	       └──────────────────────────────── one transaction: the offset (guarded by its old value),
//	                                         then the projection, then dead letters
//
// The offset is written in the transaction of its effect, so an event is applied once whatever is killed, paused or delivered
// twice. A lease only saves work: two instances that both believe in one are told apart by the offset's guard. The readers of an instance know
// nothing of each other.
//
// Sequences rise by one. A gap is passed over only if the record of erasures has all of it (reader.prove). What expired before it was read, a hole,
// and a stream that is not the one of the offset stop the partition: consumer_partitions_stuck and Ready show it, and the reader looks again
// from time to time. While a stream has no leader its partition waits (consumer_waiting_for_leader), and nothing of it is called lost; on a
// replicated stream a loss is believed once the leader has said so for 20 s. An instance that cannot see the streams it needs leaves its
// partitions to others and tries another broker. Messages that no relay wrote are skipped and counted. Copies of events change nothing: projections compare versions.
//
// A stream ends with a closing message when a resize or a repair replaces its partition. Its offset is then closed, and the offsets of its
// successors are made in the same transaction. A stream is begun only when all that it comes after are closed:
//
//	EVENTS-0 ──▶ closing message ──▶ offset closed ──┬──▶ EVENTS-1, slots 0-15
//	                                                 └──▶ EVENTS-2, slots 16-31
//
// A poison event is parked with every later event of its aggregate in consumer_dead_letters, in the same transaction. DeadLetters
// retries and discards them:
//
//	poison ──▶ parked ◀── later events of the aggregate
//	             │ Retry: in order, through the projection, until one fails again        Discard: the first one alone
//	             ▼
//	           none left: the aggregate goes on
//
// Whoever parks or unparks holds the offset of the stream, so an event that arrives meanwhile is either behind those in the
// dead letters or applied after them.
//
// A row of consumer_pauses makes every instance of a consumer finish its batch and take no more (Pause, Resume).
package consumers
