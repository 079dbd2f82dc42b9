package outbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
)

// Row is a claimed outbox message: its event and the number of its failed attempts.
type Row struct {
	event.Event
	Attempts int
	Delayed  bool // the row was delayed, and is due now
	Oversize int  // the payload's bytes, if the claim left the payload out because it exceeds Round.MaxMessage; 0 otherwise
}

// Round is one exchange with the database about one partition, in one round trip and one
// transaction. The transaction first marks the rows of the last publish, then claims the next rows.
type Round struct {
	Partition           int
	FirstSlot, LastSlot int
	Mark                *Mark   // nil: nothing to mark. A Mark without rows samples the horizon and stores the floor
	Above               int64   // claim rows above this id while all transactions of Open run
	Open                []Open  // transactions that may still add rows up to Above, lowest first
	InFlight            []int64 // rows of the publish in progress, which the claim skips; ascending except for due rows
	Limit               int     // rows to claim; 0 claims none
	Few                 bool    // few rows are expected: without Open and InFlight, claim 64 at most, in less time
	Due                 bool    // also claim delayed rows that are due
	MaxBytes            int     // payload bytes to claim, approximately
	MaxMessage          int     // payload bytes; the claim leaves a larger payload out (Row.Oversize)
}

// Claimed is the result of a round.
type Claimed struct {
	Tail    uint64 // the stored tail, read after the claim and after the round's own mark
	Closing bool
	Closed  bool
	Rows    []Row    // due rows first, then ascending ids; within an aggregate the earliest row comes first
	Held    []Held   // rows that wait for an earlier row of their aggregate: Park delays them
	More    bool     // a limit ended the claim, so more rows may be pending
	Upto    int64    // each row up to this id that the claim could see is in Rows, in flight, published or delayed
	Running []uint64 // transactions that ran when the round began, ascending. All others below Xmax had ended
	Xmax    uint64
	Sample  Horizon // zero if the round had no mark
}

// Open is a transaction that may still add rows with ids that claims have passed. Once it has
// ended, claims begin above Above.
type Open struct {
	XID   uint64
	Above int64
}

// Held is a row that waits for the row Behind, an earlier one of its aggregate.
type Held struct{ ID, Behind int64 }

// Horizon is a sample of the ids assigned so far. Every transaction that took an id up to LastID
// has a transaction id below XID. The reason: the default of outbox_messages.id gives a writer its
// transaction id before its row's id. So once all transactions below XID have ended, every row up
// to LastID is visible or will never exist (docs/adr/0004-floor.md).
type Horizon struct {
	LastID int64
	XID    uint64
}

const rowColumns = `m.id, m.event_id, m.tenant_id, m.aggregate_type, m.aggregate_id, m.event_type,
       m.event_version::int, CASE WHEN m.payload_bytes <= @max_message THEN m.payload::text ELSE '' END,
       CASE WHEN m.payload_bytes <= @max_message THEN 0 ELSE m.payload_bytes END,
       m.occurred_at, coalesce(m.trace_id, ''), m.attempts::int, m.slot::int`

// beginRoundSQL reads the last assigned id L, before the round takes its transaction id X. L and X
// are a sample of the horizon (docs/adr/0004-floor.md). The statement also reads the running
// transactions, before the claim's snapshot.
//
// It turns synchronous_commit off, so the round's commit does not wait for the disk. If a crash
// undoes a mark, the catch-up marks the rows again from the stream.
//
// Index: none.   Locks: none.
const beginRoundSQL = `
SELECT /* outbox.begin_round */ (` + lastIDSQL +
	`), pg_snapshot_xmax(s)::text::bigint, ARRAY(SELECT x::text::bigint FROM pg_snapshot_xip(s) x),
       current_setting('synchronous_standby_names') <> '', set_config('synchronous_commit', 'off', true), ` + walkSettings + `
  FROM pg_current_snapshot() s`

