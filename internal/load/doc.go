// Package load sends a follow graph through the HTTP API: from an edge list, or generated.
//
//	edge list (plain or gzip) ─ Read ─┐
//	                                  ├─▶ Loader ─ N workers ─▶ PUT /v1/follows/{from}/{to}
//	spec, seed ───────────── Generate ┘       └ retries: connection errors, 5xx, 429
//
// A follow that stands already changes nothing, so a load may be run twice, and goes on after the server was killed and
// started again. Edges are sent in no particular order. The package knows nothing but the API.
package load
