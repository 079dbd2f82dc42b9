package postgres

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATE codes that the code distinguishes (PostgreSQL manual, appendix A).
const (
	codeWarning              = "01000"
	codeUniqueViolation      = "23505"
	codeCheckViolation       = "23514"
	codeSerializationFailure = "40001"
	codeDeadlockDetected     = "40P01"
	codeLockNotAvailable     = "55P03"
	codeUndefinedTable       = "42P01"
	codeDuplicateObject      = "42710"
	codeDuplicateSchema      = "42P06"
	codePermission           = "42501"
	codeUndefinedDatabase    = "3D000"
	classConnection          = "08"
	classData                = "22"
	classIntegrity           = "23"
	classLogin               = "28"
	classWithCheck           = "44"
	classLimits              = "54"
	classRaised              = "P0"
	classTransactionRollback = "40"
	classResources           = "53"
	classOperatorIntervened  = "57"
	classSystemError         = "58"
)

func state(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// IsUnique reports a violation of the named unique constraint or index, or of any if constraint is
// empty.
func IsUnique(err error, constraint string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == codeUniqueViolation && (constraint == "" || pg.ConstraintName == constraint)
}

// IsCheck reports a violation of a check constraint.
func IsCheck(err error) bool { return state(err) == codeCheckViolation }

// CheckName returns the name of the check constraint that a statement violated, or "".
func CheckName(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == codeCheckViolation {
		return pg.ConstraintName
	}
	return ""
}

// IsConcurrency reports that the database aborted the transaction only because of concurrency:
// another attempt may succeed.
func IsConcurrency(err error) bool {
	switch state(err) {
	case codeSerializationFailure, codeDeadlockDetected:
		return true
	}
	return false
}

// IsLockTimeout reports that lock_timeout or NOWAIT ended a wait for a lock.
func IsLockTimeout(err error) bool { return state(err) == codeLockNotAvailable }

// IsUndefinedTable reports a table that does not exist, for example before the first migration.
func IsUndefinedTable(err error) bool { return state(err) == codeUndefinedTable }

// IsDuplicate reports that another session has made the same role, schema or row.
func IsDuplicate(err error) bool {
	switch state(err) {
	case codeDuplicateObject, codeDuplicateSchema, codeUniqueViolation:
		return true
	}
	return false
}

// IsPermission reports that the role lacks a right, or that row-level security refused a row.
func IsPermission(err error) bool { return state(err) == codePermission }

// IsLogin reports that the server refused the login: a wrong password, an unknown user or an
// unknown database.
func IsLogin(err error) bool {
	code := state(err)
	return strings.HasPrefix(code, classLogin) || code == codeUndefinedDatabase
}

// IsTransient reports an error that says nothing about the statement or its data: connections,
// shutdowns, full disks and pools, locks, aborted transactions, ended contexts. The same work may
// succeed later.
func IsTransient(err error) bool {
	if err == nil {
		return false
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.EOF) ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, errNotReplicated) ||
		errors.Is(err, ErrUnanswered) {
		return true
	}
	var netErr net.Error
	var connectErr *pgconn.ConnectError
	if errors.As(err, &netErr) || errors.As(err, &connectErr) || pgconn.SafeToRetry(err) || pgconn.Timeout(err) {
		return true
	}
	code := state(err)
	if code == "" {
		return false
	}
	for _, class := range []string{classConnection, classTransactionRollback, classResources, classOperatorIntervened, classSystemError} {
		if strings.HasPrefix(code, class) {
			return true
		}
	}
	return code == codeLockNotAvailable
}

// IsSystemic reports an error of the server that is neither transient nor about data: a missing
// table or right, a wrong statement, a read-only standby, a bug. The same statement with other
// values would fail as well.
func IsSystemic(err error) bool {
	code := state(err)
	if code == "" || IsTransient(err) {
		return false
	}
	switch code[:2] {
	case classData, classIntegrity, classWithCheck, classLimits, classRaised:
		return false
	}
	return true
}