// walkSettings make the transaction's statements walk the indexes that they were written for, in
// index order. Without them, the planner prefers a scan or a sort of the whole table while that is
// small or its statistics are old.
//
// One generic plan serves all values: it skips the ranges below the floor at run time. A separate
// plan for each floor would cost more than the claim.
const walkSettings = `set_config('enable_seqscan', 'off', true), set_config('enable_sort', 'off', true),
       set_config('enable_bitmapscan', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)`

const walkSQL = `SELECT /* outbox.walk */ ` + walkSettings

// lastIDSQL reads the last assigned id. While is_called is false, last_value is the next id to be
// assigned.
//
// Index: none.   Locks: none.
const lastIDSQL = `SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM outbox_messages_id_seq`

// claimSQL reads pending rows above an id. It takes no lock. The stream decides which relay may
// publish: it checks its last sequence. The lease decides which relay tries. A claimed row is held
// if an earlier row of its aggregate is delayed.
//
// The claim begins above @above. It begins lower if a transaction of @open has ended in the claim's
// own snapshot, because that transaction may have added lower rows (docs/adr/0004-floor.md). No
// claim begins below @lowest: the plan knows this value when it starts, and skips the ranges below.
//
// The claim reads sizes first. So it reads and converts payloads only of rows that fit into the
// round.
//
// Index: outbox_messages_pkey, the same range twice; while any row is delayed,
// outbox_messages_held_idx, one probe per row. Locks: none.
const claimSQL = `
WITH begins AS MATERIALIZED (
  SELECT coalesce(min(above), @above::bigint) AS above
    FROM unnest(@open::bigint[], @open_above::bigint[]) AS o(xid, above)
   WHERE pg_visible_in_snapshot(xid::text::xid8, pg_current_snapshot())),
sizes AS MATERIALIZED (
  SELECT id, CASE WHEN payload_bytes <= @max_message THEN payload_bytes ELSE 0 END AS size FROM outbox_messages
   WHERE id > @lowest::bigint AND id > (SELECT above FROM begins) AND ` + freshSQL + ` ORDER BY id LIMIT @limit)
SELECT /* outbox.claim */ ` + rowColumns + `, ` + behindSQL + `,
       (SELECT sum(size) > @max_bytes FROM sizes)
  FROM outbox_messages m
 WHERE id > @lowest::bigint AND id > (SELECT above FROM begins) AND ` + freshSQL + `
   AND id <= (SELECT CASE WHEN sum(size) <= @max_bytes THEN max(id) ELSE
                (SELECT max(id) FROM (SELECT id, size, sum(size) OVER (ROWS UNBOUNDED PRECEDING) AS upto FROM sizes) u
                  WHERE upto - size <= @max_bytes) END FROM sizes)
 ORDER BY id`

// behindSQL is the last delayed row ahead of m in its aggregate, or 0.
const behindSQL = `CASE WHEN (SELECT EXISTS (SELECT FROM outbox_messages WHERE delayed)) THEN
         coalesce((SELECT d.id FROM outbox_messages d
                    WHERE d.tenant_id = m.tenant_id AND d.aggregate_type = m.aggregate_type AND d.aggregate_id = m.aggregate_id
                      AND d.id < m.id AND d.delayed
                    ORDER BY d.tenant_id DESC, d.aggregate_type DESC, d.aggregate_id DESC, d.id DESC LIMIT 1), 0)
       ELSE 0 END`

// fewSQL is claimSQL for few rows, while no transaction is open and no row in flight. It takes half
// of the time, because it reads no sizes first. Instead it leaves out each payload that takes more
// than its share of the round.
//
// Index: outbox_messages_pkey, one range; while any row is delayed, outbox_messages_held_idx, one
// probe per row. Locks: none.
const fewSQL = `
SELECT /* outbox.claim_few */ ` + rowColumns + `, ` + behindSQL + `, false
  FROM outbox_messages m
 WHERE id > @above::bigint AND ` + pendingSQL + `
 ORDER BY id LIMIT @limit`

// fewRows is the most rows of a claim of few.
const fewRows = 64

// pendingSQL is the condition for pending rows of a partition that are not delayed.
const pendingSQL = `processed_at IS NULL AND NOT delayed AND slot BETWEEN @first AND @last`

