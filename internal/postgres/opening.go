package postgres

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// opening is a transaction that begins together with its first statement, in one round trip. All
// writes of a group, all events of a batch and a reader wait for its round trips, and each of these
// wakes a process at both ends.
type opening struct {
	pgx.Tx  // nil until it begins
	conn    *pgx.Conn
	waiting *pgx.Batch // statements that the next call sends first; until it begins, those that begin it
	later   bool       // some of them are from Later
	short   bool       // it is of InShortTx
	err     error      // of a waiting statement's function; the transaction cannot commit
}

// flushTimeout bounds the statements of Later before a call that has no context.
const flushTimeout = 10 * time.Second

// newOpening returns a transaction that will begin on the connection.
func newOpening(conn *pgx.Conn, opts pgx.TxOptions) *opening {
	o := &opening{conn: conn, waiting: &pgx.Batch{}}
	o.waiting.BeginTx(opts)
	return o
}

// Later runs a statement whose result nobody reads before the next statement of tx, in the same
// round trip, or together with COMMIT if it is the last one. Its error is the error of that
// statement or of COMMIT. This is so for a transaction of InShortTx. Any other runs it at once.
func Later(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	var b pgx.Batch
	b.Queue(sql, args...)
	return LaterBatch(ctx, tx, &b)
}

// LaterBatch is Later for several statements. Functions may read their results. An error of such a
// function rolls the transaction back and is its error, whatever else fails. COMMIT waits for these
// functions.
func LaterBatch(ctx context.Context, tx pgx.Tx, b *pgx.Batch) error {
	o, ok := tx.(*opening)
	if !ok || !o.short {
		return tx.SendBatch(ctx, b).Close()
	}
	o.waiting.QueuedQueries, o.later = append(o.waiting.QueuedQueries, b.QueuedQueries...), true
	return nil
}

// flush begins the transaction, unless it has begun, and runs what is waiting.
func (o *opening) flush(ctx context.Context) error {
	if o.waiting.Len() == 0 {
		return o.err
	}
	return o.SendBatch(ctx, &pgx.Batch{}).Close()
}

// end returns the statements that run together with COMMIT, or the error of the transaction. err is
// that of the transaction's function.
func (o *opening) end(ctx context.Context, err error) (*pgx.Batch, error) {
	read := func(q *pgx.QueuedQuery) bool { return q.Fn != nil }
	if o.err == nil && err == nil && (o.Tx == nil || slices.ContainsFunc(o.waiting.QueuedQueries, read)) {
		err = o.flush(ctx)
	}
	return o.waiting, cmp.Or(o.err, err)
}

func (o *opening) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if o.waiting.Len() == 0 {
		return o.Tx.Query(ctx, sql, args...)
	}
	b := &pgx.Batch{}
	b.Queue(sql, args...)
	sent := o.SendBatch(ctx, b)
	rows := &lastRows{sent: sent}
	var err error
	if rows.Rows, err = sent.Query(); err != nil {
		rows.Close()
	}
	return rows, err
}

func (o *opening) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, _ := o.Query(ctx, sql, args...)
	return onlyRow{rows}
}

func (o *opening) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if o.waiting.Len() == 0 {
		return o.Tx.Exec(ctx, sql, args...) // it also takes several statements in one string
	}
	rows, _ := o.Query(ctx, sql, args...)
	rows.Close()
	return rows.CommandTag(), rows.Err()
}

func (o *opening) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if o.waiting.Len() == 0 {
		return o.Tx.SendBatch(ctx, b)
	}
	before, all := o.waiting.QueuedQueries, o.waiting
	all.QueuedQueries = append(slices.Clip(before), b.QueuedQueries...)
	o.waiting, o.later = &pgx.Batch{}, false
	sent := o.conn.SendBatch(ctx, all)
	if o.Tx == nil {
		o.Tx = sent.Tx()
	}
	for _, q := range before {
		if q.Fn == nil {
			_, _ = sent.Exec() // an error is also that of all later results
		} else if o.err = q.Fn(sent); o.err != nil {
			break
		}
	}
	if o.err != nil {
		for _, err := sent.Exec(); err == nil; _, err = sent.Exec() { // so that Close calls no function of b
		}
		_ = sent.Close()
		return pgx.FailedBatchResults(b, o.err)
	}
	return sent
}

// Conn returns the connection, after the statements of Later: its user is past the transaction's
// calls.
func (o *opening) Conn() *pgx.Conn {
	if o.later {
		ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
		defer cancel()
		_ = o.flush(ctx) // end returns the error
	}
	return o.conn
}

func (o *opening) LargeObjects() pgx.LargeObjects {
	_ = o.Conn()
	return o.Tx.LargeObjects()
}

func (o *opening) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := o.flush(ctx); err != nil {
		return nil, err
	}
	return o.Tx.Begin(ctx)
}

func (o *opening) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if err := o.flush(ctx); err != nil {
		return 0, err
	}
	return o.Tx.CopyFrom(ctx, table, columns, rows)
}

func (o *opening) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := o.flush(ctx); err != nil {
		return nil, err
	}
	return o.Tx.Prepare(ctx, name, sql)
}

func (o *opening) Rollback(ctx context.Context) error {
	if o.Tx == nil {
		return pgx.ErrTxClosed
	}
	return o.Tx.Rollback(ctx)
}

// lastRows are the rows of the last statement of a batch. With them ends the batch.
type lastRows struct {
	pgx.Rows
	sent pgx.BatchResults
	err  error
}

func (r *lastRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *lastRows) Close() {
	r.Rows.Close()
	r.err = cmp.Or(r.Rows.Err(), r.sent.Close())
}

func (r *lastRows) Err() error { return r.err }

// onlyRow is the first of the rows.
type onlyRow struct{ rows pgx.Rows }

func (r onlyRow) Scan(to ...any) error {
	_, err := pgx.CollectOneRow(r.rows, func(row pgx.CollectableRow) (none struct{}, err error) { return none, row.Scan(to...) })
	return err
}
