// Package history keeps the history of comments and follows: who did what, when.
//
//	comment and follow events ──▶ versioned.Record ──▶ comment_history, follow_history
//
// An event's payload is the entity's whole state, so each event is one version of it. A deleted or erased comment and a removed
// follow have a DELETED head; a pair that is followed again goes on with its history. Only versions that are missing are
// added, so events may come twice, late, or all over again. The histories are records, not projections: nothing here rebuilds
// them, and only retention, where it is configured, ends them: those of what has been gone for long, as a whole, with a note of up to which
// version, so that neither a replay nor a repair brings them back and verify does not miss them.
package history
