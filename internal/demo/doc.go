// Package demo is a small site that lives: users follow each other, like, write and answer, moderators work on what waits, threads open, heat up
// and are locked. It is a user of the API and asks it for the kinds, so a kind that somebody applied lives too. `tidings demo` runs it, so that
// dashboards and the console have something to show.
//
//	ticker (rate) ─> worker ─> next (the seed and what the site knows of itself) ─> client ─> API
//	                   └─ what was answered: children to answer and edit, edges to remove, threads to lock ─> next
//
// It keeps in memory what it wrote lately, and nothing else: it may be stopped and started at any time, and several may run beside one another.
// While the API is away everything waits for it.
package demo
