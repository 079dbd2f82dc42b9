// Package restore makes the truth, the streams and the projections agree again after any of them
// was restored from a backup, or lost. It does the work of `tidings restore`, while relays and
// consumers run and the API does not. It is for operators' commands. It may change in any release.
//
//	streams ──┐ restore lost writes               streams under new numbers      replay of consumers    erasures since        verify,
//	          ├──────────────────────────▶ truth ──────────────────────────▶ ... that are stranded ──▶ the backup, again ──▶ repair
//	histories ┘ into the truth
//
// A write survives as a message on a stream or as a version in a history. Either restores it to the
// truth. So no version is used twice, and no reader downstream has to discard anything, with one
// exception. A reader may be ahead of everything that survived: the new streams show it that
// (docs/adr/0017-restore.md).
package restore
