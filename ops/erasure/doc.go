// Package erasure removes an author's texts, and the edges from and to the author, from every
// store, and proves that they are gone. It is for package erase, and so for operators' commands and
// for the console. It may change in any release.
//
//	children ──▶ KIND.erased ──▶ outbox, DLQ, archive: payloads without content
//	   ▲                                     │ all published, every consumer past them
//	   │                                     ▼
//	   │              dead letters, histories, thread caches; the author's earlier messages leave the stream, overwritten
//	   │                                     ▼
//	   └── something found ──────── a scan of everything ──── nothing found ──▶ finished
//
// The order makes it safe. The truth goes first: no later write of an erased child succeeds, so
// every event with content precedes the child's KIND.erased. The relay publishes that event after
// all of them in the partition. A frozen relay may still hold an earlier event in memory, but it
// names an old tail, and the stream refuses its publish. Consumers that have passed KIND.erased
// apply nothing earlier. Only then does the erasure record the sequences of the earlier messages
// and delete them (broker.Erase). The stream's last sequence does not change, so the relay and the
// consumers continue.
//
// Edges follow the same order, and more of them is deleted. The erasure removes them with
// KIND.removed. Once every consumer has applied that, all their messages leave the stream,
// including the removals. The rows of projections are deleted, and the remaining copies of their
// messages in tables and files name nobody. The rows of the truth are last, because a version must
// not restart while any process knows the old one. They are deleted once the scan has found nothing
// else, each only if it is as the scan found it.
//
// An erasure is a row of erasures from its first moment. It may be interrupted at any point and is
// then requested again. Every step finds its remaining work by itself. It works in slices of one
// transaction each, fenced by the jobs' lease, so nothing is archived while it runs.
//
// It does not reach dead row versions until vacuum, write-ahead logs and backups, freed blocks of
// file systems, and the data of subscribers (docs/erasure.md).
package erasure
