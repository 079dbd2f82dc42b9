package outbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// OnStream is a message that the stream holds.
type OnStream struct {
	Seq       uint64
	Partition int
	ID        int64
	EventID   string
}

// Findings are what a comparison of the whole stream with this database found.
type Findings struct {
	Messages   int64    // on the stream
	Unmarked   int64    // of these, whose rows did not say where they are: marked by a repair
	Missing    int64    // rows, archived ones among them, that say they are on the stream and are not: published again by a repair
	Unknown    []uint64 // sequences of messages that have no row here, the first MaxUnknown of them
	UnknownOf  int64    // how many there are
	Duplicates int64    // messages of an event that an earlier one has: the first counts
}

// MaxUnknown is how many unknown messages Findings names.
const MaxUnknown = 1000

// Repair compares the stream with this database, message by message, on a connection of its own with a temporary table. Its use
// is: BeginRepair, Saw for every message in order, Compare, Apply or not, Close.
type Repair struct {
	conn     *pgx.Conn
	pending  []OnStream
	tails    map[int]uint64
	findings Findings
}

// fenceSQL makes the generation greater than any relay knows, so that no session that began before can mark. It waits for marks in flight.
// Locks: the partition rows.
const fenceSQL = `
WITH fenced AS (UPDATE outbox_partitions SET generation = @generation RETURNING 1)
UPDATE outbox_stream SET generation = @generation`

// Fence begins a generation: relays of an earlier one mark nothing any more, and end.
func Fence(ctx context.Context, pool *pgxpool.Pool, generation int64) error {
	if _, err := pool.Exec(ctx, fenceSQL, pgx.StrictNamedArgs{"generation": generation}); err != nil {
		return fmt.Errorf("begin generation %d: %w", generation, err)
	}
	return nil
}

// repairLock keeps two repairs apart (an advisory lock of this database).
const repairLock = 0x7464_7265 // "tdre"

// ErrRepairRunning reports that another repair is at work.
var ErrRepairRunning = errors.New("outbox: another repair is running")

// BeginRepair opens the connection of a repair. The caller closes it.
func BeginRepair(ctx context.Context, pool *pgxpool.Pool) (*Repair, error) {
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("begin repair: %w", err)
	}
	r := &Repair{conn: pooled.Hijack(), tails: map[int]uint64{}} // its settings, table and lock end with it
	var locked bool
	err = r.conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, int64(repairLock)).Scan(&locked)
	if err == nil && !locked {
		err = ErrRepairRunning
	}
	if err == nil {
		_, err = r.conn.Exec(ctx, `SET statement_timeout = 0;
			CREATE TEMP TABLE repair_seen (seq bigint NOT NULL, partition smallint NOT NULL, id bigint NOT NULL, event_id uuid NOT NULL,
			                              again boolean NOT NULL DEFAULT false)`)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("begin repair: %w", err), r.Close(ctx))
	}
	return r, nil
}

// Close ends the repair. What was not applied has changed nothing.
func (r *Repair) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, err := r.conn.Exec(ctx, `SELECT pg_advisory_unlock_all()`) // the server takes a while to notice that we are gone
	return errors.Join(err, r.conn.Close(ctx))
}

// Saw takes the stream's next message.
func (r *Repair) Saw(ctx context.Context, m OnStream) error {
	r.pending = append(r.pending, m)
	r.tails[m.Partition] = m.Seq
	r.findings.Messages++
	if len(r.pending) < 5000 {
		return nil
	}
	return r.flush(ctx)
}

func (r *Repair) flush(ctx context.Context) error {
	_, err := r.conn.CopyFrom(ctx, pgx.Identifier{"repair_seen"}, []string{"seq", "partition", "id", "event_id"},
		pgx.CopyFromSlice(len(r.pending), func(i int) ([]any, error) {
			m := r.pending[i]
			return []any{int64(m.Seq), int16(m.Partition), m.ID, m.EventID}, nil
		}))
	if err != nil {
		return fmt.Errorf("note %d messages: %w", len(r.pending), err)
	}
	r.pending = r.pending[:0]
	return nil
}

