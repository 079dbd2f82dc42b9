// Package verify compares every projection and every stream of an installation with the truth, and
// repairs differences of projections. It does the work of `tidings verify`. It is for operators'
// commands and for the console. It may change in any release.
//
//	wait for lagging parts ─> (repair lasting differences) ─> compare each projection, row by row
//	                       ─> compare each stream with the outbox ─> Report
//
// If the aggregate of a difference is in a DLQ or waits in the outbox, the difference counts as
// explained. The package never repairs such a difference.
package verify
