// Package tracing makes the spans of one event's way, from the request to the projections (docs/tracing.md). It knows OpenTelemetry's API alone:
// where spans go is internal/daemon's to decide.
//
//	request (SERVER) ──▶ create (PRODUCER), one per event; its context is the event's traceparent
//	                        ▲ link, or parent          ▲ link, or parent
//	                     send (CLIENT)              process (CONSUMER)
//	                     one per publish            one per transaction of a consumer
//
// A Tracer travels in the context (With, From). A nil *Tracer makes no spans and costs nothing. What is not sampled costs the look at a flag. No span has
// the text of an error, a path, a query, a header or a payload: these may name people, or hold what only they may read.
package tracing
