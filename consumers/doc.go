// Package consumers applies the messages of streams to projections, each exactly once. It knows no
// read table. It is for the path of an event: the processes of projections, and package subscribe.
// It may change in any release.
//
//	lease partitions ──▶ a reader each: read the offset of its stream ──▶ ordered consumer from the offset + 1
//	       ▲                                            │ the available events, up to a batch
//	       │ the stream, its leader or the database failed   ▼
//	       └──────────────────────────────── one transaction: the offset (guarded by its old value),
//	                                         then the projection, then dead letters
//
// A batch writes the offset in the transaction of its effect. So each message is applied once, no
// matter which process is killed or paused, and no matter what is delivered twice. A lease only
// saves work: if two instances believe that they hold one lease, the guard of the offset lets only
// one of them commit. The readers of an instance are independent of each other.
//
// Sequences rise by one. A reader passes over a gap only if the record of erasures contains all of
// it (reader.prove). A partition stops if its events expired before they were read, if events are
// missing, or if the stream is not the one of the offset or has another message there (lost). Then
// tidings_consumer_partitions_stuck and Ready report it, and the reader checks again every Recheck.
// While a stream has no leader, its partition waits (tidings_consumer_partitions_waiting), and the
// consumer declares no event lost. On a replicated stream the consumer believes a loss after the
// leader has reported it for 20 s. An instance that cannot see the streams it needs leaves its
// partitions to others and tries another broker. A reader skips and counts messages that no relay
// wrote. Copies of events change nothing, because projections compare versions.
//
// A stream ends with a closing message when a resize or a repair replaces its partition. One
// transaction closes its offset and creates the offsets of its successors. A reader begins a stream
// only when all its predecessors are closed:
//
//	EVENTS-0 ──▶ closing message ──▶ offset closed ──┬──▶ EVENTS-1, slots 0-15
//	                                                 └──▶ EVENTS-2, slots 16-31
//
// A consumer parks a poison event in consumer_dead_letters in the same transaction, and later parks
// every following event of its aggregate. DeadLetters retries and discards them:
//
//	poison ──▶ parked ◀── later events of the aggregate
//	             │ Retry: in order, through the projection, until one fails again        Discard: the first one alone
//	             ▼
//	           none left: the aggregate continues
//
// Each transaction that parks or unparks events locks the offset of the stream. So an event that
// arrives meanwhile is either parked behind the dead letters or applied after them.
//
// A row of consumer_pauses makes every instance of a consumer finish its batch and take no more
// (Pause, Resume).
package consumers
