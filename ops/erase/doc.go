// Package erase runs an erasure of a person in an installation. It holds the lease of the
// archiver's jobs, keeps replays out, and erases from the exports of the archive too. Package
// erasure has the steps of an erasure. It is for operators' commands and for the console. It may
// change in any release.
package erase
