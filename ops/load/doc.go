// Package load sends edges or children of any kind through the HTTP API. Edges come from an edge
// list or a generator, children from a generator.
//
//	edge list (plain or gzip) ─ Read ─┐
//	                                  ├─▶ Run ───────────┐
//	spec, seed ───────────── Generate ┘                  ├─ N workers ─▶ PUT /v1/{plural}/{from}/{to},
//	spec, seed ──── GenerateChildren ──────▶ RunChildren ┘    │               POST /v1/{parents}/{parent_id}/{plural}, ...
//	                                                         └ retries: connection errors, 5xx, 429
//
// A load may run twice, and resumes after the server or the loader was killed. The API does not
// create an existing edge again; a create of a child has its Idempotency-Key; a change has the
// version before it. Edges are sent in no particular order. Children are sent in the order of their
// thread, each after the one that it answers. The package uses only the API, from which it reads
// the kinds.
package load
