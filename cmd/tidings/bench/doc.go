// Package bench measures Tidings: `tidings bench relay`, `tidings bench latency`, `tidings bench project`, `tidings bench subscribe`, `tidings bench read`,
// `tidings bench write`, `tidings bench overload` and `tidings bench archive`.
//
// A case prints one JSON object on stdout; progress goes to stderr. The process under test is a child, so that its memory is
// its own. With DATABASE_URL set the work is done in a database made and dropped there, else on a PostgreSQL of the run's own;
// both and the NATS server are durable. Settings are read back from the servers and the disk's fsync is timed, because a
// figure without them says nothing.
package bench
