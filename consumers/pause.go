package consumers

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/work"
)

// Paused is the record of a pause: its time, its actor and the reason.
type Paused struct {
	At     time.Time `json:"at"`
	Actor  string    `json:"actor"`
	Reason string    `json:"reason,omitempty"`
}

// pauseSQL pauses a consumer that is not paused yet. Index: consumer_pauses_pkey. Locks: the new
// row.
const pauseSQL = `
INSERT /* consumers.pause */ INTO consumer_pauses (consumer_name, actor, reason) VALUES (@consumer, @actor, @reason) ON CONFLICT DO NOTHING`

// Pause makes every instance of the consumer finish its batch in hand and take no more events until
// Resume, also after a restart. Instances notice it within a second or two. If the consumer is
// already paused, Pause changes nothing and returns false. Pause does not check that the consumer
// exists. The database sets the time.
func Pause(ctx context.Context, pool *pgxpool.Pool, consumer string, by Paused) (bool, error) {
	tag, err := pool.Exec(ctx, pauseSQL, pgx.StrictNamedArgs{"consumer": consumer, "actor": by.Actor, "reason": by.Reason})
	if err != nil {
		return false, fmt.Errorf("pause consumer %s: %w", consumer, err)
	}
	return tag.RowsAffected() == 1, nil
}

// resumeSQL ends a pause. Index: consumer_pauses_pkey. Locks: the row.
const resumeSQL = `DELETE /* consumers.resume */ FROM consumer_pauses WHERE consumer_name = @consumer`

// Resume ends the pause of a consumer. It returns false if the consumer was not paused.
func Resume(ctx context.Context, pool *pgxpool.Pool, consumer string) (bool, error) {
	tag, err := pool.Exec(ctx, resumeSQL, pgx.StrictNamedArgs{"consumer": consumer})
	if err != nil {
		return false, fmt.Errorf("resume consumer %s: %w", consumer, err)
	}
	return tag.RowsAffected() == 1, nil
}

// pausesSQL reads all pauses, at most one per consumer. Locks: none.
const pausesSQL = `SELECT /* consumers.pauses */ consumer_name, paused_at, actor, reason FROM consumer_pauses`

// Pauses returns the paused consumers by name.
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
	pausePoll    = time.Second // between two checks of an instance whether its consumer is paused
	pauseTimeout = 5 * time.Second
)

// awaitPaused returns true when the state of the consumer is as wanted, paused or not. It returns
// false when ctx ends.
func (c *Consumer) awaitPaused(ctx context.Context, want bool) bool {
	for {
		qctx, cancel := context.WithTimeout(ctx, pauseTimeout)
		all, err := Pauses(qctx, c.deps.Pool)
		cancel()
		if err == nil {
			if _, paused := all[c.name]; paused == want {
				return true
			}
			c.countPaused(!want)
		} else if ctx.Err() == nil {
			c.log.WarnContext(ctx, "reading whether the consumer is paused failed, retrying", "err", err)
		}
		if work.Sleep(ctx, pausePoll) != nil {
			return false
		}
	}
}

// countPaused sets the gauge. It says that the consumer is paused only when this instance begins no
// more batches.
func (c *Consumer) countPaused(paused bool) {
	if paused {
		c.metrics.paused.Set(1)
	} else {
		c.metrics.paused.Set(0)
	}
}

// loopUnpaused runs loop while the consumer is not paused, until ctx ends. A paused instance keeps
// its leases, because every other instance is paused too.
func (c *Consumer) loopUnpaused(ctx context.Context) {
	for {
		if !c.awaitPaused(ctx, false) {
			return
		}
		c.countPaused(false)
		turn, end := context.WithCancel(ctx)
		watched := make(chan struct{})
		go func() {
			defer close(watched)
			defer end()
			if c.awaitPaused(turn, true) {
				end()
				c.countPaused(true)
			}
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
