// Package consumers delivers events to projections, each exactly once. It knows no read table.
//
//	look at the streams ──▶ lease partitions ──▶ for each that is held, a reader of its own:
//	                                               offset ──▶ predecessors closed? ──▶ ordered consumer from offset + 1
//	                                                  ▲                                     │ what is there, up to a batch
//	                                                  │ the stream or the database failed   ▼
//	                                                  └────────────── one transaction: the offset (guarded by its old value),
//	                                                                  then the projection, then dead letters
//
// The offset is written in the transaction of its effect, so an event is applied once whatever is killed, paused or delivered
// twice. A lease only saves work: two instances that both believe in one are told apart by the offset's guard. An instance that
// cannot see the streams leaves its partitions to others, although it may reach the database.
//
// A partition is a stream, and its sequences rise by one. A gap is passed over when it was recorded as erased; any other stops the
// partition, and so does a stream that is not the one the offset belongs to. What the leader of the stream says decides. While there
// is none the partition waits. A stopped partition is shown by consumer_partitions_stuck and Ready, and its reader looks again from time to
// time; the other readers do not notice.
//
// A stream that was closed is finished before its successors begin: the transaction that applies the closing message closes the
// offset and makes theirs.
//
//	open ──▶ (closing message applied, all successors exist) ──▶ closed; the successors are open at 0
//	  └────▶ (a repair replaced the lost stream: Rebase) ─────────▶ closed; the replacement is open at 0
//
// A poison event is parked with every later event of its aggregate in consumer_dead_letters, in the same transaction. DeadLetters
// retries and discards them:
//
//	poison ──▶ parked ◀── later events of the aggregate
//	             │ Retry: in order, through the projection, until one fails again        Discard: the first one alone
//	             ▼
//	           none left: the aggregate goes on
//
// Whoever parks or unparks holds the stream's offset, so an event that arrives meanwhile is either behind those in the
// dead letters or applied after them.
//
// A row of consumer_pauses makes every instance of a consumer finish its batches and take no more (Pause, Resume).
package consumers
