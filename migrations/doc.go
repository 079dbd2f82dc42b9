// Package migrations has the schemas of the truth, of the projections, and of the tables that
// consumers keep for themselves. It brings a database up to date with them. It is for every
// process, which waits for its schema, and for `tidings migrate`. It may change in any release.
//
// The migrations only go forward. They expand first and contract a release later, because a fleet
// is upgraded while it runs. Only `tidings migrate` and `tidings dev` call Up. Every binary waits
// while its schema is older (Await), and every command refuses it (Check). Both accept a newer
// schema.
package migrations
