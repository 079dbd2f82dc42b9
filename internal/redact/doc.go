// Package redact finds people in the payloads of events and removes them. It is for erasures, which
// search copies of events of any release: it accepts every form of an id that a writer may have
// used, also those that package event refuses.
package redact
