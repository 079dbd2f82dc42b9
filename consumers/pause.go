package consumers

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Paused says since when a consumer takes no events, who wanted it and why.
type Paused struct {
	At     time.Time `json:"at"`
	Actor  string    `json:"actor"`
	Reason string    `json:"reason,omitempty"`
}

// pauseSQL pauses a consumer, unless it is paused.
// Index: consumer_pauses_pkey.   Locks: the new row.
const pauseSQL = `
INSERT /* consumers.pause */ INTO consumer_pauses (consumer_name, actor, reason) VALUES (@consumer, @actor, @reason) ON CONFLICT DO NOTHING`

// Pause makes every instance of the consumer finish the batch that it has in hand and take no more, now and after a restart,
// until Resume. They notice within a second or two. A pause that is there already stays as it is, and false is returned. That
// there is such a consumer is the caller's to know.
func Pause(ctx context.Context, pool *pgxpool.Pool, consumer, actor, reason string) (bool, error) {
	tag, err := pool.Exec(ctx, pauseSQL, pgx.StrictNamedArgs{"consumer": consumer, "actor": actor, "reason": reason})
	if err != nil {
		return false, fmt.Errorf("pause consumer %s: %w", consumer, err)
	}
	return tag.RowsAffected() == 1, nil
}

// resumeSQL ends a pause.
// Index: consumer_pauses_pkey.   Locks: the row.
const resumeSQL = `DELETE /* consumers.resume */ FROM consumer_pauses WHERE consumer_name = @consumer`

// Resume ends the pause of a consumer, and reports whether there was one.
func Resume(ctx context.Context, pool *pgxpool.Pool, consumer string) (bool, error) {
	tag, err := pool.Exec(ctx, resumeSQL, pgx.StrictNamedArgs{"consumer": consumer})
	if err != nil {
		return false, fmt.Errorf("resume consumer %s: %w", consumer, err)
	}
	return tag.RowsAffected() == 1, nil
}

// pausesSQL reads all pauses: at most one per consumer.
// Locks: none.
const pausesSQL = `SELECT /* consumers.pauses */ consumer_name, paused_at, actor, reason FROM consumer_pauses`

// Pauses returns the consumers that are paused.
func Pauses(ctx context.Context, pool *pgxpool.Pool) (map[string]Paused, error) {
	rows, _ := pool.Query(ctx, pausesSQL)
	all := make(map[string]Paused)
	var name string
	var p Paused
	if _, err := pgx.ForEachRow(rows, []any{&name, &p.At, &p.Actor, &p.Reason}, func() error {
		all[name] = Paused{p.At.UTC(), p.Actor, p.Reason}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read which consumers are paused: %w", err)
	}
	return all, nil
}

const (
	pausePoll    = time.Second // how often an instance looks whether its consumer is paused
	pauseTimeout = 5 * time.Second
)

// awaitPaused returns when the consumer is paused, or when it is not, as wanted; or when ctx ends.
func (c *Consumer) awaitPaused(ctx context.Context, want bool) {
	tick := time.NewTicker(pausePoll)
	defer tick.Stop()
	for {
		qctx, cancel := context.WithTimeout(ctx, pauseTimeout)
		all, err := Pauses(qctx, c.deps.Pool)
		cancel()
		if err == nil {
			_, paused := all[c.name]
			if paused {
				c.metrics.paused.Set(1)
			} else {
				c.metrics.paused.Set(0)
			}
			if paused == want {
				return
			}
		} else if ctx.Err() == nil {
			c.log.WarnContext(ctx, "looking whether the consumer is paused, trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// loopUnpaused runs loop whenever the consumer is not paused, until ctx ends. A paused instance keeps its leases: it holds
// nothing up that another could do.
func (c *Consumer) loopUnpaused(ctx context.Context) {
	for {
		c.awaitPaused(ctx, false)
		if ctx.Err() != nil {
			return
		}
		turn, end := context.WithCancel(ctx)
		watched := make(chan struct{})
		go func() {
			defer close(watched)
			defer end()
			c.awaitPaused(turn, true)
		}()
		c.loop(turn)
		end()
		<-watched
		if ctx.Err() != nil {
			return
		}
		c.log.InfoContext(ctx, "paused")
	}
}
