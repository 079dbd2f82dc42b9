// Package samples keeps figures of an installation over the last day: a sample every ten seconds,
// in a table of the truth (samples). It is for the console, which samples the installation, and for
// the API, which samples its own requests. It may change in any release.
//
//	clock of the truth ──▶ Next: the moment, and whether its row is missing ──▶ read the figures ──▶ Record ──▶ Day
//
// It promises:
//   - A moment has one row per source, whichever of several processes samples first.
//   - A process that was frozen writes no old figures under a new time, because a moment expires.
//   - The table is bounded: each Record deletes the rows that are older than a day.
//   - What nobody could read is a gap, and not a zero.
//
// It does not promise a sample of each moment.
package samples
