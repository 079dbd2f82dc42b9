// Package upkeep lists the scheduled jobs of a fleet in one place. The archiver and dev run them
// when they are due, and commands run them at once. It is for the archiver, for `tidings dev` and
// for operators' commands. It may change in any release.
package upkeep
