package postgres

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/socket"
)

// ErrUnanswered reports that too many COMMITs of the pool had no answer in time and may still wait
// in the server, perhaps for a standby. The transaction did nothing; a retry may succeed.
var ErrUnanswered = errors.New("postgres: earlier commits still wait in the server, perhaps for a synchronous standby")

// errNotReplicated reports a COMMIT that the server answered before a synchronous standby had
// confirmed it. The transaction is visible, but a failover may undo it.
var errNotReplicated = errors.New("postgres: the server committed without a confirmation by a synchronous standby")

// A COMMIT that waits for a standby must not be canceled: the server would show the transaction
// without that wait, and a failover could take back what others have seen
// (docs/adr/0022-durable-on-standbys.md). pgx cancels the statement of every connection that it
// gives up. link is the socket of a connection that can suppress this.
type link struct {
	net.Conn
	committing atomic.Bool // from COMMIT until its answer
	pool       *commits
}

// noAddr is an address that nobody can dial.
type noAddr struct{}

func (noAddr) Network() string { return "none" }
func (noAddr) String() string  { return "none" }

// RemoteAddr returns the server's address, to which pgx sends requests to cancel. During COMMIT
// there is none.
func (l *link) RemoteAddr() net.Addr {
	if l.committing.Load() {
		return noAddr{}
	}
	return l.Conn.RemoteAddr()
}

// linkOf returns nil for a connection of another package's pool.
func linkOf(conn *pgx.Conn) *link {
	raw := conn.PgConn().Conn()
	if secure, ok := raw.(*tls.Conn); ok {
		raw = secure.NetConn()
	}
	l, _ := raw.(*link)
	return l
}

// commits are the server's processes of a pool whose COMMIT had no answer in time. Such a process
// waits for its standby as long as that takes, although its connection is gone.
type commits struct {
	mu   sync.Mutex
	pids []int64
	most int // beyond this number no transaction begins, so that the pool does not use up the server's connections
}

// lostAfter is how long a statement without a deadline of its own waits for a server whose kernel
// acknowledges nothing. While a server works, its kernel does.
const lostAfter = 30 * time.Second

// watch makes the connections of the pool notice a COMMIT that did not wait, and never cancel one.
// It also makes them notice that the network has lost them.
func watch(pc *pgxpool.Config) {
	c := &commits{most: int(pc.MaxConns)}
	dial := pc.ConnConfig.DialFunc
	pc.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		socket.DropLost(conn, lostAfter)
		return &link{Conn: socket.Quiet(conn), pool: c}, nil
	}
	connected := pc.AfterConnect
	pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		c.forget(int64(conn.PgConn().PID()))
		if connected == nil {
			return nil
		}
		return connected(ctx, conn)
	}
	pc.ConnConfig.OnNotice = func(conn *pgconn.PgConn, n *pgconn.Notice) {
		// The text depends on the server's language. A trigger's own warning at COMMIT has this
		// code too, and only makes the result be looked up.
		if n.SeverityUnlocalized == "WARNING" && n.Code == codeWarning {
			conn.CustomData()[customWarned] = true
		}
	}
}

// forget removes a process that has the number of a new connection, so the one that it stood for
// has ended.
func (c *commits) forget(pid int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pids = slices.DeleteFunc(c.pids, func(p int64) bool { return p == pid })
}

// customWarned is the key in a connection's custom data of a warning since the last unwarned.
const customWarned = "tidings.warned"

// takeWarning reports whether the server has sent a warning since the last call.
func takeWarning(conn *pgx.Conn) bool {
	data := conn.PgConn().CustomData()
	_, is := data[customWarned]
	delete(data, customWarned)
	return is
}

// runningSQL reads which processes still exist. After a failover or a restart, others may have
// their numbers: those of other programs do not count. Index: none. Locks: none.
const runningSQL = `
SELECT /* postgres.running */ coalesce(array_agg(pid::bigint), '{}') FROM pg_stat_activity WHERE pid = ANY($1::bigint[]::int[])
   AND application_name = current_setting('application_name')`

// admitCommit returns ErrUnanswered while too many COMMITs of the connection's pool have no answer.
func admitCommit(ctx context.Context, conn *pgx.Conn) error {
	l := linkOf(conn)
	if l == nil {
		return nil
	}
	c := l.pool
	c.mu.Lock()
	pids := slices.Clone(c.pids)
	c.mu.Unlock()
	if len(pids) < c.most {
		return nil
	}
	var running []int64
	if err := conn.QueryRow(ctx, runningSQL, pids).Scan(&running); err != nil {
		return fmt.Errorf("look for commits without an answer: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pids = slices.DeleteFunc(c.pids, func(pid int64) bool {
		return slices.Contains(pids, pid) && !slices.Contains(running, pid)
	})
	if len(c.pids) >= c.most {
		return fmt.Errorf("%w (%d)", ErrUnanswered, len(c.pids))
	}
	return nil
}

// execute runs the statements of commit. It returns the result of sql.
func execute(ctx context.Context, conn *pgx.Conn, last *pgx.Batch, sql string) (tag pgconn.CommandTag, err error) {
	l := linkOf(conn)
	if l == nil {
		return executeLast(ctx, conn, last, sql)
	}
	l.committing.Store(true)
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	tag, err = executeLast(context.WithoutCancel(ctx), conn, last, sql)
	if !stop() {
		_ = conn.Close(ctx) // perhaps the answer came first
	}
	if !conn.IsClosed() {
		l.committing.Store(false)
		return tag, err
	}
	if err != nil {
		l.pool.mu.Lock()
		l.pool.pids = append(l.pool.pids, int64(conn.PgConn().PID()))
		l.pool.mu.Unlock()
	}
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return tag, err
}

// executeLast runs last and sql in one round trip.
func executeLast(ctx context.Context, conn *pgx.Conn, last *pgx.Batch, sql string) (tag pgconn.CommandTag, err error) {
	if last == nil || last.Len() == 0 {
		return conn.Exec(ctx, sql)
	}
	last.Queue(sql).Exec(func(t pgconn.CommandTag) error {
		tag = t
		return nil
	})
	err = conn.SendBatch(ctx, last).Close()
	return tag, err
}

// commit runs last, which may be nil, and then sql, which ends with COMMIT. If ctx ends first, it
// closes the connection and leaves the server alone. Any error but that of decided leaves the
// outcome unknown.
func commit(ctx context.Context, conn *pgx.Conn, last *pgx.Batch, sql string) error {
	takeWarning(conn)
	tag, err := execute(ctx, conn, last, sql)
	switch {
	case err != nil:
		return err
	case tag.String() == "ROLLBACK":
		return pgx.ErrTxCommitRollback
	case takeWarning(conn):
		return errNotReplicated
	}
	return nil
}
