// Package heads tells the API which events the streams still have. The API does not depend on NATS.
// It is for the processes that serve the API.
package heads
