package consumers

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
)

// notPastSQL finds the consumers that have not applied everything up to given sequences. A consumer
// with any offset has one for every stream, or will create it and read from the beginning. A closed
// stream is never read again. Index: consumer_offsets_pkey, all of it. Locks: none.
const notPastSQL = `
SELECT /* consumers.not_past */ c.consumer_name, count(*)::int
  FROM (SELECT DISTINCT consumer_name FROM consumer_offsets) c
 CROSS JOIN unnest(@keys::text[], @seqs::bigint[], @createds::timestamptz[]) AS t(partition_key, seq, created)
  LEFT JOIN consumer_offsets o ON o.consumer_name = c.consumer_name AND o.partition_key = t.partition_key
 WHERE o.last_processed_id IS NULL OR NOT o.closed AND (o.last_processed_id < t.seq OR coalesce(o.stream_created, t.created) <> t.created)
 GROUP BY c.consumer_name`

// NotYetApplied returns the consumers with offsets that have not applied everything up to these
// sequences, with the number of streams on which they are behind. A consumer that is not behind
// stays so, because no crash of the database takes these offsets back. created is when each stream
// was created, to the microsecond: a sequence means nothing on another stream of the same name.
func NotYetApplied(ctx context.Context, pool *pgxpool.Pool, seqs map[string]uint64, created map[string]time.Time) (map[string]int, error) {
	var keys []string
	var at []int64
	var createds []time.Time
	for stream, seq := range seqs {
		keys, at, createds = append(keys, stream), append(at, int64(seq)), append(createds, created[stream])
	}
	behind := make(map[string]int)
	var name string
	var n int
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, notPastSQL, pgx.StrictNamedArgs{"keys": keys, "seqs": at, "createds": createds})
		if _, err := pgx.ForEachRow(rows, []any{&name, &n}, func() error {
			behind[name] = n
			return nil
		}); err != nil {
			return err
		}
		return postgres.Durable(ctx, tx)
	}); err != nil {
		return nil, fmt.Errorf("compare the offsets of consumers on %d streams: %w", len(keys), err)
	}
	return behind, nil
}

// sweepDeadLettersSQL reads the next dead letters of an aggregate type, or of all types for "",
// with payload and headers. Index: consumer_dead_letters_pkey, one range. Locks: none.
const sweepDeadLettersSQL = `
SELECT /* consumers.sweep_dead_letters */ id, consumer_name, partition_key, aggregate_type, payload, headers
  FROM consumer_dead_letters
 WHERE tenant_id = @tenant AND (@type = '' OR aggregate_type = @type) AND id > @after ORDER BY id LIMIT @limit`

// redactDeadLetterSQL removes content from a dead letter if that still exists, and the error, which
// may quote it. Index: consumer_dead_letters_pkey. Locks: the dead letter; its partition's offset
// is locked.
const redactDeadLetterSQL = `
UPDATE /* consumers.redact_dead_letter */ consumer_dead_letters SET payload = @payload, headers = @headers,
       error = CASE WHEN @content THEN @erased ELSE error END, cause = CASE WHEN @content THEN @erased ELSE cause END WHERE id = @id`

// The errors of failed retries, which may quote what is erased.
// Index: consumer_dead_letter_actions_tenant_event_idx, the tenant's. Locks: the rows.
const (
	erroneous = ` consumer_dead_letter_actions
 WHERE tenant_id = @tenant AND aggregate_type = @type AND aggregate_id = ANY(@ids::text[]) AND error NOT IN ('', @erased)`
	countErrorsSQL = `SELECT /* consumers.count_errors */ count(*) FROM` + erroneous
	blankErrorsSQL = `
WITH blanked AS (UPDATE consumer_dead_letter_actions SET error = @erased WHERE id IN (SELECT id FROM` + erroneous + `) RETURNING 1)
SELECT /* consumers.blank_errors */ count(*) FROM blanked`
)

// erasedError replaces an error that may quote what was erased.
const erasedError = "erased with the content"

