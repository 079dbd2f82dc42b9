// Package projector applies the events of Tidings to tables of yours, each message exactly once: it
// stores its position on the stream in the transaction in which your function writes. It is for
// programs downstream that keep read models in PostgreSQL. It is supported: CHANGELOG.md names
// every change that a program of yours would notice.
//
// The options and most errors are those of package subscribe.
//
//	EVENTS-0 ──▶ the loop of package consumers ──▶ instances of Project ──▶ one transaction: the offset, then your function
package projector
