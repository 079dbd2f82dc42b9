// Package deadletter is what the dead letters of the outbox and those of consumers share: the cause that an error names (Cause), and groups of letters
// of one cause. Each table of them has the columns cause, retries, group_id, dead_at and id, and the indexes of Groups; the owner of the table names it.
package deadletter
