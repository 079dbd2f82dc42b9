package relay

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// pair is a follow pair with a single writer. Its aggregate is to.
type pair struct{ from, to int }

func (p pair) gid() string { return fmt.Sprintf("pair %d %d", p.from, p.to) }

func (p pair) writeState(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, $2)
		ON CONFLICT (tenant_id, follower_id, followee_id) DO UPDATE
		SET version = follows.version + 1, status = CASE follows.status WHEN 'ACTIVE' THEN 'REMOVED' ELSE 'ACTIVE' END`,
		userID(p.from), userID(p.to))
	return err
}

// writeEvent appends an event whose version is the state's plus ahead.
func (p pair) writeEvent(ctx context.Context, tx pgx.Tx, ahead int) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'follow', $2::text, 'created', jsonb_build_object('follower_id', $1::text, 'followee_id', $2::text, 'version',
		        $3::bigint + coalesce((SELECT version FROM follows WHERE tenant_id = 1 AND follower_id = $1::text
		        AND followee_id = $2::text), 0)))`, userID(p.from), userID(p.to), ahead)
	return err
}

// ways are the ways to write an event of a pair in a transaction that stays open while open runs.
var ways = map[string]func(ctx context.Context, pool *pgxpool.Pool, p pair, open func()) error{
	"the state row first": func(ctx context.Context, pool *pgxpool.Pool, p pair, open func()) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := p.writeState(ctx, tx); err != nil {
				return err
			}
			defer open()
			return p.writeEvent(ctx, tx, 0)
		})
	},
	"the outbox row first": func(ctx context.Context, pool *pgxpool.Pool, p pair, open func()) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := p.writeEvent(ctx, tx, 1); err != nil {
				return err
			}
			open()
			return p.writeState(ctx, tx)
		})
	},
	"in a savepoint": func(ctx context.Context, pool *pgxpool.Pool, p pair, open func()) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			defer open()
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				if err := p.writeEvent(ctx, tx, 1); err != nil {
					return err
				}
				return p.writeState(ctx, tx)
			})
		})
	},
	"in two phases": func(ctx context.Context, pool *pgxpool.Pool, p pair, open func()) error {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		if err = p.writeState(ctx, tx); err == nil {
			if err = p.writeEvent(ctx, tx, 0); err == nil {
				_, err = tx.Exec(ctx, `PREPARE TRANSACTION '`+p.gid()+`'`)
			}
		}
		// a prepared transaction needs no rollback: this returns the connection
		if rerr := tx.Rollback(context.WithoutCancel(ctx)); err == nil {
			err = rerr
		}
		if err != nil {
			return err
		}
		open()
		_, err = pool.Exec(ctx, `COMMIT PREPARED '`+p.gid()+`'`)
		return err
	},
}

// writeLong adds a writer of long transactions, in all ways. Half of them are alone on the server,
// so no concurrent commit reveals that they run. The pair's next event follows each.
func (m *mix) writeLong(rng *rand.Rand) {
	names := slices.Sorted(maps.Keys(ways))
	m.write(func(ctx context.Context) {
		// If the server is unavailable, the outcome of a transaction is unknown. So each one starts
		// from the current state. A prepared transaction survives everything; at the latest the end
		// of the test commits it.
		finish := func(p pair) error {
			ctx := context.WithoutCancel(ctx)
			var prepared bool
			if err := m.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_prepared_xacts WHERE gid = $1)`,
				p.gid()).Scan(&prepared); err != nil || !prepared {
				return err
			}
			_, err := m.pool.Exec(ctx, `COMMIT PREPARED '`+p.gid()+`'`)
			return err
		}
		for n := 0; ; n = (n + 1) % 30 { // some partitions of each relay
			p := pair{9, 100 + n}
			write, alone := ways[names[rng.IntN(len(names))]], rng.IntN(2) == 0
			open := func() { m.within(ctx, time.Duration(1+rng.IntN(5))*mixFloors) }
			if alone {
				m.quiet.Lock()
			}
			err := write(ctx, m.pool, p, open)
			if alone {
				m.quiet.Unlock()
			}
			for err != nil {
				m.within(ctx, mixFloors)
				if err = finish(p); ctx.Err() != nil && err == nil {
					return
				}
			}
			_ = ways["the state row first"](ctx, m.pool, p, func() {}) // after an error the pair has one event less
			if ctx.Err() != nil {
				return
			}
		}
	})
}

// TestATransactionThatStaysOpenIsPublishedBeforeTheNextOfItsAggregate runs transactions one after
// the other on a quiet server. Each stays open while the relay samples its floors several times.
// The next event of the same aggregate follows its commit.
func TestATransactionThatStaysOpenIsPublishedBeforeTheNextOfItsAggregate(t *testing.T) {
	for name, write := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := testkit.PostgresProcess(t).DB(t).Pool(t, postgres.RoleSystem)
			b := testkit.NATS(t)
			r := newRelay(t, pool, b)
			r.cfg.Lease.TTL = 15 * time.Second // its renewals write
			r.floorEvery = 2 * time.Millisecond
			checked := make(chan struct{})
			r.step = func(step string) {
				if step == "after mark" {
					select {
					case checked <- struct{}{}:
					default:
					}
				}
			}
			start(t, r)
			untilLookedAt := func() {
				for range 4 {
					select {
					case <-checked:
					case <-time.After(time.Minute):
						t.Error("the relay takes no samples for its floors")
					}
				}
			}
			for n := range 20 {
				p := pair{1, 10 + n}
				if err := write(t.Context(), pool, p, untilLookedAt); err != nil {
					t.Fatal(err)
				}
				if err := ways["the state row first"](t.Context(), pool, p, func() {}); err != nil {
					t.Fatal(err)
				}
			}
			testkit.Eventually(t, "the relay to publish the last row", func() (bool, error) {
				var tails int
				err := pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL
					AND id >= (SELECT max(id) FROM outbox_messages)`).Scan(&tails)
				return tails == 1, err
			})
			untilLookedAt()
			checkStream(t, t.Context(), pool, b)
		})
	}
}
