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

// Published is a row whose message is on the stream.
type Published struct {
	ID      int64
	EventID string
	Seq     uint64
}

// Mark moves a partition's tail from OldTail to NewTail and records the publish of the rows in
// between.
type Mark struct {
	Created          time.Time // when the stream was created
	OldTail, NewTail uint64
	Floor            int64 // raises the stored floor to this id; 0 leaves it
	Rows             []Published
	Recorded         func() // MarkCaughtUp calls it before its COMMIT; may be nil
}

// Then combines m with next, the mark that follows it. Either may be nil.
func (m *Mark) Then(next *Mark) *Mark {
	if m == nil || next == nil {
		return cmp.Or(m, next)
	}
	return &Mark{OldTail: m.OldTail, NewTail: next.NewTail, Rows: append(m.Rows, next.Rows...)}
}

var (
	// ErrMarkFailed reports that a mark found another tail, or that not all of its rows were
	// pending. Another relay was at work, or the database went back in time. The mark recorded
	// nothing. A catch-up finds the cause.
	ErrMarkFailed = errors.New("outbox: the mark does not match the database")
	// ErrRowsMissing reports a message on the stream without a row in this database: no table has
	// its id and event_id. The database went back in time: a restore, a failover or a crash with
	// synchronous_commit off. The mark recorded nothing.
	ErrRowsMissing = errors.New("outbox: the stream holds a message that has no row here: this database went back in time; run " +
		"`tidings restore`")
)

// markSQL records publish acks and moves the tail. The old tail and the stream's creation time
// fence it: a relay that lost the partition finds another tail and changes nothing.
//
// A mark that does not find all its rows pending raises codeMarkFailed, which rolls back the whole
// round.
//
// Index: outbox_partitions_pkey, outbox_messages_pkey.   Locks: the partition, the messages named.
const markSQL = `
WITH held AS (
  UPDATE outbox_partitions SET tail_seq = @new_tail, floor_id = greatest(floor_id, @mark_floor), trouble = NULL, refused = NULL,
         trouble_at = NULL
   WHERE partition = @partition AND tail_seq = @old_tail AND created = @created AND final_seq IS NULL
  RETURNING 1),
marked AS (
  UPDATE outbox_messages m SET processed_at = now(), stream_seq = r.seq, partition = @partition
    FROM unnest(@ids::bigint[], @event_ids::uuid[], @seqs::bigint[]) AS r(id, event_id, seq)
   WHERE m.id = r.id AND m.event_id = r.event_id AND m.processed_at IS NULL AND EXISTS (SELECT FROM held)
  RETURNING 1)
SELECT /* outbox.mark */ pg_current_xact_id()::text::bigint,
       require_mark((SELECT count(*) FROM held) = 1 AND (SELECT count(*) FROM marked) = @count::bigint)`

// codeMarkFailed is the SQLSTATE of require_mark.
const codeMarkFailed = "TD001"

func isMarkFailed(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.Code == codeMarkFailed
}

func (m *Mark) args(partition int) postgres.Args {
	// binary, which costs the server less than text
	ids, seqs, eventIDs := make([]int64, len(m.Rows)), make([]int64, len(m.Rows)), make([]pgtype.UUID, len(m.Rows))
	for i, r := range m.Rows {
		ids[i], seqs[i] = r.ID, int64(r.Seq)
		_ = eventIDs[i].Scan(r.EventID) // an invalid UUID becomes NULL, which matches no row
	}
	return postgres.Args{"partition": partition, "created": m.Created, "old_tail": int64(m.OldTail), "new_tail": int64(m.NewTail),
		"mark_floor": m.Floor, "ids": ids, "event_ids": eventIDs, "seqs": seqs, "count": len(m.Rows)}
}

// caughtUpSQL finds for each message that a catch-up read whether its row is pending, or is already
// processed, dead, or retried or discarded from the DLQ. A relay that froze before its publish can
// publish such a message late.
//
// Index: outbox_messages_pkey, the primary keys of the archive's ranges,
// outbox_messages_dlq_event_id_key, outbox_dlq_actions_event_idx. Locks: none.
const caughtUpSQL = `
SELECT /* outbox.caught_up */ r.seq,
       EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.event_id = r.event_id AND m.processed_at IS NULL),
       EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.event_id = r.event_id AND m.processed_at IS NOT NULL)
    OR EXISTS (SELECT FROM outbox_messages_archive a WHERE a.id = r.id AND a.event_id = r.event_id)
    OR EXISTS (SELECT FROM outbox_messages_dlq d WHERE d.event_id = r.event_id)
    OR EXISTS (SELECT FROM outbox_dlq_actions l WHERE l.event_id = r.event_id)
  FROM unnest(@ids::bigint[], @event_ids::uuid[], @seqs::bigint[]) AS r(id, event_id, seq) ORDER BY r.seq`

// MarkCaughtUp marks in one transaction the rows of messages that a catch-up read from the stream.
// If an event is on the stream twice, the first message counts, and repeated has the sequences of
// the others. A message whose row was marked before is also in repeated. ErrRowsMissing and
// ErrMarkFailed mean that nothing was recorded.
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
		if err == nil && m.Recorded != nil {
			m.Recorded()
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("mark %d messages of partition %d that the stream holds: %w", len(m.Rows), partition, err)
	}
	return repeated, nil
}
