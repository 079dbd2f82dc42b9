// Package deadletter has the common parts of the dead letters of the outbox and of consumers. Cause
// extracts the cause from an error, and groups collect the letters of one cause. Each table of dead
// letters has the columns cause, retries, group_id, dead_at and id, and the indexes of Groups. The
// owner of the table passes its name.
package deadletter
