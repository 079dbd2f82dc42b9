// Package work runs the parts of a process that do the work of partitions. It is for the parts that
// share work in partitions: relay, consumers, subscribe and the jobs.
//
//	            Start, or Assign with the key         run returns
//	no worker ──────────────────────────▶ working ────────────────▶ no worker
//	                                         │ Stop, Assign           ▲
//	                                         │ without the key,       │ it has finished what it had begun
//	                                         ▼ end of ctx             │
//	                                      stopping ───────────────────┘
//
// A Crew has at most one worker per key. So a partition that is lost and comes back gets its new
// worker after the old one has returned. Its owner passes the partitions that package lease names,
// again and again.
//
// Shutdown has two clocks. The end of a context stops the taking of work. The work in progress has
// the context of Drain, which ends later.
package work
