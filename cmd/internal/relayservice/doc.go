// Package relayservice is the relay's process. It is not in package services, so that the relay's
// binary has only the parts that the relay uses: no API, no console. It is for the relay's binary
// and for package services.
package relayservice
