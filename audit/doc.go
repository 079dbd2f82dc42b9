// Package audit records what operators and moderators do: who did what to what, why, and what came of it (operator_acts, in the truth).
//
//	Begin ──▶ under way ──▶ Finish ──▶ its outcome
//	  └─ the same act id again: the record of the first, and nothing is done
//
// It promises that an act whose Begin succeeded is on record, whatever became of its answer. It does not promise that an act under way ever finishes: the
// process that did it may have ended. Nobody may change or delete a record.
package audit
