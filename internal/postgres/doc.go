// Package postgres opens connection pools, runs transactions and reads driver errors: the plumbing below every package that
// speaks SQL.
//
// A pool belongs to one role. Row-level security holds on all of them but the owner's, which only migrations use:
//
//	RoleAPI     one tenant per transaction (InTenant sets it)
//	RoleSystem  relay, consumers and commands: every tenant, by policy
//	RoleOwner   the login itself: migrations
//
// Errors of the driver are told apart in errors.go and nowhere else.
package postgres
