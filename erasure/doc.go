// Package erasure takes what an author wrote, and the edges from and to them, out of everything that holds them, and proves that they are gone.
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
// Edges go the same way, and further. They are removed, by KIND.removed; when everybody has applied that, all of their messages leave the stream, the removals too, the
// rows of projections are deleted, and what tables and files have of their messages names nobody any more. The rows of the truth are last, for a version must not begin
// anew while anybody knows the old one: they are deleted when the scan has found nothing else, each if it is as the scan found it.
//
// An erasure is a row of erasures from its first moment. It may be interrupted at any point and is then asked for again: every step finds
// for itself what is still to be done, in slices of one transaction each, fenced by the jobs' lease: while it runs nothing is archived.
//
// What it does not reach: dead row versions until vacuum, write-ahead logs and backups, freed blocks of file systems, and what
// subscribers keep (docs/erasure.md).
package erasure
