// Package tracing makes the spans of an event, from the request to the projections
// (docs/tracing.md). It uses only the API of OpenTelemetry; internal/daemon decides where spans go.
// It is for the parts that an event passes: API, relay and consumers.
//
//	request (SERVER) ──▶ create (PRODUCER), one per event; its context is the event's traceparent
//	                        ▲ link, or parent          ▲ link, or parent
//	                     send (CLIENT)              process (CONSUMER)
//	                     one per publish            one per transaction of a consumer
//
// A Tracer travels in the context (With, From). A nil *Tracer makes no spans and costs nothing. For
// a trace that is not sampled, the cost is the check of a flag. No span has the text of an error, a
// path, a query, a header or a payload, because these may name people or contain private data.
package tracing
