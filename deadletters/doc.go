// Package deadletters retries and discards many dead letters, those of the outbox and those of consumers, and keeps notes on their groups.
//
// An operation is a row in the database of its letters. A slice of it acts on some letters and moves the row, in one transaction: a process that dies
// has done what the row says, and any other continues from there. One process at a time works on an operation: it holds the row's lease, and a slice of
// a process that has lost it is taken back. Letters that died after the operation was requested are never among its own, so those that fail again end nothing.
//
//	Start ─▶ row ─▶ Work: claim ─▶ slice ─▶ slice ─▶ ... ─▶ finished
//	                  ▲                │ the process dies, or stops
//	                  └── Run of any process, when the lease is over
package deadletters