// freshSQL is the condition for pending rows that a claim takes.
const freshSQL = pendingSQL + `
   AND (id > @in_flight_to::bigint OR id NOT IN (SELECT unnest(@in_flight::bigint[])))`

// stateSQL reads the partition's stored tail after the claim. A claim misses a row that another
// relay has published and marked. This statement's snapshot is at least as new as the claim's, so
// it then also shows that relay's tail.
//
// Index: outbox_partitions_pkey.   Locks: none.
const stateSQL = `
SELECT /* outbox.state */ tail_seq, closing, final_seq IS NOT NULL FROM outbox_partitions WHERE partition = @partition`

// dueSQL reads the aggregates of delayed rows that are due, and all delayed rows of each aggregate
// in order. The relay may publish the rows before the first one that is not due.
//
// Index: outbox_messages_delayed_idx, outbox_messages_held_idx.   Locks: none.
const dueSQL = `
WITH due AS MATERIALIZED (
  SELECT tenant_id, aggregate_type, aggregate_id FROM outbox_messages
   WHERE delayed AND available_at <= now() AND slot BETWEEN @first AND @last AND id <> ALL(@in_flight::bigint[])
   ORDER BY available_at, id LIMIT @limit),
aggregates AS (SELECT DISTINCT tenant_id, aggregate_type, aggregate_id FROM due)
SELECT /* outbox.due */ ` + rowColumns + `, m.available_at <= now(), m.id = ANY(@in_flight::bigint[])
  FROM aggregates a
 CROSS JOIN LATERAL (
       SELECT * FROM outbox_messages w
        WHERE w.tenant_id = a.tenant_id AND w.aggregate_type = a.aggregate_type AND w.aggregate_id = a.aggregate_id AND w.delayed
        ORDER BY w.tenant_id, w.aggregate_type, w.aggregate_id, w.id LIMIT @limit) m
 LIMIT @limit`

// columns receives one row of rowColumns.
type columns struct {
	Row
	eventID pgtype.UUID        // binary, which costs the server less than text
	payload pgtype.DriverBytes // valid until the next row is read
}

func (c *columns) fields(more ...any) []any {
	return append([]any{&c.OutboxID, &c.eventID, &c.TenantID, &c.AggregateType, &c.AggregateID, &c.Type, &c.Version, &c.payload,
		&c.Oversize, &c.OccurredAt, &c.TraceParent, &c.Attempts, &c.Slot}, more...)
}

func (c *columns) row() Row {
	r := c.Row
	r.ID, r.Payload = c.eventID.String(), append(json.RawMessage(nil), c.payload...)
	return r
}

