// Package cli has the commands of tidings. Most commands have a file of their own name. It is for
// operators, who run its commands. It may change in any release.
//
//	run       dev, demo, consume, ready, version
//	set up    migrate, token, nats, kinds, contracts
//	data      load, edges, erase, history, events
//	observe   status, doctor, verify
//	operate   outbox, dlq, pause, resume, replay, repair, restore
//	capacity  partitions, stream, archive
//	measure   bench (package cmd/tidings/bench)
//
//	cli.go       the commands, arguments, exit codes, tables
//	session.go   what a command declares, its servers and its report
//	instance.go  the servers that a command talks to
//	confirm.go   the question before a command destroys something
//	progress.go  bars and lines while it works
//
// A command writes its result to stdout: a table, or with --json one JSON object, or one object per
// line. It writes progress and errors to stderr. The exit codes are the constants in cli.go;
// docs/commands.md describes every command.
package cli