// againSQL tells the first message of each event from later ones.
const againSQL = `
UPDATE repair_seen s SET again = true
  FROM (SELECT id, event_id, min(seq) AS first FROM repair_seen GROUP BY id, event_id HAVING count(*) > 1) d
 WHERE s.id = d.id AND s.event_id = d.event_id AND s.seq > d.first`

// unknownSQL finds messages that have no row.
const unknownSQL = `
SELECT s.seq FROM repair_seen s
 WHERE NOT EXISTS (SELECT FROM outbox_messages m WHERE m.id = s.id AND m.event_id = s.event_id)
   AND NOT EXISTS (SELECT FROM outbox_messages_archive a WHERE a.id = s.id AND a.event_id = s.event_id)
   AND NOT EXISTS (SELECT FROM outbox_messages_dlq d WHERE d.id = s.id AND d.event_id = s.event_id)
 ORDER BY s.seq`

// compareSQL counts rows that do not say where their message is, and rows that say so of a message that is not there. A row
// without stream_seq that is processed is never published again: it was erased.
const compareSQL = `
SELECT (SELECT count(*) FROM outbox_messages m JOIN repair_seen s ON s.id = m.id AND s.event_id = m.event_id WHERE NOT s.again AND m.stream_seq IS DISTINCT FROM s.seq),
       (SELECT count(*) FROM outbox_messages m WHERE m.stream_seq >= @first AND NOT EXISTS (SELECT FROM repair_seen s WHERE s.id = m.id AND s.event_id = m.event_id))
     + (SELECT count(*) FROM outbox_messages_archive a WHERE a.stream_seq >= @first AND NOT EXISTS (SELECT FROM repair_seen s WHERE s.id = a.id AND s.event_id = a.event_id))`

// Compare ends the reading and says what was found. Rows whose sequence lies below first have expired and are not missing; of a
// stream that was made anew everything is, so first is 0.
func (r *Repair) Compare(ctx context.Context, first uint64) (Findings, error) {
	if err := r.flush(ctx); err != nil {
		return Findings{}, err
	}
	if _, err := r.conn.Exec(ctx, `CREATE INDEX ON repair_seen (id); ANALYZE repair_seen`); err != nil {
		return Findings{}, fmt.Errorf("index what was seen: %w", err)
	}
	doubled, err := r.conn.Exec(ctx, againSQL)
	if err != nil {
		return Findings{}, fmt.Errorf("find messages of the same event: %w", err)
	}
	r.findings.Duplicates = doubled.RowsAffected()
	var seq int64
	rows, _ := r.conn.Query(ctx, unknownSQL)
	if _, err := pgx.ForEachRow(rows, []any{&seq}, func() error {
		if r.findings.UnknownOf++; len(r.findings.Unknown) < MaxUnknown {
			r.findings.Unknown = append(r.findings.Unknown, uint64(seq))
		}
		return nil
	}); err != nil {
		return Findings{}, fmt.Errorf("find messages without a row: %w", err)
	}
	if err := r.conn.QueryRow(ctx, compareSQL, pgx.StrictNamedArgs{"first": int64(first)}).Scan(&r.findings.Unmarked, &r.findings.Missing); err != nil {
		return Findings{}, fmt.Errorf("compare the stream with the rows: %w", err)
	}
	return r.findings, nil
}

// UnknownSeqs calls fn for every message that has no row, in the stream's order, and forgets it.
func (r *Repair) UnknownSeqs(ctx context.Context, fn func(seq uint64) error) error {
	rows, _ := r.conn.Query(ctx, unknownSQL)
	seqs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return fmt.Errorf("find messages without a row: %w", err)
	}
	for _, seq := range seqs {
		if err := fn(uint64(seq)); err != nil {
			return err
		}
	}
	if _, err := r.conn.Exec(ctx, `DELETE FROM repair_seen WHERE seq = ANY(@seqs)`, pgx.StrictNamedArgs{"seqs": seqs}); err != nil {
		return fmt.Errorf("forget %d messages: %w", len(seqs), err)
	}
	rows, _ = r.conn.Query(ctx, `SELECT partition::int, max(seq) FROM repair_seen GROUP BY partition`)
	var partition int
	var seq int64
	r.tails = map[int]uint64{}
	_, err = pgx.ForEachRow(rows, []any{&partition, &seq}, func() error { r.tails[partition] = uint64(seq); return nil })
	return err
}