// Exchange carries out a round. ErrMarkFailed reports that the mark did not match the database,
// which then recorded nothing. After any other error the outcome is unknown. After each error the
// caller must catch up.
//
// If the server waits for synchronous standbys, Exchange returns when the claimed rows are on them.
// The primary may show rows earlier: after a crash, or if somebody canceled the wait of their
// COMMIT. A failover would take them back, but not their messages. The wait is on the connection of
// the claim, because another one may lead to another primary.
//
// Cost: one round trip, an update per marked row, one index range scan. With standbys, a claim of
// rows costs another round trip and their confirmation.
func Exchange(ctx context.Context, pool *pgxpool.Pool, r Round) (Claimed, error) {
	var (
		c        = Claimed{Upto: math.MaxInt64}
		b        pgx.Batch
		take     = taking{c: &c, r: &r, before: make(map[Aggregate]int64)}
		standbys bool
	)
	claim, due := r.args()
	if r.Few && len(r.Open) == 0 && len(r.InFlight) == 0 {
		take.few = min(r.Limit, fewRows)
	}
	b.Queue(beginRoundSQL).QueryRow(func(row pgx.Row) error {
		return row.Scan(&c.Sample.LastID, &c.Xmax, &c.Running, &standbys, nil, nil, nil, nil, nil)
	})
	if r.Mark != nil {
		b.Queue(markSQL, r.Mark.args(r.Partition)).QueryRow(func(row pgx.Row) error { return row.Scan(&c.Sample.XID, nil) })
	}
	if r.Due {
		b.Queue(dueSQL, due).Query(take.dueRows)
	}
	switch {
	case take.few > 0:
		b.Queue(fewSQL, postgres.Args{"above": r.Above, "first": r.FirstSlot, "last": r.LastSlot, "limit": take.few,
			"max_message": r.MaxBytes / fewRows}).Query(take.freshRows)
	case r.Limit > 0:
		b.Queue(claimSQL, claim).Query(take.freshRows)
	}
	b.Queue(stateSQL, postgres.Args{"partition": r.Partition}).QueryRow(func(row pgx.Row) error {
		return row.Scan(&c.Tail, &c.Closing, &c.Closed)
	})
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return Claimed{}, fmt.Errorf("exchange with partition %d: %w", r.Partition, err)
	}
	defer conn.Release()
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		if isMarkFailed(err) {
			err = fmt.Errorf("%w: %w", ErrMarkFailed, err)
		}
		return Claimed{}, fmt.Errorf("exchange with partition %d: %w", r.Partition, err)
	}
	if c.Sample.XID == 0 {
		c.Sample = Horizon{}
	}
	take.fill()
	if standbys && (len(c.Rows) > 0 || c.Closing) {
		if err := postgres.AwaitDurable(ctx, conn.Conn()); err != nil {
			return Claimed{}, fmt.Errorf("exchange with partition %d: %w", r.Partition, err)
		}
	}
	return c, nil
}

// args returns the arguments of claimSQL and of dueSQL.
func (r *Round) args() (claim, due postgres.Args) {
	inFlight, to := append([]int64{}, r.InFlight...), int64(0) // an empty array, not NULL: id NOT IN (NULL) is never true
	if len(inFlight) > 0 {
		to = slices.Max(inFlight)
	}
	open, above, lowest := make([]int64, len(r.Open)), make([]int64, len(r.Open)), r.Above
	for i, o := range r.Open {
		open[i], above[i], lowest = int64(o.XID), o.Above, min(lowest, o.Above)
	}
	due = postgres.Args{"first": r.FirstSlot, "last": r.LastSlot, "in_flight": inFlight, "limit": r.Limit, "max_message": r.MaxMessage}
	claim = postgres.Args{"above": r.Above, "open": open, "open_above": above, "lowest": lowest, "in_flight_to": to,
		"max_bytes": r.MaxBytes}
	maps.Copy(claim, due)
	return claim, due
}

// Aggregate is the unit within which events keep their order.
type Aggregate struct {
	TenantID int64
	Type     string
	ID       event.ID
}

// Aggregate returns the row's aggregate.
func (r *Row) Aggregate() Aggregate { return Aggregate{r.TenantID, r.AggregateType, r.AggregateID} }

// taking collects a round's rows into a Claimed, within the round's limits.
type taking struct {
	c      *Claimed
	r      *Round
	few    int                 // the limit of a claim of few rows; 0 for another claim
	due    []Row               // publishable, unless fresh has an earlier row of the aggregate or such a row was not read
	fresh  []Row               // publishable
	before map[Aggregate]int64 // for each aggregate in due, the first pending row that was read; 0 if none
	last   int64               // the highest id of a pending row that was read
	cut    bool                // a limit ended the read: more rows are pending
}

// Leave records that a pending row remains unclaimed.
func (c *Claimed) Leave(id int64) { c.Upto = min(c.Upto, id-1) }

// dueRows keeps the due rows of each aggregate up to its first row that is not due or is in flight.
// The later due rows of the aggregate are held behind that row.
func (t *taking) dueRows(rows pgx.Rows) error {
	var (
		row      columns
		due, out bool
		read     int
		blocked  = make(map[Aggregate]int64)
	)
	_, err := pgx.ForEachRow(rows, row.fields(&due, &out), func() error {
		read++
		row.Delayed = true
		key := row.Aggregate()
		behind, is := blocked[key]
		switch {
		case is && due:
			t.c.Held = append(t.c.Held, Held{row.OutboxID, behind})
		case is:
		case out || !due:
			blocked[key] = row.OutboxID
		default:
			t.due = append(t.due, row.row())
			t.before[key] = 0
		}
		return nil
	})
	t.c.More = t.c.More || read == t.r.Limit
	return err
}

