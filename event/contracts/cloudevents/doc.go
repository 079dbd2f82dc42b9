// Package cloudevents tests that the official CloudEvents SDK for Go reads every event type. It is
// a separate module, so users of Tidings do not depend on the SDK.
package cloudevents
