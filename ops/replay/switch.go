package replay

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/projections"
)

const (
	offsetsTimeout = 10 * time.Second        // the wait for a live batch in hand
	passTimeout    = 3 * time.Second         // the wait until the new tables have reached the live ones, which wait meanwhile
	firstTimeout   = 50 * time.Millisecond   // the wait for the lock of the tables, behind which readers queue up
	lastTimeout    = 1500 * time.Millisecond // at most: above a second PostgreSQL stops an autovacuum that is in the way
)

// errNotYet ends an attempt that may succeed later.
var errNotYet = errors.New("the live tables had applied more events")

// holdLiveSQL locks the live offset rows. A live batch locks its row first, so after this statement
// no batch is running. The rows of predecessors come before those of their successors, as in a
// batch that closes a stream. Index: consumer_offsets_pkey. Locks: the rows.
const holdLiveSQL = `
SELECT /* replay.hold_live */ FROM consumer_offsets WHERE consumer_name = @consumer
 ORDER BY length(partition_key), partition_key FOR UPDATE`

// holdNewSQL creates the missing rows, so that no consumer begins to read a stream meanwhile.
// Index: consumer_offsets_pkey. Locks: the rows.
const holdNewSQL = `
INSERT /* replay.hold_new */ INTO consumer_offsets AS o (consumer_name, partition_key, last_processed_id, stream_created)
SELECT @consumer, t.key, 0, t.created
  FROM unnest(@keys::text[], @createds::timestamptz[]) WITH ORDINALITY AS t(key, created, n) ORDER BY t.n
    ON CONFLICT (consumer_name, partition_key) DO UPDATE SET last_processed_id = o.last_processed_id WHERE false`

// liveOffsetsSQL reads the live offsets. Index: consumer_offsets_pkey. Locks: none.
const liveOffsetsSQL = `
SELECT /* replay.live_offsets */ partition_key, last_processed_id FROM consumer_offsets WHERE consumer_name = @consumer`

// behindSQL counts the streams on which the new tables have not reached the live ones. If the live
// offset belongs to another stream of that name, or names a message that is gone, no consumer can
// reach it. Then the new tables must reach the end of the stream instead. The statement ignores a
// stream that is gone, because no consumer reads it. Index: consumer_offsets_pkey of both. Locks:
// none.
const behindSQL = `
SELECT /* replay.behind */ count(*)
  FROM unnest(@keys::text[], @tails::bigint[], @gone::bigint[]) AS t(partition_key, tail, gone)
  JOIN consumer_offsets l ON l.consumer_name = @live AND l.partition_key = t.partition_key
  LEFT JOIN {shadow}.consumer_offsets s ON s.consumer_name = @shadow AND s.partition_key = t.partition_key
 WHERE NOT coalesce(s.closed, false)
   AND (l.closed OR coalesce(s.last_processed_id, 0) < CASE
        WHEN l.last_processed_id = 0 THEN 0
        WHEN coalesce(l.stream_created = s.stream_created, false) AND l.last_processed_id <> t.gone THEN l.last_processed_id
        ELSE t.tail END)`

// holdShadowSQL waits for the batch in hand of the new tables, and keeps others from beginning.
// Index: consumer_offsets_pkey. Locks: the rows, in key order.
const holdShadowSQL = `
SELECT /* replay.hold_shadow */ FROM {shadow}.consumer_offsets WHERE consumer_name = @shadow ORDER BY partition_key FOR UPDATE`

// takeOffsetsSQL turns the new tables' offsets into the live ones. Without its rows the new tables'
// consumer applies no more events. Index: consumer_offsets_pkey of both. Locks: none beyond those
// held.
const takeOffsetsSQL = `
WITH taken AS (DELETE FROM {shadow}.consumer_offsets WHERE consumer_name = @shadow RETURNING *),
dropped AS (DELETE FROM consumer_offsets l WHERE l.consumer_name = @live AND l.partition_key NOT IN (SELECT partition_key FROM taken))
INSERT /* replay.take_offsets */ INTO consumer_offsets AS l
       (consumer_name, partition_key, last_processed_id, last_processed_at, as_of, stream_created, closed, stored_id, stored_at)
SELECT @live, partition_key, last_processed_id, now(), as_of, stream_created, closed, stored_id, stored_at FROM taken
    ON CONFLICT (consumer_name, partition_key) DO UPDATE
   SET last_processed_id = excluded.last_processed_id, last_processed_at = excluded.last_processed_at,
       as_of = GREATEST(l.as_of, excluded.as_of), stream_created = excluded.stream_created, closed = excluded.closed,
       stored_id = excluded.stored_id, stored_at = excluded.stored_at`

// dropDeadLettersSQL deletes the live dead letters of tables that are replaced. Their events are
// applied to the new tables, or parked again in the new dead letters. Index:
// consumer_dead_letters_pkey. Locks: the rows.
const dropDeadLettersSQL = `DELETE /* replay.drop_dead_letters */ FROM consumer_dead_letters WHERE consumer_name = @live`

