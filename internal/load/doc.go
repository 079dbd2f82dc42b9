// Package load sends a follow graph through the HTTP API, from an edge list or generated, or generated threads.
//
//	edge list (plain or gzip) ─ Read ─┐
//	                                  ├─▶ Run ──────┐
//	spec, seed ───────────── Generate ┘             ├─ N workers ─▶ PUT /v1/follows/{from}/{to}, POST /v1/posts/{id}/comments, ...
//	spec, seed ────── GenerateThreads ──▶ RunThreads┘    └ retries: connection errors, 5xx, 429
//
// A follow that stands already changes nothing, a comment has its Idempotency-Key, and a change the version that it is about: a load
// may be run twice, and goes on after the server or the loader was killed and started again. Edges are sent in no particular order,
// comments in that of their thread, each after the one that it answers. The package knows nothing but the API.
package load
