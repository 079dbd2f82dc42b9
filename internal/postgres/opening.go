package postgres

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// opening is a transaction that begins together with its first statement, in one round trip. All
// writes of a group, all events of a batch and a reader wait for its round trips, and each of these
// wakes a process at both ends. The first call must be Query, QueryRow, Exec, SendBatch or start.
type opening struct {
	pgx.Tx // nil until it begins
	conn   *pgx.Conn
	begin  *pgx.Batch
}

// newOpening returns a transaction that will begin on the connection.
func newOpening(conn *pgx.Conn, opts pgx.TxOptions) *opening {
	o := &opening{conn: conn, begin: &pgx.Batch{}}
	o.begin.BeginTx(opts)
	return o
}

// start begins the transaction without a statement, unless it has begun.
func (o *opening) start(ctx context.Context) error {
	if o.Tx != nil {
		return nil
	}
	sent := o.conn.SendBatch(ctx, o.begin)
	o.Tx = sent.Tx()
	return sent.Close()
}

func (o *opening) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if o.Tx != nil {
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
	if o.Tx != nil {
		return o.Tx.Exec(ctx, sql, args...) // it also takes several statements in one string
	}
	rows, _ := o.Query(ctx, sql, args...)
	rows.Close()
	return rows.CommandTag(), rows.Err()
}

func (o *opening) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if o.Tx != nil {
		return o.Tx.SendBatch(ctx, b)
	}
	settings := o.begin.Len()
	o.begin.QueuedQueries = append(o.begin.QueuedQueries, b.QueuedQueries...)
	sent := o.conn.SendBatch(ctx, o.begin)
	o.Tx = sent.Tx()
	for range settings {
		_, _ = sent.Exec() // the results of b return its error
	}
	return sent
}

func (o *opening) Conn() *pgx.Conn { return o.conn }

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
