package outbox

import (
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

// Row is a claimed outbox message: its event, and how often it has failed.
type Row struct {
	event.Event
	Attempts int
	Delayed  bool // it had to wait, and has fallen due
	Oversize int  // bytes of a payload that was left out because it exceeds Round.MaxMessage; 0 otherwise
}

// Round is one exchange with the database about one partition, in one round trip and one transaction: what the last publish did is
// marked, and then the next rows are claimed.
type Round struct {
	Partition           int
	FirstSlot, LastSlot int
	Mark                *Mark   // nil: nothing to mark. One without rows samples the horizon and stores the floor
	Above               int64   // claim behind this id, as long as all of Open run
	Open                []Open  // transactions that may still add rows up to Above, the lowest first
	InFlight            []int64 // rows that are being published and are not to be claimed again, ascending but for due ones
	Limit               int     // rows to claim; 0 claims none
	Due                 bool    // look for waiting rows that have fallen due as well
	MaxBytes            int     // payload bytes to claim, about
	MaxMessage          int     // a payload that takes more is left out (Row.Oversize)
}

// Claimed is what a round found.
type Claimed struct {
	Tail    uint64 // as stored, in the claim's snapshot, with the round's own mark
	Closing bool
	Closed  bool
	Rows    []Row    // due rows first, then in the order of ids; of each aggregate the earliest first
	Held    []Held   // rows that wait for an earlier one of their aggregate: Park takes them out of the way
	More    bool     // a limit ended the claim, so there may be more
	Upto    int64    // no row up to here that the claim could see is left: each is in Rows, in flight, published or waits
	Running []uint64 // transactions that ran when the round began, ascending. Any other below Xmax had ended
	Xmax    uint64
	Sample  Horizon // zero unless the round had a mark
}

// Open is a transaction that may still add rows to ids that claims have passed, and behind which id to claim once it has ended.
type Open struct {
	XID   uint64
	Above int64
}

// Held is a row that waits for another of its aggregate.
type Held struct{ ID, Behind int64 }

// Horizon is a sample of how far ids have been handed out: every transaction that took one up to LastID has an id of its own below XID,
// because a row's writer gets its transaction id before the row's id (outbox_messages has a default that sees to it). So once all
// transactions below XID have ended, every row up to LastID is visible, or will never be (docs/adr/0004-floor.md).
type Horizon struct {
	LastID int64
	XID    uint64
}

const rowColumns = `m.id, m.event_id, m.tenant_id, m.aggregate_type, m.aggregate_id, m.event_type,
       m.event_version::int, CASE WHEN m.payload_bytes <= @max_message THEN m.payload::text ELSE '' END,
       CASE WHEN m.payload_bytes <= @max_message THEN 0 ELSE m.payload_bytes END,
       m.occurred_at, coalesce(m.trace_id, ''), m.attempts::int, m.slot::int`

// beginRoundSQL reads the last id that was handed out, before the round has a transaction id, so that the two are a sample of the
// horizon. And it reads which transactions run, before the claim does.
//
// It does not make the round's commit wait for the disk: a mark that a crash takes away is made again by the catch-up, from the stream.
// Index: none.   Locks: none.
const beginRoundSQL = `
SELECT /* outbox.begin_round */ (` + lastIDSQL + `), pg_snapshot_xmax(s)::text::bigint, ARRAY(SELECT x::text::bigint FROM pg_snapshot_xip(s) x),
       set_config('synchronous_commit', 'off', true), ` + walkSettings + `
  FROM pg_current_snapshot() s`

// walkSettings have the transaction's statements walk the indexes that they are written for, in their order. A scan or a sort of everything looks
// cheaper to the planner while the table is small or its statistics are old. One plan serves all values: it leaves out the ranges below the
// floor when it runs, while a plan for each floor would cost more than the claim.
const walkSettings = `set_config('enable_seqscan', 'off', true), set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('plan_cache_mode', 'force_generic_plan', true)`

const walkSQL = `SELECT /* outbox.walk */ ` + walkSettings

// lastIDSQL reads the last id that was handed out; an id that nobody has used yet shows as the one to be handed out first.
// Index: none.   Locks: none.
const lastIDSQL = `SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM outbox_messages_id_seq`

// claimSQL reads pending rows behind an id. It takes no lock: who may publish is decided by the stream (the check of its last
// sequence), and who tries by the lease. A row is held when an earlier one of its aggregate waits.
//
// It begins behind @above, or lower when a transaction has ended, in its own snapshot, that may have added rows below
// (docs/adr/0004-floor.md). No claim begins below @lowest: it is a value when the plan starts, which leaves out the ranges below. Sizes are read first, so that payloads are read, and written out, for no more rows than the round has room for.
// Index: outbox_messages_pkey, the same range twice; while any row waits, outbox_messages_held_idx, one probe per row.
// Locks: none.
const claimSQL = `
WITH begins AS MATERIALIZED (
  SELECT coalesce(min(above), @above::bigint) AS above
    FROM unnest(@open::bigint[], @open_above::bigint[]) AS o(xid, above)
   WHERE pg_visible_in_snapshot(xid::text::xid8, pg_current_snapshot())),
sizes AS MATERIALIZED (
  SELECT id, CASE WHEN payload_bytes <= @max_message THEN payload_bytes ELSE 0 END AS size FROM outbox_messages
   WHERE id > @lowest::bigint AND id > (SELECT above FROM begins) AND ` + freshSQL + ` ORDER BY id LIMIT @limit)
SELECT /* outbox.claim */ ` + rowColumns + `,
       CASE WHEN (SELECT EXISTS (SELECT FROM outbox_messages WHERE delayed)) THEN
         coalesce((SELECT d.id FROM outbox_messages d
                    WHERE d.tenant_id = m.tenant_id AND d.aggregate_type = m.aggregate_type AND d.aggregate_id = m.aggregate_id
                      AND d.id < m.id AND d.delayed ORDER BY d.tenant_id DESC, d.aggregate_type DESC, d.aggregate_id DESC, d.id DESC LIMIT 1), 0)
       ELSE 0 END,
       (SELECT sum(size) > @max_bytes FROM sizes)
  FROM outbox_messages m
 WHERE id > @lowest::bigint AND id > (SELECT above FROM begins) AND ` + freshSQL + `
   AND id <= (SELECT CASE WHEN sum(size) <= @max_bytes THEN max(id) ELSE
                (SELECT max(id) FROM (SELECT id, size, sum(size) OVER (ROWS UNBOUNDED PRECEDING) AS upto FROM sizes) u WHERE upto - size <= @max_bytes) END FROM sizes)
 ORDER BY id`

// freshSQL tells the rows that a claim wants.
const freshSQL = `processed_at IS NULL AND NOT delayed AND slot BETWEEN @first AND @last
   AND (id > @in_flight_to::bigint OR id NOT IN (SELECT unnest(@in_flight::bigint[])))`

// stateSQL reads the partition's stored tail behind the claim: rows that another relay has published and marked are not claimed only if
// its tail shows as well, and this statement sees at least what the claim saw.
// Index: outbox_partitions_pkey.   Locks: none.
const stateSQL = `
SELECT /* outbox.state */ tail_seq, closing, final_seq IS NOT NULL FROM outbox_partitions WHERE partition = @partition`

// dueSQL reads waiting rows that have fallen due, and with each all of its aggregate that wait, in their order: those up to the first
// that is not due yet can go.
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

// columns are what rowColumns are read into, row by row.
type columns struct {
	Row
	eventID pgtype.UUID        // a form that costs the server less than text
	payload pgtype.DriverBytes // valid until the next row is read
}

func (c *columns) fields(more ...any) []any {
	return append([]any{&c.OutboxID, &c.eventID, &c.TenantID, &c.AggregateType, &c.AggregateID, &c.Type, &c.Version, &c.payload, &c.Oversize, &c.OccurredAt, &c.TraceParent,
		&c.Attempts, &c.Slot}, more...)
}

func (c *columns) row() Row {
	r := c.Row
	r.ID, r.Payload = c.eventID.String(), append(json.RawMessage(nil), c.payload...)
	return r
}

// Exchange carries out a round. ErrMarkFailed says that the mark did not find what it names, and that nothing was recorded; after any
// other error the outcome is unknown. Either way: catch up. Cost: one round trip, an update per marked row, one index range scan.
func Exchange(ctx context.Context, pool *pgxpool.Pool, r Round) (Claimed, error) {
	var (
		c    = Claimed{Upto: math.MaxInt64}
		b    pgx.Batch
		take = taking{c: &c, r: &r, before: make(map[Aggregate]int64)}
	)
	claim, due := r.args()
	b.Queue(beginRoundSQL).QueryRow(func(row pgx.Row) error {
		return row.Scan(&c.Sample.LastID, &c.Xmax, &c.Running, nil, nil, nil, nil, nil)
	})
	if r.Mark != nil {
		b.Queue(markSQL, r.Mark.args(r.Partition)).QueryRow(func(row pgx.Row) error { return row.Scan(&c.Sample.XID, nil) })
	}
	if r.Due {
		b.Queue(dueSQL, due).Query(take.dueRows)
	}
	if r.Limit > 0 {
		b.Queue(claimSQL, claim).Query(take.freshRows)
	}
	b.Queue(stateSQL, postgres.Args{"partition": r.Partition}).QueryRow(func(row pgx.Row) error { return row.Scan(&c.Tail, &c.Closing, &c.Closed) })
	if err := pool.SendBatch(ctx, &b).Close(); err != nil {
		if isMarkFailed(err) {
			err = fmt.Errorf("%w: %w", ErrMarkFailed, err)
		}
		return Claimed{}, fmt.Errorf("exchange with partition %d: %w", r.Partition, err)
	}
	if c.Sample.XID == 0 {
		c.Sample = Horizon{}
	}
	take.fill()
	return c, nil
}

// args returns those of claimSQL and of dueSQL.
func (r *Round) args() (claim, due postgres.Args) {
	inFlight, to := append([]int64{}, r.InFlight...), int64(0) // not NULL, which no id differs from
	if len(inFlight) > 0 {
		to = slices.Max(inFlight)
	}
	open, above, lowest := make([]int64, len(r.Open)), make([]int64, len(r.Open)), r.Above
	for i, o := range r.Open {
		open[i], above[i], lowest = int64(o.XID), o.Above, min(lowest, o.Above)
	}
	due = postgres.Args{"first": r.FirstSlot, "last": r.LastSlot, "in_flight": inFlight, "limit": r.Limit, "max_message": r.MaxMessage}
	claim = postgres.Args{"above": r.Above, "open": open, "open_above": above, "lowest": lowest, "in_flight_to": to, "max_bytes": r.MaxBytes}
	maps.Copy(claim, due)
	return claim, due
}

// Aggregate names what events are ordered by.
type Aggregate struct {
	TenantID int64
	Type     string
	ID       int64
}

// Aggregate returns the row's.
func (r *Row) Aggregate() Aggregate { return Aggregate{r.TenantID, r.AggregateType, r.AggregateID} }

// taking fills a Claimed from rows, within the round's bounds.
type taking struct {
	c      *Claimed
	r      *Round
	due    []Row               // that may go unless an earlier row of their aggregate is among fresh, or was not read
	fresh  []Row               // that may go
	before map[Aggregate]int64 // of each aggregate of due the first pending row that was read; 0 without one
	last   int64               // the greatest id of a pending row that was read
	cut    bool                // not all pending rows were read
}

// Leave notes that a pending row stays where it is.
func (c *Claimed) Leave(id int64) { c.Upto = min(c.Upto, id-1) }

// dueRows keeps of each aggregate what has fallen due with nothing before it that has not. The rest waits for that.
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

// freshRows keeps the pending rows in the order of ids.
func (t *taking) freshRows(rows pgx.Rows) error {
	var (
		c      = t.c
		row    columns
		behind int64
		full   bool
		read   int
	)
	_, err := pgx.ForEachRow(rows, row.fields(&behind, &full), func() error {
		if row.OutboxID <= t.last {
			return errors.New("the rows came out of order")
		}
		t.last = row.OutboxID
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
	if t.cut = read == t.r.Limit || full; t.cut {
		c.Leave(t.last + 1)
	}
	c.More = c.More || t.cut
	return err
}

// fill takes the due rows that are the first of their aggregate, and then the fresh ones. After one that has no room nothing is taken: the
// order would break. A due row that a pending one may precede waits until that is gone.
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

// parkSQL puts held rows off until what holds them falls due, so that no claim meets them before, and notes behind what they wait.
// Index: outbox_messages_pkey.   Locks: the rows.
const parkSQL = `
UPDATE /* outbox.park */ outbox_messages m SET available_at = d.available_at, behind = d.id
  FROM unnest(@ids::bigint[], @behind::bigint[]) AS p(id, behind)
  JOIN outbox_messages d ON d.id = p.behind AND d.delayed
 WHERE m.id = p.id AND m.processed_at IS NULL AND d.available_at > m.available_at AND d.available_at > now()`

// Park puts the held rows of a claim off until what holds them falls due.
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

// unparkSQL lets parked rows fall due whose row ahead waits no longer, or not as long: it was published, given up, discarded or mended.
// Index: outbox_messages_delayed_id_idx, all that wait.   Locks: the rows.
const unparkSQL = `
UPDATE /* outbox.unpark */ outbox_messages m SET available_at = greatest(clock_timestamp(), m.inserted_at + interval '1 microsecond'), behind = NULL
 WHERE m.delayed AND m.behind IS NOT NULL AND m.available_at > now()
   AND NOT EXISTS (SELECT FROM outbox_messages d WHERE d.id = m.behind AND d.delayed AND d.available_at >= m.available_at)`

// Unpark frees the rows that wait for nothing any more, and returns how many. It looks at every row that waits.
func Unpark(ctx context.Context, pool *pgxpool.Pool) (int64, error) {
	tag, err := pool.Exec(ctx, unparkSQL)
	if err != nil {
		return 0, fmt.Errorf("free parked rows: %w", err)
	}
	return tag.RowsAffected(), nil
}

// Failure is a row that cannot be published as it is.
type Failure struct {
	Row   Row
	Error string
}

// MaxAttempts is how often a row may fail before it is moved to the DLQ (the spec's "attempts > 10").
const MaxAttempts = 10

// retriesSQL counts how often the event of a message m was retried from the DLQ.
// Index: outbox_dlq_actions_event_idx.
const retriesSQL = `(SELECT count(*) FROM outbox_dlq_actions a WHERE a.event_id = m.event_id AND a.action = 'retry')`

// failSQL counts a failure of each row and puts it off by 30 s per attempt, 4 minutes at most; past max attempts it moves it
// to the DLQ. attempts is compared, so that two relays at once count one failure.
// Index: outbox_messages_pkey.   Locks: the rows.
const failSQL = `
WITH failed AS (SELECT * FROM unnest(@ids::bigint[], @event_ids::uuid[], @attempts::smallint[], @errors::text[], @causes::text[]) AS f(id, event_id, attempts, error, cause)),
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

// Fail counts a failure of each row: it is put off, or moved to the DLQ past MaxAttempts. It returns how many went either way.
func Fail(ctx context.Context, pool *pgxpool.Pool, failures []Failure) (putOff, dead int, err error) {
	n := len(failures)
	ids, eventIDs, attempts, texts, causes := make([]int64, n), make([]string, n), make([]int16, n), make([]string, n), make([]string, n)
	for i, f := range failures {
		ids[i], eventIDs[i], attempts[i], texts[i], causes[i] = f.Row.OutboxID, f.Row.ID, int16(f.Row.Attempts), f.Error, deadletter.Cause(f.Error)
	}
	err = pool.QueryRow(ctx, failSQL, pgx.StrictNamedArgs{
		"ids": ids, "event_ids": eventIDs, "attempts": attempts, "errors": texts, "causes": causes, "max": MaxAttempts,
	}).Scan(&putOff, &dead)
	if err != nil {
		return 0, 0, fmt.Errorf("count the failures of %d rows: %w", n, err)
	}
	return putOff, dead, nil
}
