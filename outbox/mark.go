package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// Published is a row that the stream is known to hold.
type Published struct {
	ID      int64
	EventID string
	Seq     uint64
}

// Mark moves a partition's tail from OldTail to NewTail over the rows that stand between.
type Mark struct {
	Created          time.Time // of the stream
	OldTail, NewTail uint64
	Floor            int64 // raises the stored floor; 0 leaves it
	Rows             []Published
}

// Then returns the mark of both, next following m. Either may be nil.
func (m *Mark) Then(next *Mark) *Mark {
	if m == nil || next == nil {
		return cmp.Or(m, next)
	}
	return &Mark{OldTail: m.OldTail, NewTail: next.NewTail, Rows: append(m.Rows, next.Rows...)}
}

var (
	// ErrMarkFailed reports a mark that found another tail, or not all of its rows pending: another relay has been at work, or the
	// database went back in time. Nothing was recorded. A catch-up finds out which.
	ErrMarkFailed = errors.New("outbox: the mark does not fit the database")
	// ErrRowsMissing reports that the stream holds a message of which this database has no row, by id and event_id, neither pending nor
	// processed nor dead: the database went back in time (a restore, a failover, a crash with synchronous_commit off). Nothing was marked.
	ErrRowsMissing = errors.New("outbox: the stream holds a message that has no row here: this database went back in time; run `tidings repair stream`")
)

// markSQL records publish acks. It is fenced by the tail: a relay that lost the partition finds another tail there. A mark that does not
// find all that it names divides by zero, which takes back the whole round: a batch of statements has no other way to end itself.
// Index: outbox_partitions_pkey, outbox_messages_pkey.   Locks: the partition, the messages named.
const markSQL = `
WITH held AS (
  UPDATE outbox_partitions SET tail_seq = @new_tail, floor_id = greatest(floor_id, @mark_floor)
   WHERE partition = @partition AND tail_seq = @old_tail AND created = @created AND final_seq IS NULL
  RETURNING 1),
marked AS (
  UPDATE outbox_messages m SET processed_at = now(), stream_seq = r.seq, partition = @partition
    FROM unnest(@ids::bigint[], @event_ids::uuid[], @seqs::bigint[]) AS r(id, event_id, seq)
   WHERE m.id = r.id AND m.event_id = r.event_id AND m.processed_at IS NULL AND EXISTS (SELECT FROM held)
  RETURNING 1)
SELECT /* outbox.mark */ pg_current_xact_id()::text::bigint,
       1 / ((SELECT count(*) FROM held) = 1 AND (SELECT count(*) FROM marked) = @count::bigint)::int`

func isMarkFailed(err error) bool {
	const divisionByZero = "22012"
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.Code == divisionByZero
}

func (m *Mark) args(partition int) postgres.Args {
	ids, seqs, eventIDs := make([]int64, len(m.Rows)), make([]int64, len(m.Rows)), make([]pgtype.UUID, len(m.Rows)) // in a form that costs the server less than text
	for i, r := range m.Rows {
		ids[i], seqs[i] = r.ID, int64(r.Seq)
		_ = eventIDs[i].Scan(r.EventID) // what is no UUID becomes NULL, and no row has that
	}
	return postgres.Args{"partition": partition, "created": m.Created, "old_tail": int64(m.OldTail), "new_tail": int64(m.NewTail),
		"mark_floor": m.Floor, "ids": ids, "event_ids": eventIDs, "seqs": seqs, "count": len(m.Rows)}
}

// caughtUpSQL tells of each message that a catch-up has read whether its row is pending, or is processed or dead already.
// Index: outbox_messages_pkey, the primary keys of the archive's ranges, outbox_messages_dlq_event_id_key.   Locks: none.
const caughtUpSQL = `
SELECT /* outbox.caught_up */ r.seq,
       EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.event_id = r.event_id AND m.processed_at IS NULL),
       EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.event_id = r.event_id AND m.processed_at IS NOT NULL)
    OR EXISTS (SELECT FROM outbox_messages_archive a WHERE a.id = r.id AND a.event_id = r.event_id)
    OR EXISTS (SELECT FROM outbox_messages_dlq d WHERE d.event_id = r.event_id)
  FROM unnest(@ids::bigint[], @event_ids::uuid[], @seqs::bigint[]) AS r(id, event_id, seq) ORDER BY r.seq`

// MarkCaughtUp records what a catch-up has read from the stream, in one transaction. Of an event that is on the stream twice the first
// message counts: repeated are the sequences of the others. ErrRowsMissing and ErrMarkFailed record nothing.
func MarkCaughtUp(ctx context.Context, pool *pgxpool.Pool, partition int, m Mark) (repeated []uint64, err error) {
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		repeated = nil
		args := m.args(partition)
		rows, _ := tx.Query(ctx, caughtUpSQL, pgx.StrictNamedArgs{"ids": args["ids"], "event_ids": args["event_ids"], "seqs": args["seqs"]})
		var (
			seq           uint64
			pending, past bool
			known         = make(map[uint64]bool)
			first         = make(map[int64]bool)
			mark          = m
		)
		if _, err := pgx.ForEachRow(rows, []any{&seq, &pending, &past}, func() error {
			if !pending && !past {
				return fmt.Errorf("message %d: %w", seq, ErrRowsMissing)
			}
			known[seq] = pending
			return nil
		}); err != nil {
			return err
		}
		mark.Rows = nil
		for _, r := range m.Rows {
			if known[r.Seq] && !first[r.ID] {
				first[r.ID] = true
				mark.Rows = append(mark.Rows, r)
			} else {
				repeated = append(repeated, r.Seq)
			}
		}
		_, err := tx.Exec(ctx, markSQL, mark.args(partition))
		if isMarkFailed(err) {
			return fmt.Errorf("%w: %w", ErrMarkFailed, err)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("mark %d messages of partition %d that the stream holds: %w", len(m.Rows), partition, err)
	}
	return repeated, nil
}
