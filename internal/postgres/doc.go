// Package postgres opens connection pools, runs transactions and interprets the errors of the
// driver. It is for every package with SQL.
//
// A pool belongs to one role. Row-level security applies to all roles except the owner, which only
// migrations use:
//
//	RoleAPI       one tenant per transaction (InTenant sets it)
//	RoleRelay     the relay: the outbox of every tenant, by policy
//	RoleConsumer  consumers: the read tables of every tenant
//	RoleReader    consumers that compare with the truth: reads every tenant and writes nothing
//	RoleSystem    archiver and commands: every tenant; has the rights of RoleRelay, RoleConsumer and RoleReader
//	RoleOwner     the login itself: migrations
//
// Only errors.go distinguishes errors of the driver.
package postgres
