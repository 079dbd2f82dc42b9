package postgres

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Joint is one write transaction of several tenants. Each statement runs with its own tenant set,
// so row-level security hides and protects the rows of the other tenants. The members proceed in
// steps: the next statements of all members go to the server in one round trip, in the members'
// order.
//
//	members ──Write or Leave──▶ Run: BEGIN ─▶ [set tenant, statement] of each ─▶ again, until all are done ─▶ COMMIT ──▶ each one's error
type Joint struct {
	pool        *pgxpool.Pool
	lockTimeout time.Duration
	members     []*Member
	said        chan *Member // members whose next step is set
}

// Member is one tenant's part of a Joint.
type Member struct {
	joint  *Joint
	tenant int64
	once   sync.Once
	orders chan order // to begin, or the transaction's result
	rows   chan answer
	read   chan struct{} // signals that the rows were read
	next   step
}

// step is a member's next step: a statement, unless it is done.
type step struct {
	sql    string
	args   []any
	left   bool // the member writes nothing
	done   bool
	landed Landed
	err    error
}

type order struct {
	begin bool
	err   error
}

type answer struct {
	rows pgx.Rows
	err  error
}

// errOther is the error of the remaining members' statements after one member's statement failed.
var errOther = errors.New("postgres: the write of another tenant in the same transaction failed")

// NewJoint returns a transaction of these tenants that has not run yet. Each member must call Write
// or Leave in its own goroutine, and one goroutine must call Run.
func NewJoint(pool *pgxpool.Pool, lockTimeout time.Duration, tenants []int64) *Joint {
	j := &Joint{pool: pool, lockTimeout: lockTimeout, said: make(chan *Member, len(tenants))}
	for _, tenant := range tenants {
		j.members = append(j.members, &Member{joint: j, tenant: tenant, orders: make(chan order, 1), rows: make(chan answer, 1),
			read: make(chan struct{}, 1)})
	}
	return j
}

// Member returns the member of the i-th tenant.
func (j *Joint) Member(i int) *Member { return j.members[i] }

// Write is WriteInTenant as a part of the transaction. fn may only use Query, QueryRow and Exec of
// tx. It must read the rows of one statement before it runs the next, and may run more than once.
func (m *Member) Write(fn func(tx pgx.Tx) (Landed, error)) error {
	m.once.Do(func() { m.say(step{}) })
	for o := range m.orders {
		if !o.begin {
			return o.err
		}
		m.attempt(fn)
	}
	return nil // not reached: orders is never closed
}

// Leave declares that the member writes nothing, unless Write was called.
func (m *Member) Leave() { m.once.Do(func() { m.say(step{left: true}) }) }

func (m *Member) say(s step) {
	m.next = s
	m.joint.said <- m
}

func (m *Member) attempt(fn func(tx pgx.Tx) (Landed, error)) {
	s := step{done: true, err: errors.New("postgres: a write did not end")} // remains only if fn panics
	defer func() { m.say(s) }()
	s.landed, s.err = fn(memberTx{m: m})
}

// Run runs the transaction. If one member's statement fails, failed is that member's index;
// otherwise it is -1.
func (j *Joint) Run(ctx context.Context) (failed int, err error) {
	var in []*Member
	for range j.members {
		<-j.said
	}
	for _, m := range j.members {
		if !m.next.left {
			in = append(in, m)
		}
	}
	failed = -1
	if len(in) == 0 {
		return failed, nil
	}
	begin := "begin"
	if j.lockTimeout > 0 {
		begin += "; set local lock_timeout = " + strconv.FormatInt(j.lockTimeout.Milliseconds(), 10)
	}
	err = writeOnce(ctx, j.pool, begin, func(tx pgx.Tx) (tenant int64, landed Landed, err error) {
		culprit, err := j.inStep(ctx, tx, in)
		failed = -1
		for i, m := range j.members {
			if m == culprit {
				failed = i
			}
		}
		for _, m := range in {
			if m.next.landed != nil {
				tenant, landed = m.tenant, m.next.landed // all members' writes landed, or none
			}
		}
		return tenant, landed, err
	})
	for _, m := range in {
		m.orders <- order{err: err}
	}
	return failed, err
}

