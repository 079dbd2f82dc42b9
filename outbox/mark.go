package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// Published is a row that the stream is known to hold.
type Published struct {
	ID      int64
	EventID string
	Seq     uint64
}

// Mark moves one partition's tail from OldTail to NewTail over the rows that stand between.
type Mark struct {
	Partition        int
	OldTail, NewTail uint64
	Rows             []Published
}

// Marked is what MarkPublished recorded.
type Marked struct {
	Held       []int // partitions whose tail was where the mark said
	Duplicates int   // rows that an earlier message is known of: they keep its sequence
}

// ErrRowsMissing reports that the stream holds a message of which this database has no row, neither in the outbox nor in its archive or DLQ, by
// id and event_id: the stream is
// ahead of the database, which went back in time (a restore, a failover, a crash with synchronous_commit off). Nothing was marked.
var ErrRowsMissing = errors.New("outbox: the stream holds a message that has no row here: this database went back in time; run `tidings repair stream`")

// markSQL records publish acks. It is fenced by the tail: a relay that lost the partition finds another tail there and marks nothing.
// Index: outbox_partitions_pkey, outbox_messages_pkey.   Locks: the partition rows, the messages named.
const markSQL = `
WITH held AS (
  UPDATE outbox_partitions p SET tail_seq = t.new_tail
    FROM unnest(@partitions::smallint[], @old_tails::bigint[], @new_tails::bigint[]) AS t(partition, old_tail, new_tail)
   WHERE p.partition = t.partition AND p.tail_seq = t.old_tail AND p.generation = @generation
  RETURNING p.partition),
marked AS (
  UPDATE outbox_messages m SET processed_at = coalesce(m.processed_at, now()), stream_seq = coalesce(m.stream_seq, r.seq)
    FROM unnest(@ids::bigint[], @event_ids::uuid[], @row_partitions::smallint[], @seqs::bigint[]) AS r(id, event_id, partition, seq)
   WHERE m.id = r.id AND m.event_id = r.event_id AND r.partition IN (SELECT partition FROM held)
  RETURNING r.partition, m.stream_seq <> r.seq AS again)
SELECT /* outbox.mark */ h.partition::int, (SELECT count(*) FROM marked k WHERE k.partition = h.partition)::int,
       (SELECT count(*) FROM marked k WHERE k.partition = h.partition AND k.again)::int FROM held h`

// elsewhereSQL counts events that are not in the outbox any more: archived after an earlier message, or in the DLQ. It comes after markSQL in its
// transaction, so that a row which is moved meanwhile is found by one of them.
// Index: outbox_messages_archive_id_idx, outbox_messages_dlq_pkey.   Locks: none.
const elsewhereSQL = `
SELECT /* outbox.elsewhere */ count(*)
  FROM unnest(@ids::bigint[], @event_ids::uuid[], @row_partitions::smallint[]) AS r(id, event_id, partition)
 WHERE r.partition = @partition AND NOT EXISTS (SELECT FROM outbox_messages m WHERE m.id = r.id AND m.event_id = r.event_id)
   AND (EXISTS (SELECT FROM outbox_messages_archive a WHERE a.id = r.id AND a.event_id = r.event_id)
     OR EXISTS (SELECT FROM outbox_messages_dlq d WHERE d.id = r.id AND d.event_id = r.event_id))`

