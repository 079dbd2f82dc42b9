// Package history keeps the history of comments and follows: the actor, the time and the content of
// each change. It is for its consumer, and for the API and the console, which read its tables. It
// may change in any release.
//
//	comment and follow events ──▶ versioned.Record ──▶ comment_history, follow_history
//
// An event's payload is the entity's whole state, so each event is one version of it. A deleted or
// erased comment and a removed follow have a DELETED head. If the pair is followed again, its
// history continues. Record adds only missing versions, so events may come twice, late, or all
// again.
//
// The histories are records: a replay does not rebuild them. Only retention, if it is configured,
// deletes histories, each as a whole, of entities that were removed long ago. It records the last
// version of each. So neither a replay nor a repair restores a purged history, and verify does not
// report it.
package history