// inStep runs the members until all are done. culprit is the member whose error it returns.
func (j *Joint) inStep(ctx context.Context, tx pgx.Tx, in []*Member) (culprit *Member, err error) {
	for _, m := range in {
		m.orders <- order{begin: true}
	}
	for running := len(in); running > 0; {
		for range running {
			<-j.said
		}
		running = 0
		var asking []*Member
		batch := &pgx.Batch{}
		for _, m := range in {
			switch {
			case m.next.done && m.next.err != nil && err == nil:
				culprit, err = m, m.next.err
			case !m.next.done:
				running++
				asking = append(asking, m)
				batch.Queue(setTenantSQL, m.tenant)
				batch.Queue(m.next.sql, m.next.args...)
			}
		}
		if running == 0 {
			break
		}
		if err != nil { // only end the other members
			for _, m := range asking {
				m.rows <- answer{err: errOther}
			}
			continue
		}
		results := tx.SendBatch(ctx, batch)
		for _, m := range asking {
			if err != nil {
				m.rows <- answer{err: errOther}
				continue
			}
			if _, serr := results.Exec(); serr != nil {
				culprit, err = nil, fmt.Errorf("set tenant %d: %w", m.tenant, serr)
				m.rows <- answer{err: err}
				continue
			}
			rows, qerr := results.Query()
			r := &memberRows{Rows: rows, read: m.read}
			m.rows <- answer{rows: r, err: qerr}
			if qerr == nil {
				<-m.read
				qerr = rows.Err()
			}
			if qerr != nil {
				culprit, err = m, qerr
			}
		}
		if cerr := results.Close(); err == nil && cerr != nil {
			err = cerr
		}
	}
	return culprit, err
}

// memberTx is a member's view of the transaction.
type memberTx struct {
	pgx.Tx
	m *Member
}

// Query waits for the other members.
func (t memberTx) Query(_ context.Context, sql string, args ...any) (pgx.Rows, error) {
	t.m.say(step{sql: sql, args: args})
	a := <-t.m.rows
	if a.err != nil {
		return failedRows{err: a.err}, a.err
	}
	return a.rows, nil
}

// QueryRow is Query for one row.
func (t memberTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := t.Query(ctx, sql, args...)
	return memberRow{rows, err}
}

// Exec is Query without rows.
func (t memberTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	rows, err := t.Query(ctx, sql, args...)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	rows.Close()
	return rows.CommandTag(), rows.Err()
}

type memberRow struct {
	rows pgx.Rows
	err  error
}

func (r memberRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// memberRows signal when they have been read.
type memberRows struct {
	pgx.Rows
	once sync.Once
	read chan<- struct{}
}

func (r *memberRows) Next() bool {
	more := r.Rows.Next()
	if !more {
		r.Close()
	}
	return more
}

func (r *memberRows) Close() {
	r.Rows.Close()
	r.once.Do(func() { r.read <- struct{}{} })
}

// failedRows are the rows of a statement that did not run.
type failedRows struct {
	pgx.Rows
	err error
}

func (failedRows) Close()       {}
func (failedRows) Next() bool   { return false }
func (r failedRows) Err() error { return r.err }

// writeOnce runs fn in a transaction that begins with begin, and again if the database aborts it
// because of concurrency. If the answer to COMMIT is lost, it calls the landed that fn returned,
// for fn's tenant.
func writeOnce(ctx context.Context, pool *pgxpool.Pool, begin string, fn func(tx pgx.Tx) (tenant int64, landed Landed, err error)) error {
	return retry(func() error {
		lock := rand.Int64() // unique, as far as 63 bits allow: a session that gets this lock knows that the transaction has ended
		opts := pgx.TxOptions{BeginQuery: begin + "; select pg_advisory_xact_lock(" + strconv.FormatInt(lock, 10) + "), " + durableCommit}
		var tenant int64
		var landed Landed
		err := inTx(ctx, pool, opts, func(tx pgx.Tx) (end string, err error) {
			if tenant, landed, err = fn(tx); landed == nil {
				return repeatedSQL, err
			}
			return "commit", err
		})
		if lost, ok := errors.AsType[*lostCommit](err); ok && landed != nil {
			return settle(ctx, pool, tenant, lock, landed, lost)
		}
		return err
	})
}
