// Package cells tells which tenants have their truth where, if several truths (cells) write to the
// same projections. A cell has the name of its streams, NATS_STREAM. It is for consumers, and for
// operators' commands that compare them with a truth.
//
//	tenant_cells, in the projections:   empty: there is one truth   │   tenant 7: EVENTS-b   │   tenant 0: EVENTS-a, for all others
//
// See docs/adr/0018-cells.md.
package cells
