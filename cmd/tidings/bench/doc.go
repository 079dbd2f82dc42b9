// Package bench has the commands of `tidings bench`, which measure Tidings: relay, latency,
// project, subscribe, read, write, overload, neighbors, archive, sizes and trace. It is for those
// who measure Tidings, who run its commands. It may change in any release.
//
// A case prints one JSON object to stdout, and its progress to stderr. The process under test is a
// child process, so that its memory can be measured. With DATABASE_URL set, a run creates a
// database there and drops it at the end. Otherwise it starts a PostgreSQL of its own. PostgreSQL
// and the NATS server are durable in both cases. Each result has the servers' settings and the
// measured time of an fsync, because a figure has no meaning without them.
//
//	onServers ─▶ servers ─ startChild ─▶ child (relay, API, consumer, archive job)
//	                 │                     ▲
//	                 │        workload ─▶ callers ─ recorder ─▶ quantiles
//	                 └────────────────────────────────────────────▶ print
//
// A benchmark is a function of servers: onServers starts them, and at the end stops them and every
// child. workload is the one schedule of calls, of an open or a closed loop, and callers make them
// over HTTP. alternate runs the pairs of a comparison.
package bench