// Tails returns the last message that was seen of each partition, and is still there.
func (r *Repair) Tails() map[int]uint64 { return maps.Clone(r.tails) }

const (
	// markSeenSQL lets each row say where its message is.
	markSeenSQL = `
UPDATE outbox_messages m SET stream_seq = s.seq, processed_at = coalesce(m.processed_at, now())
  FROM repair_seen s WHERE NOT s.again AND s.id = m.id AND s.event_id = m.event_id AND m.stream_seq IS DISTINCT FROM s.seq`
	// republishSQL makes rows pending whose message is not there.
	republishSQL = `
UPDATE outbox_messages m SET processed_at = NULL, stream_seq = NULL
 WHERE m.stream_seq >= @first AND NOT EXISTS (SELECT FROM repair_seen s WHERE s.id = m.id AND s.event_id = m.event_id)`
	// unarchiveMissingSQL does the same for archived rows.
	unarchiveMissingSQL = `
WITH missing AS (
  DELETE FROM outbox_messages_archive a
   WHERE a.stream_seq >= @first
     AND NOT EXISTS (SELECT FROM repair_seen s WHERE s.id = a.id AND s.event_id = a.event_id)
  RETURNING a.*)
INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at,
       attempts, last_error, trace_id, event_id, inserted_at, released_at)
SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at,
       attempts, last_error, trace_id, event_id, inserted_at, now() FROM missing`
	// moveTailsSQL sets every partition's tail to the last message that was seen of it, and its floor to the bottom: rows of any id may
	// have become pending.
	moveTailsSQL = `
UPDATE outbox_partitions p SET tail_seq = coalesce((SELECT t.tail FROM unnest(@partitions::smallint[], @tails::bigint[]) AS t(partition, tail) WHERE t.partition = p.partition), 0),
       generation = @generation, floor = 0`
	// rebindSQL remembers the stream as it is now.
	rebindSQL = `
INSERT INTO outbox_stream (name, created, generation) VALUES (@name, @created, @generation)
    ON CONFLICT (singleton) DO UPDATE SET name = excluded.name, created = excluded.created, generation = excluded.generation`
)

// Apply marks what is on the stream, makes pending what is missing from it, sets the tails, binds the database to the stream
// with its new generation, and commits.
func (r *Repair) Apply(ctx context.Context, first uint64, s Stream) error {
	partitions, seqs := make([]int16, event.Partitions), make([]int64, event.Partitions)
	for p := range event.Partitions {
		partitions[p], seqs[p] = int16(p), int64(r.tails[p])
	}
	steps := []struct {
		what, sql string
		args      pgx.StrictNamedArgs
	}{
		{"mark what is on the stream", markSeenSQL, nil},
		{"republish what is missing", republishSQL, pgx.StrictNamedArgs{"first": int64(first)}},
		{"republish what is missing and archived", unarchiveMissingSQL, pgx.StrictNamedArgs{"first": int64(first)}},
		{"move the tails", moveTailsSQL, pgx.StrictNamedArgs{"partitions": partitions, "tails": seqs, "generation": s.Generation}},
		{"bind the stream", rebindSQL, pgx.StrictNamedArgs{"name": s.Name, "created": s.Created.UTC().Truncate(time.Microsecond), "generation": s.Generation}},
	}
	err := pgx.BeginFunc(ctx, r.conn, func(tx pgx.Tx) error {
		for _, step := range steps {
			var args []any
			if step.args != nil {
				args = append(args, step.args)
			}
			if _, err := tx.Exec(ctx, step.sql, args...); err != nil {
				return fmt.Errorf("%s: %w", step.what, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("apply repair: %w", err)
	}
	return nil
}