// MarkPublished records the marks in one transaction and says of which partitions the tail was where the mark said; of the others nothing
// is recorded: somebody else moved the tail, and the caller catches up. Of an event that is named twice, or was marked before, the first
// message counts. ErrRowsMissing records nothing at all. After any other error the outcome is unknown.
func MarkPublished(ctx context.Context, pool *pgxpool.Pool, generation int64, marks []Mark) (Marked, error) {
	var (
		partitions, rowPartitions []int16
		oldTails, newTails        []int64
		ids, seqs                 []int64
		eventIDs                  []string
	)
	slices.SortFunc(marks, func(a, b Mark) int { return a.Partition - b.Partition })
	want, twice := make(map[int]int, len(marks)), make(map[int]int)
	type key struct {
		id      int64
		eventID string
	}
	seen := make(map[key]bool)
	for _, m := range marks {
		partitions = append(partitions, int16(m.Partition))
		oldTails, newTails = append(oldTails, int64(m.OldTail)), append(newTails, int64(m.NewTail))
		for _, r := range m.Rows {
			if k := (key{r.ID, r.EventID}); seen[k] {
				twice[m.Partition]++
				continue
			}
			seen[key{r.ID, r.EventID}] = true
			want[m.Partition]++
			ids, seqs, eventIDs = append(ids, r.ID), append(seqs, int64(r.Seq)), append(eventIDs, r.EventID)
			rowPartitions = append(rowPartitions, int16(m.Partition))
		}
	}
	var done Marked
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		done = Marked{}
		short := make(map[int]int)
		var partition, marked, again int
		rows, _ := tx.Query(ctx, markSQL, pgx.StrictNamedArgs{
			"partitions": partitions, "old_tails": oldTails, "new_tails": newTails, "generation": generation,
			"ids": ids, "event_ids": eventIDs, "row_partitions": rowPartitions, "seqs": seqs,
		})
		_, err := pgx.ForEachRow(rows, []any{&partition, &marked, &again}, func() error {
			done.Held = append(done.Held, partition)
			done.Duplicates += again + twice[partition]
			if marked != want[partition] {
				short[partition] = want[partition] - marked
			}
			return nil
		})
		if err != nil {
			return err
		}
		for partition, missing := range short {
			var elsewhere int
			if err := tx.QueryRow(ctx, elsewhereSQL, pgx.StrictNamedArgs{
				"ids": ids, "event_ids": eventIDs, "row_partitions": rowPartitions, "partition": partition,
			}).Scan(&elsewhere); err != nil {
				return err
			}
			if elsewhere != missing {
				return fmt.Errorf("partition %d: %d of %d rows found: %w", partition, want[partition]-missing+elsewhere, want[partition], ErrRowsMissing)
			}
			done.Duplicates += elsewhere
		}
		return nil
	})
	if err != nil {
		return Marked{}, fmt.Errorf("mark %d rows of %d partitions published: %w", len(ids), len(marks), err)
	}
	return done, nil
}

// tailSQL reads what the marks of one partition cover, and of which life of the stream.
const tailSQL = `SELECT tail_seq, generation FROM outbox_partitions WHERE partition = @partition`

// Tail returns the last stream sequence that the partition's marks cover, and the stream's generation that it belongs to.
func Tail(ctx context.Context, pool *pgxpool.Pool, partition int) (tail uint64, generation int64, err error) {
	var seq int64
	if err := pool.QueryRow(ctx, tailSQL, pgx.StrictNamedArgs{"partition": partition}).Scan(&seq, &generation); err != nil {
		return 0, 0, fmt.Errorf("read the tail of partition %d: %w", partition, err)
	}
	return uint64(seq), generation, nil
}

// Stream is the stream as this database knows it.
type Stream struct {
	Name       string
	Created    time.Time // to the microsecond
	Generation int64
}

// streamSQL reads the bound stream and the tails.
const streamSQL = `
SELECT s.name, s.created, s.generation, ARRAY(SELECT tail_seq FROM outbox_partitions ORDER BY partition)
  FROM outbox_stream s`

// BoundStream returns the stream that this database's events are on, and the tail of each partition. ok is false, and there are no
// tails, when it has met no stream yet.
func BoundStream(ctx context.Context, pool *pgxpool.Pool) (s Stream, tails []uint64, ok bool, err error) {
	err = pool.QueryRow(ctx, streamSQL).Scan(&s.Name, &s.Created, &s.Generation, &tails)
	if errors.Is(err, pgx.ErrNoRows) {
		return Stream{}, nil, false, nil
	}
	if err != nil {
		return Stream{}, nil, false, fmt.Errorf("read the bound stream: %w", err)
	}
	return s, tails, true, nil
}

// bindSQL remembers the stream, once.
const bindSQL = `
INSERT INTO outbox_stream (name, created, generation) VALUES (@name, @created, @generation) ON CONFLICT DO NOTHING`

// Bind remembers the stream that this database's events are on. The first caller wins; read it back with BoundStream.
func Bind(ctx context.Context, pool *pgxpool.Pool, s Stream) error {
	_, err := pool.Exec(ctx, bindSQL, pgx.StrictNamedArgs{"name": s.Name, "created": s.Created, "generation": s.Generation})
	if err != nil {
		return fmt.Errorf("bind stream %s: %w", s.Name, err)
	}
	return nil
}
