// Package restore brings the truth, the streams and the projections together again after any of them was restored from a backup, or lost. It is what
// `tidings restore` does, while relays and consumers run and the API does not.
//
//	streams ──┐ what the truth has lost           streams under new numbers      replay of consumers     erasures since       verify,
//	          ├──────────────────────────▶ truth ──────────────────────────▶ ... that cannot read on ──▶ the backup, again ──▶ mend
//	histories ┘ is written again
//
// Whatever survived of a write, its message on a stream or its version in a history, brings it back into the truth. So no version is given twice, and
// nobody downstream has to forget anything, except readers who are ahead of all that survived: the new streams tell them (docs/adr/0017-restore.md).
package restore