// takeDeadLettersSQL adds the new tables' dead letters to the live ones, except those that a
// record's consumer has already parked. Index: consumer_dead_letters_aggregate_idx. Locks: only the
// new rows.
const takeDeadLettersSQL = `
INSERT /* replay.take_dead_letters */ INTO consumer_dead_letters
       (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id, event_id, event_type, event_version, headers,
       payload, error, dead_at, cause, retries)
SELECT @live, s.stream_seq, s.partition_key, s.tenant_id, s.aggregate_type, s.aggregate_id, s.event_id, s.event_type,
       s.event_version, s.headers, s.payload, s.error, s.dead_at, s.cause, s.retries
  FROM {shadow}.consumer_dead_letters s
 WHERE s.consumer_name = @shadow
   AND NOT EXISTS (SELECT FROM consumer_dead_letters l WHERE l.consumer_name = @live AND l.tenant_id = s.tenant_id
                      AND l.aggregate_type = s.aggregate_type AND l.aggregate_id = s.aggregate_id AND l.event_id = s.event_id)
 ORDER BY s.id`

// countDeadLettersSQL counts the dead letters after the switch.
const countDeadLettersSQL = `SELECT /* replay.count_dead_letters */ count(*) FROM consumer_dead_letters WHERE consumer_name = @live`

// trySwitch replaces the live tables by the new ones in one transaction. It returns false if an
// obstacle, for example a lock, may be gone at the next attempt.
func (r *replay) trySwitch(ctx context.Context, report *Report) (done bool, err error) {
	live, err := r.liveOffsets(ctx) // before the ends of the streams: an offset beyond an end names a lost message
	if err != nil {
		return false, err
	}
	now, err := broker.Streams(ctx, r.deps.JetStream, r.deps.Broker)
	if err != nil {
		return false, r.unlessBusy(ctx, err)
	}
	if err := r.streams.checkSame(now); err != nil {
		return false, err
	}
	args, gone := streamArgs(now), make([]int64, len(now))
	for i, s := range now {
		if gone[i] = live[s.Name]; gone[i] <= int64(s.Last) {
			gone[i] = -1
		}
	}
	args["gone"] = gone
	start := time.Now()
	err = pgx.BeginFunc(ctx, r.conn, func(tx pgx.Tx) error { return r.switchIn(ctx, tx, args, report) })
	report.SwitchSeconds = time.Since(start).Seconds()
	switch {
	case err == nil:
		report.Switched = true
		return true, nil
	case errors.Is(err, errNotYet) || postgres.IsLockTimeout(err) || postgres.IsConcurrency(err):
		r.why = err.Error()
		return false, nil
	}
	return false, fmt.Errorf("switch %s to the new tables: %w", r.name, err)
}

// unlessBusy turns a missing answer into the reason for another attempt, because the new tables may
// have taken hours to build. catchUp runs before each attempt, and returns an error if servers do
// not answer at all.
func (r *replay) unlessBusy(ctx context.Context, err error) error {
	if ctx.Err() != nil || !postgres.IsTransient(err) && !errors.Is(err, broker.ErrNoLeader) {
		return err
	}
	r.why = err.Error()
	return nil
}

func (r *replay) switchIn(ctx context.Context, tx pgx.Tx, streams pgx.StrictNamedArgs, report *Report) error {
	consumer := pgx.StrictNamedArgs{"live": r.name, "shadow": r.name + suffix}
	exec := func(sql string, args pgx.StrictNamedArgs) error {
		_, err := tx.Exec(ctx, r.in(sql), args)
		return err
	}
	if err := lockTimeout(ctx, tx, offsetsTimeout); err != nil {
		return err
	}
	if err := exec(holdLiveSQL, pgx.StrictNamedArgs{"consumer": r.name}); err != nil {
		return fmt.Errorf("lock the live offsets: %w", err)
	}
	if err := exec(holdNewSQL, pgx.StrictNamedArgs{"consumer": r.name, "keys": streams["keys"],
		"createds": streams["createds"]}); err != nil {
		return fmt.Errorf("lock the live offsets: %w", err)
	}
	r.opts.at(ctx, "held")
	if err := r.passLive(ctx, tx, pgx.StrictNamedArgs{"keys": streams["keys"], "tails": streams["tails"], "gone": streams["gone"],
		"live": r.name, "shadow": r.name + suffix}); err != nil {
		return err
	}
	if err := exec(holdShadowSQL, pgx.StrictNamedArgs{"shadow": r.name + suffix}); err != nil {
		return fmt.Errorf("lock the new tables' offsets: %w", err)
	}
	if len(r.p.Tables()) > 0 {
		if err := r.moveTables(ctx, tx, report.SwitchTries); err != nil {
			return err
		}
		if err := exec(dropDeadLettersSQL, pgx.StrictNamedArgs{"live": r.name}); err != nil {
			return fmt.Errorf("drop the old dead letters: %w", err)
		}
	}
	if err := exec(takeDeadLettersSQL, consumer); err != nil {
		return fmt.Errorf("take over the dead letters: %w", err)
	}
	if err := exec(takeOffsetsSQL, consumer); err != nil {
		return fmt.Errorf("take over the offsets: %w", err)
	}
	if err := tx.QueryRow(ctx, countDeadLettersSQL, pgx.StrictNamedArgs{"live": r.name}).Scan(&report.DeadLetters); err != nil {
		return fmt.Errorf("count the dead letters: %w", err)
	}
	r.opts.at(ctx, "moved")
	return nil
}