// BlankErrors blanks the errors of failed retries of a tenant's dead letters about aggregates, and
// returns their number. With dryRun it only counts them. The rest of the audit does not change.
func BlankErrors(ctx context.Context, pool *pgxpool.Pool, tenant int64, aggregateType string, ids []event.ID,
	dryRun bool) (n int64, err error) {
	sql := blankErrorsSQL
	if dryRun {
		sql = countErrorsSQL
	}
	err = pool.QueryRow(ctx, sql, pgx.StrictNamedArgs{"tenant": tenant, "type": aggregateType, "ids": ids, "erased": erasedError}).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("blank the errors of retries about %d objects of %s: %w", len(ids), aggregateType, err)
	}
	return n, nil
}

type heldLetter struct {
	ID                  int64
	Consumer, Partition string
	AggregateType       string
	Payload             []byte
	Headers             map[string][]string
}

// RedactedLetter is what a dead letter becomes.
type RedactedLetter struct {
	Payload []byte
	Headers map[string][]string
	Content bool // the payload lost content, which the error may quote
}

// RedactDeadLetters calls redact with the payload and headers of each of the tenant's dead letters.
// Where redact returns a letter, it replaces both, and the error too if content was removed. The
// letters keep their places, and a retry applies their new content. Each change first locks the
// partition's offset, so that no retry is running that has read the old content. With dryRun,
// RedactDeadLetters changes nothing. It returns the number of letters that it changed, or would
// change.
func RedactDeadLetters(ctx context.Context, pool *pgxpool.Pool, tenant int64, dryRun bool,
	redact func(aggregateType string, payload []byte, headers map[string][]string) (*RedactedLetter, error)) (n int, err error) {
	var now *RedactedLetter
	return sweepDeadLetters(ctx, pool, tenant, "", dryRun, func(l *heldLetter) (is bool, err error) {
		now, err = redact(l.AggregateType, l.Payload, l.Headers)
		return now != nil, err
	}, func(tx pgx.Tx, l *heldLetter) error {
		_, err := tx.Exec(ctx, redactDeadLetterSQL, pgx.StrictNamedArgs{"id": l.ID, "payload": now.Payload, "headers": now.Headers,
			"content": now.Content, "erased": erasedError})
		return err
	})
}

// DropDeadLetters discards each dead letter of the tenant's aggregate type whose payload is doomed,
// at any place in its aggregate. The caller makes sure that the others are right without it. It
// records actor and reason, and locks like RedactDeadLetters. With dryRun it changes nothing. It
// returns the number of letters that it discarded, or would discard.
func DropDeadLetters(ctx context.Context, pool *pgxpool.Pool, tenant int64, aggregateType string, dryRun bool, actor, reason string,
	doomed func(payload []byte) bool) (n int, err error) {
	return sweepDeadLetters(ctx, pool, tenant, aggregateType, dryRun, func(l *heldLetter) (bool, error) { return doomed(l.Payload), nil },
		func(tx pgx.Tx, l *heldLetter) error {
			return remove(ctx, tx, deadletter.Discard, DeadLetterRequest{Actor: actor, Reason: reason}, []int64{l.ID})
		})
}

// sweepDeadLetters calls change for each dead letter that wanted selects, under the lock of its
// partition's offset.
func sweepDeadLetters(ctx context.Context, pool *pgxpool.Pool, tenant int64, aggregateType string, dryRun bool,
	wanted func(*heldLetter) (bool, error), change func(pgx.Tx, *heldLetter) error) (n int, err error) {
	const page = 100
	for after, full := int64(0), true; full; {
		rows, _ := pool.Query(ctx, sweepDeadLettersSQL, pgx.StrictNamedArgs{"tenant": tenant, "type": aggregateType,
			"after": after, "limit": page})
		letters, err := pgx.CollectRows(rows, pgx.RowToStructByPos[heldLetter])
		if err != nil {
			return n, fmt.Errorf("sweep the dead letters after %d: %w", after, err)
		}
		full = len(letters) == page
		for _, l := range letters {
			after = l.ID
			is, err := wanted(&l)
			if err != nil {
				return n, fmt.Errorf("dead letter %d: %w", l.ID, err)
			}
			if !is {
				continue
			}
			n++
			if dryRun {
				continue
			}
			err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
				if err := lockOffset(ctx, tx, l.Consumer, l.Partition); err != nil {
					return err
				}
				return change(tx, &l)
			})
			if err != nil {
				return n, fmt.Errorf("erase from dead letter %d: %w", l.ID, err)
			}
		}
	}
	return n, nil
}