// freshRows keeps the pending rows, which come in the order of their ids.
func (t *taking) freshRows(rows pgx.Rows) error {
	var (
		c      = t.c
		row    columns
		behind int64
		full   bool
		left   bool
		read   int
	)
	_, err := pgx.ForEachRow(rows, row.fields(&behind, &full), func() error {
		if row.OutboxID <= t.last {
			return errors.New("the rows came out of order")
		}
		if left { // a claim of few left a payload out
			return nil
		}
		t.last = row.OutboxID
		if left = t.few > 0 && row.Oversize > 0; left {
			c.Leave(row.OutboxID)
			return nil
		}
		read++
		key := row.Aggregate()
		if first, is := t.before[key]; is && first == 0 {
			t.before[key] = row.OutboxID
		}
		if behind != 0 {
			c.Held = append(c.Held, Held{row.OutboxID, behind})
			c.Leave(row.OutboxID)
		} else {
			t.fresh = append(t.fresh, row.row())
		}
		return nil
	})
	if t.cut = read == cmp.Or(t.few, t.r.Limit) || full || left; t.cut {
		c.Leave(t.last + 1)
	}
	c.More = c.More || t.cut
	return err
}

// fill chooses the rows of the claim: first the due rows that are the earliest of their aggregate,
// then the fresh rows. It stops at the first row that does not fit, because a later row would break
// the order. A due row waits while an earlier row of its aggregate may be pending.
func (t *taking) fill() {
	t.due = slices.DeleteFunc(t.due, func(r Row) bool {
		before := t.before[r.Aggregate()]
		return before != 0 && before < r.OutboxID || t.cut && r.OutboxID > t.last
	})
	all := t.fresh
	if len(t.due) > 0 {
		all = append(t.due, t.fresh...)
	}
	n, bytes := 0, 0
	for n < len(all) && n < t.r.Limit && (bytes == 0 || bytes+len(all[n].Payload) <= t.r.MaxBytes) {
		bytes += len(all[n].Payload)
		n++
	}
	t.c.Rows, t.c.More = all[:n], t.c.More || n < len(all)
	for _, r := range all[n:] {
		if !r.Delayed {
			t.c.Leave(r.OutboxID)
		}
	}
}

// parkSQL delays held rows until the row ahead of them is due, so that claims skip them. It records
// that row in behind.
//
// Index: outbox_messages_pkey.   Locks: the rows.
const parkSQL = `
UPDATE /* outbox.park */ outbox_messages m SET available_at = d.available_at, behind = d.id
  FROM unnest(@ids::bigint[], @behind::bigint[]) AS p(id, behind)
  JOIN outbox_messages d ON d.id = p.behind AND d.delayed
 WHERE m.id = p.id AND m.processed_at IS NULL AND d.available_at > m.available_at AND d.available_at > now()`

// Park delays the held rows of a claim until the row ahead of each is due.
func Park(ctx context.Context, pool *pgxpool.Pool, held []Held) error {
	ids, behind := make([]int64, len(held)), make([]int64, len(held))
	for i, h := range held {
		ids[i], behind[i] = h.ID, h.Behind
	}
	if _, err := pool.Exec(ctx, parkSQL, pgx.StrictNamedArgs{"ids": ids, "behind": behind}); err != nil {
		return fmt.Errorf("park %d held rows: %w", len(ids), err)
	}
	return nil
}

