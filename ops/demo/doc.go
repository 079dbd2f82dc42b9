// Package demo simulates a small, busy site. Users follow each other, like, write and answer.
// Moderators decide on the children in their queue. Threads open, become busy and are locked. The
// demo is a client of the API and reads the kinds from it, so it also uses kinds that an operator
// applied. It is for the command `tidings demo`, which gives dashboards and the console something
// to show. It may change in any release.
//
//	ticker (rate) ─> worker ─> next (the seed and the site's memory) ─> client ─> API
//	                   └─ answers: children to answer and edit, edges to remove, threads to lock ─> next
//
// It keeps only its latest writes in memory. So it can stop and start at any time, and several may
// run side by side. While the API is unavailable, it waits.
package demo
