// Package load sends the edges of a graph through the HTTP API, from an edge list or generated, or generated children, of any kind.
//
//	edge list (plain or gzip) ─ Read ─┐
//	                                  ├─▶ Run ───────────┐
//	spec, seed ───────────── Generate ┘                  ├─ N workers ─▶ PUT /v1/{plural}/{from}/{to}, POST /v1/{parents}/{id}/{plural}, ...
//	spec, seed ──── GenerateChildren ──────▶ RunChildren ┘    └ retries: connection errors, 5xx, 429
//
// An edge that stands already is not made again, a child has its Idempotency-Key, and a change the version that it is about: a load
// may be run twice, and goes on after the server or the loader was killed and started again. Edges are sent in no particular order,
// children in that of their thread, each after the one that it answers. The package knows nothing but the API, which it asks for the kinds.
package load