// unparkSQL makes a parked row due once the row ahead of it is no longer delayed, or is due
// earlier. That row was published, moved to the DLQ, discarded or repaired.
//
// Index: outbox_messages_delayed_id_idx, all delayed rows.   Locks: the rows.
const unparkSQL = `
UPDATE /* outbox.unpark */ outbox_messages m
   SET available_at = greatest(clock_timestamp(), m.inserted_at + interval '1 microsecond'), behind = NULL
 WHERE m.delayed AND m.behind IS NOT NULL AND m.available_at > now()
   AND NOT EXISTS (SELECT FROM outbox_messages d WHERE d.id = m.behind AND d.delayed AND d.available_at >= m.available_at)`

// Unpark makes parked rows due that no longer wait for another row, and returns their number. It
// reads every delayed row.
func Unpark(ctx context.Context, pool *pgxpool.Pool) (int64, error) {
	tag, err := pool.Exec(ctx, unparkSQL)
	if err != nil {
		return 0, fmt.Errorf("free parked rows: %w", err)
	}
	return tag.RowsAffected(), nil
}

// Failure is a row that cannot be published in its current form.
type Failure struct {
	Row   Row
	Error string
}

// MaxAttempts is how often a row may fail before the next failure moves it to the DLQ (the spec's
// "attempts > 10").
const MaxAttempts = 10

// retriesSQL counts the retries of message m from the DLQ. Index: outbox_dlq_actions_event_idx.
const retriesSQL = `(SELECT count(*) FROM outbox_dlq_actions a WHERE a.event_id = m.event_id AND a.action = 'retry')`

// failSQL counts a failure of each row and delays it by 30 s per attempt, at most 4 minutes. A row
// past @max attempts moves to the DLQ. The statement compares attempts, so two relays at once count
// one failure.
//
// Index: outbox_messages_pkey.   Locks: the rows.
const failSQL = `
WITH failed AS (
  SELECT * FROM unnest(@ids::bigint[], @event_ids::uuid[], @attempts::smallint[], @errors::text[], @causes::text[])
    AS f(id, event_id, attempts, error, cause)),
dead AS (
  DELETE FROM outbox_messages m USING failed f
   WHERE m.id = f.id AND m.event_id = f.event_id AND m.attempts = f.attempts AND m.processed_at IS NULL AND m.attempts >= @max::int
  RETURNING m.*, f.error, f.cause),
moved AS (
  INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
         available_at, attempts, last_error, trace_id, event_id, inserted_at, slot, cause, retries)
  SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
         available_at, attempts + 1, error, trace_id, event_id, inserted_at, slot, cause, ` + retriesSQL + ` FROM dead m
  RETURNING 1),
put_off AS (
  UPDATE outbox_messages m SET attempts = m.attempts + 1, last_error = f.error,
         available_at = now() + LEAST(m.attempts + 1, 8) * interval '30 seconds'
    FROM failed f
   WHERE m.id = f.id AND m.event_id = f.event_id AND m.attempts = f.attempts AND m.processed_at IS NULL AND m.attempts < @max::int
  RETURNING 1)
SELECT /* outbox.fail */ (SELECT count(*) FROM put_off)::int, (SELECT count(*) FROM moved)::int`

// Fail counts a failure of each row. It delays the row, or moves it to the DLQ past MaxAttempts,
// and returns the number of rows of each outcome.
func Fail(ctx context.Context, pool *pgxpool.Pool, failures []Failure) (putOff, dead int, err error) {
	n := len(failures)
	ids, eventIDs, attempts, texts, causes := make([]int64, n), make([]string, n), make([]int16, n), make([]string, n), make([]string, n)
	for i, f := range failures {
		ids[i], eventIDs[i], attempts[i] = f.Row.OutboxID, f.Row.ID, int16(f.Row.Attempts)
		texts[i], causes[i] = f.Error, deadletter.Cause(f.Error)
	}
	err = pool.QueryRow(ctx, failSQL, pgx.StrictNamedArgs{
		"ids": ids, "event_ids": eventIDs, "attempts": attempts, "errors": texts, "causes": causes, "max": MaxAttempts,
	}).Scan(&putOff, &dead)
	if err != nil {
		return 0, 0, fmt.Errorf("count the failures of %d rows: %w", n, err)
	}
	return putOff, dead, nil
}
