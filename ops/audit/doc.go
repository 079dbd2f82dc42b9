// Package audit records the acts of operators and moderators: who did what to which object, why,
// and with which outcome (table operator_acts in the truth). It is for the console and for
// operators' commands. It may change in any release.
//
//	Begin ──▶ in progress ──▶ Finish ──▶ outcome
//	  └─ the same act id again: the record of the first act, and nothing else
//
// It promises that an act whose Begin succeeded is on record, whether or not its answer arrived. It
// does not promise that an act ever finishes, because its process may end before. Nobody may change
// or delete a record.
package audit
