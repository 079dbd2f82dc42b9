// Package jobs runs the scheduled work of the archiver: moving old rows, dropping what has passed its time.
//
// All jobs of the fleet share one lease in the truth's database, so one job runs at a time, wherever. When each last ran is kept
// beside it: several archivers together run a job as often as one would. The lease is held only while something runs; a command
// that wants it waits for that. A job that others must not hold up (Job.Apart) has a lease of its own and runs beside them.
//
//	idle ──── a job is due ───▶ waits for the lease ──── still due? ───▶ runs, slice by slice ───▶ noted in job_runs
//	 ▲                                                     │ no                │ lease lost, stop, window over, time up
//	 └─────────────────────────────────────────────────────┴───────────────────┘ the next run goes on where this one ended
//
// A job works in slices: each one transaction, bounded, resumable and idempotent. A slice begins with Hold.Fence, which makes it
// fail when somebody else has taken the lease, however long its process was frozen, and keeps the lease from being taken while it
// runs. Between slices it asks Hold.Continue, so that no run is much longer than MaxRun however much there is to do. Windows and
// intervals are by the database's clock.
package jobs
