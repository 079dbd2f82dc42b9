// Package heartbeat measures the path of events. It is for relay and consumers.
//
// Relays write an event per partition and interval for this purpose only (outbox.Heartbeat). Each
// station on the path observes the age of a heartbeat there:
//
//	outbox ── relay ──▶ published ── consumer ──▶ applied, by consumer
//
// An age is the difference of two clocks, the database's and the station's. It is never negative.
package heartbeat
