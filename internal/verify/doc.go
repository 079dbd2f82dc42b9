// Package verify compares every projection and every stream of an installation with the truth, and mends what differs. It is what
// `tidings verify` does.
//
//	wait for what lags ─> (mend what differs twice) ─> compare each projection, row by row ─> compare each stream with the outbox ─> Report
//
// Differences whose aggregate is in a DLQ, or waits in the outbox, are counted as explained, and never mended.
package verify
