// Package cli has the commands of tidings, one file each.
//
//	dev      everything in one process           cli.go       arguments, exit codes, tables
//	migrate  both schemas                        instance.go  which servers a command talks to
//	token    bearer tokens
//	load     a follow graph through the API
//	verify   the projections against the truth
//	status   lags, leases, the stream
//	history  who did what, when
//	dlq      dead letters: list, show, retry, discard
//	archive  the archiver's jobs at once, ranges, holds
//	events   where an event's row is
//
// Results go to stdout, as a table or with --json as one JSON object (of dlq and events, one per message and line); progress and errors go
// to stderr. The exit code is 0 for success, 1 for an error, 2 for bad usage or bad input.
package cli
