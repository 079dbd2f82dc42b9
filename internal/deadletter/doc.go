// Package deadletter has the model of a dead letter, of an action on it and of a group of letters,
// and reads them. The outbox and the consumers each have a table of letters, which a Table
// describes to a Reader; each of the two writes its own. Cause extracts the cause from an error,
// and a group has the letters of one cause. It is for outbox and consumers, and for those who read
// their letters.
package deadletter
