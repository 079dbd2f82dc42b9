// Package daemon has the parts that every binary shares: signals, the exit code, the log and the
// ops port. It is for the binaries in cmd.
//
//	SIGINT, SIGTERM ──> ctx ends ──> run drains and returns nil ──> exit 0
//	a second signal ──> killed at once
//	run returns err ──> one log line ──> exit 1
//
// The ops port answers /healthz (the process serves), /readyz (its dependencies answer) and
// /metrics (Prometheus).
package daemon
