// Package jobs runs the scheduled work of the archiver: it moves old rows and drops rows whose time
// is over. It is for the archiver, and for operators' commands that run or exclude a job. It may
// change in any release.
//
// All jobs of the fleet share one lease in the truth's database, so only one job runs at a time in
// the whole fleet. The table job_runs has the last run of each job, so several archivers together
// run a job as often as one would. A process holds the lease only while a job or a command runs; a
// command that needs it waits. A job that must not wait for others (Job.OwnLease) has its own lease
// and runs beside them.
//
//	idle ──── a job is due ───▶ waits for the lease ──── still due? ───▶ runs, slice by slice ───▶ recorded in job_runs
//	 ▲                                                     │ no                │ lease lost, stop, window over, time limit
//	 └─────────────────────────────────────────────────────┴───────────────────┘ the next run resumes where this one ended
//
// A job works in slices. Each slice is one transaction, bounded, resumable and idempotent. A slice
// begins with Hold.Fence, which returns an error if another process has taken the lease, even after
// a long freeze. While the slice runs, the fence keeps others from taking the lease. Between slices
// the job calls Hold.Continue, so no run takes much longer than MaxRun. Windows and intervals use
// the database's clock.
package jobs
