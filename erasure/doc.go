// Package erasure takes what an author wrote out of everything that holds it, and proves that it is gone.
//
//	children ──▶ KIND.erased ──▶ outbox, DLQ, archive: payloads without content
//	   ▲                                     │ all published, every consumer past them
//	   │                                     ▼
//	   │              dead letters, histories, thread caches; the author's earlier messages leave the stream, overwritten
//	   │                                     ▼
//	   └── something found ──────── a scan of everything ──── nothing found ──▶ finished
//
// The order is what makes it safe. The truth goes first: no write of an erased child succeeds any more, so every event that has content
// comes before its KIND.erased. That event is published behind all of them in the partition, so that whoever still holds one of them in
// memory (a relay that is frozen, with its claim) names a tail that has moved, and is refused. Consumers that have passed it apply nothing
// earlier. Only then does the erasure delete what is older, after it has recorded the sequences (broker.Erase): a stream's last sequence
// stays what it was, so the relay and the consumers continue.
//
// An erasure is a row of erasures from its first moment. It may be interrupted at any point and is then asked for again: every step finds
// for itself what is still to be done, in slices of one transaction each, fenced by the jobs' lease: while it runs nothing is archived.
//
// What it does not reach: dead row versions until vacuum, write-ahead logs and backups, freed blocks of file systems, and what
// subscribers keep (docs/erasure.md).
package erasure
