// Package cloudevents tests that the official CloudEvents SDK for Go reads every type of events. It is a module of its own, so that nobody who uses Tidings
// gets the SDK.
package cloudevents
