// Package coldstore keeps ranges of the outbox archive outside the database: in a directory or in S3, as compressed segments with a
// manifest, until they are restored. docs/archive.md describes the files.
//
//	             Export                          Check                    range dropped
//	archive ───────────────▶ COMPLETE ────────────────────────▶ released ──────────────▶ cold alone ─── Restore ──▶ archive
//	  ▲  rows change           │ files read back                  │ files read again,        │
//	  └────────────────────────┘ stale: exported again            │ the table compared       │ Redact: new files, then the old ones go
//
// What it promises: a range that Check gives free stands outside in files that were just read from end to end and hold, byte for
// byte, what the table holds. Whatever dies, is slow, lies or is full meanwhile, the worst is that Check says no.
//
// How: an export is begun as a row of outbox_archive_exports, under an id that names its directory, so nothing is ever
// overwritten and the files of whoever died are known. It counts from the one transaction that makes its row COMPLETE, after its
// manifest was written and all was read back. Only directories of ids that the table knows are ever deleted.
//
// The caller keeps the archive still: everything but Verify runs under the jobs' lease, whose fence is in each transaction.
package coldstore