func (r *replay) liveOffsets(ctx context.Context) (map[string]int64, error) {
	offsets := make(map[string]int64)
	rows, _ := r.conn.Query(ctx, liveOffsetsSQL, pgx.StrictNamedArgs{"consumer": r.name})
	var stream string
	var offset int64
	if _, err := pgx.ForEachRow(rows, []any{&stream, &offset}, func() error {
		offsets[stream] = offset
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the live offsets: %w", err)
	}
	return offsets, nil
}

// in puts the new schema's name into a statement.
func (r *replay) in(sql string) string {
	return strings.ReplaceAll(sql, "{shadow}", pgx.Identifier{r.shadow}.Sanitize())
}

const lockTimeoutSQL = `SELECT set_config('lock_timeout', $1, true)`

func lockTimeout(ctx context.Context, tx pgx.Tx, d time.Duration) error {
	if _, err := tx.Exec(ctx, lockTimeoutSQL, strconv.FormatInt(d.Milliseconds(), 10)); err != nil {
		return fmt.Errorf("set lock_timeout: %w", err)
	}
	return nil
}

// passLive waits until the new tables have reached the live ones, which do not move meanwhile.
func (r *replay) passLive(ctx context.Context, tx pgx.Tx, args pgx.StrictNamedArgs) error {
	for deadline := time.Now().Add(passTimeout); ; {
		var behind int
		if err := tx.QueryRow(ctx, r.in(behindSQL), args).Scan(&behind); err != nil {
			return fmt.Errorf("compare the offsets: %w", err)
		}
		if behind == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return errNotYet
		}
		if err := work.Sleep(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}

// moveTables moves the live tables out and the new ones in. Readers queue up behind its locks. So
// its first wait for the locks is short, and each attempt waits longer.
func (r *replay) moveTables(ctx context.Context, tx pgx.Tx, try int) error {
	if err := lockTimeout(ctx, tx, min(firstTimeout<<min(try-1, 8), lastTimeout)); err != nil {
		return err
	}
	var tables []string
	for _, t := range r.p.Tables() {
		tables = append(tables, pgx.Identifier{r.live, t}.Sanitize())
	}
	if _, err := tx.Exec(ctx, `LOCK TABLE `+strings.Join(tables, ", ")+` IN ACCESS EXCLUSIVE MODE`); err != nil {
		return fmt.Errorf("lock the live tables: %w", err)
	}
	old := pgx.Identifier{r.old}.Sanitize()
	if _, err := tx.Exec(ctx, `CREATE SCHEMA `+old); err != nil {
		return fmt.Errorf("create schema %s: %w", r.old, err)
	}
	for i, t := range r.p.Tables() {
		for _, sql := range []string{
			`ALTER TABLE ` + tables[i] + ` SET SCHEMA ` + old,
			`ALTER TABLE ` + pgx.Identifier{r.shadow, t}.Sanitize() + ` SET SCHEMA ` + pgx.Identifier{r.live}.Sanitize(),
		} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return fmt.Errorf("%s: %w", sql, err)
			}
		}
	}
	return nil
}

// Exclusion prevents replays of projections. It has dropped the schemas of their interrupted
// replays, which are copies of data.
type Exclusion struct{ held []*replay }

// Exclude prevents replays of these projections until the exclusion is closed. Of deps it uses only
// URL and Postgres. It returns ErrRunning if a replay of one of them is running.
func Exclude(ctx context.Context, deps Deps, all ...projections.Projection) (_ *Exclusion, err error) {
	e := &Exclusion{}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close(ctx))
		}
	}()
	for _, p := range all {
		r := &replay{deps: deps, p: p, name: p.Name()}
		if err := r.lock(ctx); err != nil {
			return nil, err
		}
		e.held = append(e.held, r)
		if err := r.drop(ctx); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// Check returns an error if the exclusion may have ended because its connections are lost.
func (e *Exclusion) Check(ctx context.Context) error {
	for _, r := range e.held {
		if err := r.conn.Ping(ctx); err != nil {
			return fmt.Errorf("keep the lock against replays of %s: %w", r.name, err)
		}
	}
	return nil
}

// Close ends the exclusion.
func (e *Exclusion) Close(ctx context.Context) error {
	var errs []error
	for _, r := range e.held {
		errs = append(errs, r.unlock(context.WithoutCancel(ctx)))
	}
	return errors.Join(errs...)
}
