// Package protocol is a specification of how relays publish and consumers apply, and an explorer
// that visits every state of it within bounds. It is for those who change relay,
// outbox/partitions.go, outbox/mark.go or consumers: change the step here first, and see what
// breaks. docs/protocol.md says which step is which function of the code.
//
// The decisions about the layout are the code's own: outbox.Active, outbox.Successors and
// Partition.Replaced. The rows, streams and processes are plain values. A process may stand still
// for any time between two steps, so a pause past a lease needs no step of its own, and leases do
// not restrict who works on what.
package protocol
