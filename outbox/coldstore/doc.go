// Package coldstore keeps ranges of the outbox archive outside the database until they are
// restored: in a directory or in S3, as compressed segments with a manifest. docs/archive.md
// describes the files. It is for operators' commands and for the archiver's jobs. It may change in
// any release.
//
//	             Export                          Check                    range dropped
//	archive ───────────────▶ COMPLETE ────────────────────────▶ released ──────────────▶ cold alone ─── Restore ──▶ archive
//	  ▲  rows change           │ files read back                  │ files read again,        │
//	  └────────────────────────┘ stale: exported again            │ the table compared       │ Redact: new files, then the old ones go
//
// It promises that a range released by Check exists in files, which were just read from end to end
// and equal the table byte for byte. If a process or the store dies, hangs, runs full or returns
// wrong data, Check refuses at worst.
//
// An export begins as a row of outbox_archive_exports, under an id that names its directory. So
// nothing is ever overwritten, and the files of a dead process are known. The export counts from
// the transaction that makes its row COMPLETE, after its manifest was written and all files were
// read back. Only directories of ids in the table are ever deleted. An exporter that fails removes
// its own files, because it may have been frozen while others searched for them.
//
// The caller keeps the archive unchanged: everything except Verify runs under the jobs' lease,
// whose fence is in each transaction.
package coldstore
