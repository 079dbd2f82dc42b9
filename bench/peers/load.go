package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// truthSchema has the state of the entities and, for the checker, every version that was committed.
const truthSchema = `
CREATE TABLE entities (id text PRIMARY KEY, version bigint NOT NULL);
CREATE TABLE versions (entity text, version bigint, PRIMARY KEY (entity, version));
CREATE TABLE requests (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())`

// writers is how many transactions run at once.
const writers = 8

// load writes entities at a fixed rate.
type load struct {
	pool     *pgxpool.Pool
	append   func(ctx context.Context, tx pgx.Tx, events []event) error
	rate     int // transactions per second
	seconds  float64
	entities int
	request  bool // each transaction first writes to another table

	mu   sync.Mutex
	sent map[change]time.Time
}

// write makes the next version of an entity, in one transaction with its event. Its order is the
// one that each of these outboxes asks for: first the state, whose lock makes other writers of the
// entity wait, and then the event.
func (l *load) write(ctx context.Context, entity string, pad int, beforeCommit func()) (c change, err error) {
	tx, err := l.pool.Begin(ctx)
	if err != nil {
		return c, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // does nothing after a commit
	if l.request {
		if _, err := tx.Exec(ctx, `INSERT INTO requests DEFAULT VALUES`); err != nil {
			return c, err
		}
	}
	c.Entity = entity
	if err := tx.QueryRow(ctx, `INSERT INTO entities VALUES ($1, 1)
		ON CONFLICT (id) DO UPDATE SET version = entities.version + 1 RETURNING version`, entity).Scan(&c.Version); err != nil {
		return c, err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO versions VALUES ($1, $2)`, c.Entity, c.Version); err != nil {
		return c, err
	}
	if err := l.append(ctx, tx, []event{{change: c, Pad: strings.Repeat("x", pad)}}); err != nil {
		return c, err
	}
	if beforeCommit != nil {
		beforeCommit()
	}
	at := time.Now()
	if err := tx.Commit(ctx); err != nil {
		return c, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent[c] = at
	return c, nil
}

// padding is the size of an ordinary payload's filler.
const padding = 100

// run offers the load, and retries what fails until ctx ends.
func (l *load) run(ctx context.Context) {
	n := int(float64(l.rate) * l.seconds)
	due := make(chan struct{}, n) // a slow database does not slow the offer
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			for range due {
				for ctx.Err() == nil {
					try, cancel := context.WithTimeout(ctx, 5*time.Second)
					_, err := l.write(try, strconv.Itoa(1+rand.IntN(l.entities)), padding, nil)
					cancel()
					if err == nil {
						break
					}
					sleep(ctx, 50*time.Millisecond)
				}
			}
		})
	}
	began := time.Now()
	for i := range n {
		sleep(ctx, time.Until(began.Add(time.Duration(float64(i)/float64(l.rate)*float64(time.Second)))))
		due <- struct{}{}
	}
	close(due)
	all.Wait()
}

// backlog writes n events of 5,000 entities before the relay starts.
func (l *load) backlog(ctx context.Context, n int) error {
	const perTransaction, entities = 500, 5_000
	for first := 0; first < n; first += perTransaction {
		events := make([]event, 0, perTransaction)
		rows := make([][]any, 0, perTransaction)
		for i := first; i < min(first+perTransaction, n); i++ {
			c := change{Entity: strconv.Itoa(1 + i%entities), Version: int64(1 + i/entities)}
			events = append(events, event{change: c, Pad: strings.Repeat("x", padding)})
			rows = append(rows, []any{c.Entity, c.Version})
		}
		if err := pgx.BeginFunc(ctx, l.pool, func(tx pgx.Tx) error {
			if _, err := tx.CopyFrom(ctx, pgx.Identifier{"versions"}, []string{"entity", "version"}, pgx.CopyFromRows(rows)); err != nil {
				return err
			}
			return l.append(ctx, tx, events)
		}); err != nil {
			return fmt.Errorf("write the backlog: %w", err)
		}
	}
	return nil
}

// committed returns what the database has.
func committed(ctx context.Context, pool *pgxpool.Pool) (map[change]bool, error) {
	rows, _ := pool.Query(ctx, `SELECT entity, version FROM versions`)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[change])
	m := make(map[change]bool, len(all))
	for _, c := range all {
		m[c] = true
	}
	return m, err
}
