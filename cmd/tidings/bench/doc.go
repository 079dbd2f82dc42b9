// Package bench has the commands of `tidings bench`, which measure Tidings: relay, latency,
// project, subscribe, read, write, overload, neighbors, archive, sizes and trace. It is for those
// who measure Tidings, who run its commands. It may change in any release.
//
// A case prints one JSON object to stdout, and its progress to stderr. The process under test is a
// child process, so that its memory can be measured. With DATABASE_URL set, a run creates a
// database there and drops it at the end. Otherwise it starts a PostgreSQL of its own. PostgreSQL
// and the NATS server are durable in both cases. Each result has the servers' settings and the
// measured time of an fsync, because a figure has no meaning without them.
package bench
