// Package endtoend shows that the whole line serves what was written: random writes of two tenants through package store, a real relay
// and broker, consumers that are killed, paused, cut off, fed twice and replayed meanwhile, an archiver that takes threads as soon as they
// are written, and the API's handler as the reader. It has no code of its own.
//
//	writers ─▶ store ─▶ relay ─▶ broker ─▶ consumers ─▶ projections ─▶ api ─▶ compared with a plain model of the writes' outcomes
//	                      ▲                   ▲             ▲
//	                      └── faults from a seed ───────────┘
//
// Three things are held. At rest every list, count and document equals the model. While all goes on, a walk over pages shows each row
// that lives throughout exactly once, and who sends the tokens of their writes reads exactly these writes, whatever the consumers do.
//
// TIDINGS_TEST_SEED repeats a run: the same choices in the same order, though not at the same instants.
package endtoend
