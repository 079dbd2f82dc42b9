// Package shares declares what the callers of a process share, and how much of it one of them may
// hold. It is for the API, the console and the ops port, and for the page that lists the shares.
//
// Table has a row for each shared resource: its bound for all callers together, for one tenant, and
// for one token, or for one address before the token is known. The code that gives a resource away
// takes its bounds from the row. Most rows are counted by a Pool. docs/security.md lists the rows,
// and a test attacks each of them with a greedy and a slow caller beside a modest one.
//
//	a caller takes n ── within its own bounds, and n are free ──▶ holds n ── releases ──▶ free again
//	                 └─ otherwise: it is refused or waits, and holds what it held before
//
// A bound of "k times what is free" (dynamic thresholds: Choudhury and Hahne, 1998) leaves
// something free however many callers are greedy: with k = 3, one greedy caller has three quarters,
// two have three sevenths each. A newcomer finds room without a fixed share for everybody.
package shares
