// Package contracts says what subscribers read, for programs: a JSON Schema of the payload of each event type and version, and an AsyncAPI 3.1 document of
// subjects, headers and payloads. Both are made from the payload types of package event and from the kinds, so neither can differ from what is written.
//
//	event.Edge, event.Child, event.Thread ──┐
//	kinds.Set ──────────────────────────────┴──▶ Types ──▶ AsyncAPI ──▶ /v1/asyncapi.json, /v1/schemas/{type}, tidings contracts write
//
// A schema holds for a version of its type for good: it may gain members that a reader does not have to know, and nothing else (Differences). The schemas of
// the built-in kinds are checked in at contracts/builtin, and a test compares.
package contracts
