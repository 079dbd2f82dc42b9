// Package contracts describes for programs what subscribers read: a JSON Schema of the payload of
// each event type and version, and an AsyncAPI 3.1 document of subjects, headers and payloads. It
// derives both from the payload types of package event and from the kinds, so they cannot differ
// from the events. It is for those who publish the contract of events, and for the tests that hold
// it. It may change in any release.
//
//	event.Edge, event.Child, event.Thread ──┐
//	kinds.Set ──────────────────────────────┴─▶ Types ─▶ AsyncAPI ─▶ /v1/asyncapi.json, /v1/schemas/{type}, tidings contracts write
//
// The schema of a version of a type never changes in a way that breaks a reader (Differences). The
// schemas of the built-in kinds are in event/contracts/builtin, and a test compares them.
package contracts
