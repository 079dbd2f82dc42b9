// Package letters retries and discards many dead letters at once, of the outbox and of consumers.
// It also keeps notes on groups of them. It is for operators' commands and for the console. It may
// change in any release.
//
// An operation is a row in the database of its letters. A slice of the operation acts on some
// letters and updates the row, in one transaction. If a process dies, the row has the exact
// progress, and another process continues from there.
//
// One process at a time works on an operation, because it holds the row's lease. A slice of a
// process that lost the lease is rolled back. An operation excludes letters that died after its
// request, so letters that fail again cannot keep it running.
//
//	Start ─▶ row ─▶ Work: claim ─▶ slice ─▶ slice ─▶ ... ─▶ finished
//	                  ▲                │ the process dies, or stops
//	                  └── Run of any process, when the lease is over
package letters
