// Package endtoend tests the whole path from writes to reads. Random writes of two tenants go
// through package store, a real relay and a real broker to the consumers, and the API's handler
// reads. Faults kill, pause, disconnect and replay the consumers, or give them events twice. An
// archiver shelves threads as soon as they are written. The package has only tests. It is for those
// who change the path of an event.
//
//	writers ─▶ store ─▶ relay ─▶ broker ─▶ consumers ─▶ projections ─▶ api ─▶ compared with a plain model of the writes' outcomes
//	                      ▲                   ▲             ▲
//	                      └── faults from a seed ───────────┘
//
// The tests check three things:
//   - At rest, every list, count and document equals the model.
//   - During faults, a walk over pages shows each row that exists throughout exactly once.
//   - During faults, a read with the tokens of a client's writes includes exactly these writes.
//
// TIDINGS_TEST_SEED repeats a run: the same choices in the same order, but at other moments.
package endtoend
