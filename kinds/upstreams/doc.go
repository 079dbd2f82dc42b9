// Package upstreams describes the upstreams of an installation: aggregate types whose events a
// service appends to the outbox itself, from tables of its own (docs/upstream.md). It is for
// subscribers of such events, for the commands, and for all that name such events: relay,
// contracts, API. Package kindfile reads the file of `tidings upstream add`, and package declared
// keeps the declarations. It is supported: CHANGELOG.md names every change that a program of yours
// would notice.
package upstreams
