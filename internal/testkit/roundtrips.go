package testkit

import (
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// RoundTrips returns a pool of one connection that is configured like another pool, and a function
// that returns how often the connection has written after it had read. The end of the test closes
// the pool.
func RoundTrips(t testing.TB, model *pgxpool.Pool) (pool *pgxpool.Pool, trips func() int64) {
	t.Helper()
	cfg, n := model.Config(), new(atomic.Int64)
	cfg.MaxConns, cfg.MinConns = 1, 0
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &turns{Conn: conn, n: n}, nil
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	check(t, "open a pool", err)
	t.Cleanup(pool.Close)
	return pool, n.Load
}

// turns counts the writes that follow a read.
type turns struct {
	net.Conn
	n    *atomic.Int64
	read atomic.Bool
}

func (c *turns) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.read.Store(true)
	}
	return n, err
}

func (c *turns) Write(b []byte) (int, error) {
	if c.read.Swap(false) {
		c.n.Add(1)
	}
	return c.Conn.Write(b)
}
