// Package postgres opens connection pools, runs transactions and reads driver errors: the plumbing below every package that
// speaks SQL.
//
// A pool belongs to one role. Row-level security holds on all of them but the owner's, which only migrations use:
//
//	RoleAPI       one tenant per transaction (InTenant sets it)
//	RoleRelay     the relay: the outbox of every tenant, by policy
//	RoleConsumer  consumers: the read tables of every tenant
//	RoleReader    consumers that compare with the truth: reads every tenant and writes nothing
//	RoleSystem    archiver and commands: every tenant; it has the rights of the last three
//	RoleOwner     the login itself: migrations
//
// Errors of the driver are told apart in errors.go and nowhere else.
package postgres
