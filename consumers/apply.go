package consumers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/histogram"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tracing"
)

type aggregate struct {
	tenant int64
	kind   string
	id     event.ID
}

func aggregateOf(e *event.Event) aggregate {
	return aggregate{e.TenantID, cleanText(e.AggregateType), e.AggregateID}
}

// outcome is the result of a transaction. InTx may run the transaction again, so each run begins
// with an empty outcome. The metrics count it after the commit.
type outcome struct {
	applied int
	skipped map[string]int
	dead    []deadLetter
	tried   []attempt // the events applied one by one that failed or were slow
}

// attempt is one event that was applied alone.
type attempt struct {
	*delivery
	began time.Time
	took  time.Duration
	fault error
}

// slowEvent is the duration from which an event that is applied alone has a span of its own.
const slowEvent = 100 * time.Millisecond

type deadLetter struct {
	*delivery
	reason string
}

// BehindAnother is the error of a dead letter that is parked only because an earlier event of its
// aggregate is.
const BehindAnother = "an earlier event of its aggregate is parked"

// apply runs the batch in one transaction. It does not stop when ctx ends; its bound is
// ApplyTimeout. After an error that an event may have caused, it applies the events one by one to
// find the poison event. After a batch that took too long, the next batches are smaller. apply
// returns errMoved if another instance moved the offset, and errLetters if a dead letter lacks its
// headers.
func (r *reader) apply(ctx context.Context, stream broker.Stream, b *batch) (err error) {
	c := r.c
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.ApplyTimeout)
	defer cancel()
	c.at("after collect")
	if err := c.reclassifyUnknown(ctx, b); err != nil {
		return err
	}
	ctx, spans := tracing.From(ctx).ProcessOf(ctx, c.name, r.name, r.partition, len(b.deliveries), b.events)
	defer func() {
		if !errors.Is(err, errLetters) { // the batch that is read again has the spans
			spans.End(err)
		}
	}()
	start := time.Now()
	out, err := r.transact(ctx, stream, b, false)
	if err != nil && mayBePoison(err) && !r.letters {
		err = fmt.Errorf("%w: %w", errLetters, err)
	} else if err != nil && mayBePoison(err) {
		c.log.WarnContext(ctx, "a batch failed, applying its events one by one", "stream", r.name, "events", len(b.deliveries), "err", err)
		out, err = r.transact(ctx, stream, b, true)
	}
	end := time.Now()
	took := end.Sub(start)
	r.resize(took, len(b.deliveries))
	if err != nil {
		return err
	}
	c.at("after commit")
	for i := range b.deliveries {
		c.metrics.path.Observe(&b.deliveries[i].event, end)
	}
	histogram.Observe(ctx, c.metrics.batch, took.Seconds())
	for _, a := range out.tried {
		spans.Event(ctx, &a.event, a.began, a.took, a.fault)
	}
	c.metrics.applied.WithLabelValues(r.label()).Add(float64(out.applied))
	for reason, n := range out.skipped {
		c.metrics.skipped[reason].Add(float64(n))
	}
	c.metrics.parked.Add(float64(len(out.dead)))
	for _, d := range out.dead {
		if d.fault != nil {
			c.log.ErrorContext(ctx, "poison event parked, with the later ones of its aggregate", "event_id", d.event.ID,
				"stream", r.name, "stream_seq", d.event.Seq, "tenant", d.event.TenantID, "aggregate", d.event.AggregateType,
				"aggregate_id", d.event.AggregateID, "err", d.fault, "runbook", "ConsumerDeadLetters")
		}
	}
	return nil
}

// growAfter is the number of consecutive full batches that must leave most of their time before
// batches grow again.
const growAfter = 10

// resize halves the batches after one that used up its time, down to one event. It doubles them
// after growAfter full batches that left most of their time.
func (r *reader) resize(took time.Duration, events int) {
	limit, most := int(r.limit.Load()), r.c.cfg.BatchEvents
	switch {
	case took >= r.c.cfg.ApplyTimeout:
		limit, r.quick = max(events/2, 1), 0
	case took > r.c.cfg.ApplyTimeout/4:
		r.quick = 0
	case limit < most && events >= limit:
		if r.quick++; r.quick == growAfter {
			limit, r.quick = min(2*limit, most), 0
		}
	}
	r.limit.Store(int64(limit))
}

// checkKnown returns the fault of an event of a built-in aggregate type if this release does not
// know its event type or version. The projection checks the events of other kinds.
func checkKnown(e *event.Event) error {
	if known, exact := event.Known(e.AggregateType, e.Type, e.Version); known && !exact {
		return event.Permanent(fmt.Errorf("event %s is a %s.%s.v%d: this release does not know it", e.ID,
			e.AggregateType, e.Type, e.Version))
	}
	return nil
}

// mayBePoison reports whether an event may have caused the error, and not the database's own
// trouble.
func mayBePoison(err error) bool {
	return event.IsPermanent(err) ||
		!postgres.IsTransient(err) && !postgres.IsSystemic(err) && !errors.Is(err, errMoved) && !errors.Is(err, errLetters)
}

// manyEvents is the number of events from which the planner plans each batch; smaller batches share
// kept plans.
const manyEvents = 200

// planSQL sets up the planner for batches, which touch rows of large tables by their keys. Plans:
// the statements of a large batch are planned for their arrays. Planning takes 2 to 3 ms, so small
// batches share plans that are kept. Scans: without these settings the planner scans a whole table
// of some hundred thousand rows, which takes twice the time. A kept plan from the time when a table
// was empty would scan it too. Timeout: the server ends the transaction of a frozen process. Its
// locks would otherwise keep the partition longer than its lease does. Commit: it does not wait for
// the disk. A crash of the database takes back the offset together with all that was applied, and
// the consumer reads the stream again from there.
const planSQL = `
SELECT /* consumers.plan */ set_config('plan_cache_mode', @plans, true), set_config('enable_seqscan', 'off', true),
       set_config('random_page_cost', '1.1', true), set_config('jit', 'off', true), set_config('synchronous_commit', 'off', true),
       set_config('idle_in_transaction_session_timeout', @idle_ms, true)`

func planArgs(idle time.Duration, events int) postgres.Args {
	plans := "force_generic_plan"
	if events >= manyEvents {
		plans = "force_custom_plan"
	}
	return postgres.Args{"plans": plans, "idle_ms": strconv.FormatInt(idle.Milliseconds(), 10)}
}

// lettersSQL reports whether the consumer has dead letters.
// Index: consumer_dead_letters_aggregate_idx, one row. Locks: none.
const lettersSQL = `
SELECT /* consumers.letters */ EXISTS (SELECT FROM consumer_dead_letters WHERE consumer_name = @consumer)`

// parkedSQL finds the parked aggregates by one probe for each, no matter how many dead letters
// exist. It costs nothing while there are none. Index: consumer_dead_letters_aggregate_idx. Locks:
// none (a transaction that unparks locks the offset first).
const parkedSQL = `
SELECT /* consumers.parked */ a.tenant_id, a.aggregate_type, a.aggregate_id
  FROM unnest(@tenants::bigint[], @types::text[], @ids::text[]) AS a(tenant_id, aggregate_type, aggregate_id)
 CROSS JOIN LATERAL (SELECT FROM consumer_dead_letters d WHERE d.consumer_name = @consumer AND d.tenant_id = a.tenant_id
                        AND d.aggregate_type = a.aggregate_type AND d.aggregate_id = a.aggregate_id LIMIT 1) parked
 WHERE EXISTS (SELECT FROM consumer_dead_letters WHERE consumer_name = @consumer)`

func (r *reader) transact(ctx context.Context, stream broker.Stream, b *batch, oneByOne bool) (out outcome, err error) {
	c := r.c
	err = postgres.InShortTx(ctx, c.deps.Pool, func(tx pgx.Tx) error {
		out = outcome{skipped: make(map[string]int)}
		parked, err := r.begin(ctx, tx, stream, b)
		if err != nil {
			return err
		}
		events := make([]event.Event, 0, len(b.deliveries))
		for i := range b.deliveries {
			d := &b.deliveries[i]
			switch {
			case d.closing != nil:
				continue
			case d.skip != "":
				out.skipped[d.skip]++
				continue
			case len(parked) > 0 && parked[aggregateOf(&d.event)]:
				out.dead = append(out.dead, deadLetter{d, BehindAnother})
				continue
			case d.fault == nil && oneByOne:
				began := time.Now()
				if d.fault, err = try(ctx, tx, c.projection, d.event); err != nil {
					return err
				}
				if took := time.Since(began); d.fault != nil || took >= slowEvent {
					out.tried = append(out.tried, attempt{d, began, took, d.fault})
				}
			}
			if d.fault != nil {
				parked[aggregateOf(&d.event)] = true
				out.dead = append(out.dead, deadLetter{d, d.fault.Error()})
				continue
			}
			out.applied++
			if !oneByOne {
				events = append(events, d.event)
			}
		}
		if len(out.dead) > 0 && !r.letters {
			return errLetters
		}
		if len(events) > 0 {
			if err := c.projection.Apply(ctx, tx, events); err != nil {
				return fmt.Errorf("apply %d events to %s: %w", len(events), c.name, err)
			}
		}
		if err := park(ctx, tx, c.name, out.dead); err != nil {
			return err
		}
		c.at("before commit")
		return nil
	})
	return out, err
}

// begin moves the offset, which it locks, and then finds which of the batch's aggregates are
// parked. Nobody can unpark them while the offset is locked. Without r.letters, begin asks only
// whether the consumer has dead letters, together with the next statement. Then errMoved, and
// errLetters if it has some, are errors of the transaction.
func (r *reader) begin(ctx context.Context, tx pgx.Tx, stream broker.Stream, b *batch) (map[aggregate]bool, error) {
	c := r.c
	var storedAt *time.Time // of the message at the new offset, if it still exists
	if len(b.deliveries) > 0 {
		storedAt = &b.stored
	}
	parked := make(map[aggregate]bool)
	var q pgx.Batch
	q.Queue(planSQL, planArgs(c.cfg.Lease.TTL, len(b.deliveries)))
	q.Queue(moveSQL, postgres.Args{
		"consumer": c.name, "key": r.name, "old": int64(b.from), "new": int64(b.to), "stored": b.stored, "created": stream.Created,
		"closed": b.closing != nil, "stored_at": storedAt,
	}).Exec(func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() != 1 {
			return errMoved
		}
		c.at("after offsets")
		return nil
	})
	if b.closing != nil {
		q.Queue(succeedSQL, succeedArgs(c.name, r.name, b.closing))
	}
	if r.letters {
		q.Queue(parkedSQL, parkedArgs(c.name, b)).Query(func(rows pgx.Rows) error {
			var a aggregate
			_, err := pgx.ForEachRow(rows, []any{&a.tenant, &a.kind, &a.id}, func() error {
				parked[a] = true
				return nil
			})
			return err
		})
		if err := tx.SendBatch(ctx, &q).Close(); err != nil {
			return nil, fmt.Errorf("move the offset of %s on %s: %w", c.name, r.name, err)
		}
		return parked, nil
	}
	q.Queue(lettersSQL, postgres.Args{"consumer": c.name}).QueryRow(func(row pgx.Row) error {
		var letters bool
		if err := row.Scan(&letters); err != nil || !letters {
			return err
		}
		return errLetters
	})
	return parked, postgres.LaterBatch(ctx, tx, &q)
}

func parkedArgs(consumer string, b *batch) postgres.Args {
	n := len(b.deliveries)
	tenants, types, ids := make([]int64, 0, n), make([]string, 0, n), make([]event.ID, 0, n)
	var last aggregate // a run of events of one aggregate asks once
	for e := range b.events {
		if a := aggregateOf(e); a != last {
			tenants, types, ids = append(tenants, a.tenant), append(types, a.kind), append(ids, a.id)
			last = a
		}
	}
	return postgres.Args{"consumer": consumer, "tenants": tenants, "types": types, "ids": ids}
}

// try applies events under a savepoint. If an event breaks, try rolls back to the savepoint and
// returns the reason as fault. err is an error that no event caused.
func try(ctx context.Context, tx pgx.Tx, p Projection, events ...event.Event) (fault, err error) {
	savepoint, err := tx.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("set a savepoint: %w", err)
	}
	fault = p.Apply(ctx, savepoint, events)
	if fault == nil {
		if err := savepoint.Commit(ctx); err != nil {
			return nil, fmt.Errorf("release a savepoint: %w", err)
		}
		return nil, nil
	}
	if !mayBePoison(fault) {
		return nil, fmt.Errorf("apply %d events from %s on to %s: %w", len(events), events[0].ID, p.Name(), fault)
	}
	if err := savepoint.Rollback(ctx); err != nil {
		return nil, fmt.Errorf("return to a savepoint: %w", err)
	}
	return fault, nil
}

// parkSQL stores events for an operator, in their order. Index: none. Locks: none but the new rows.
const parkSQL = `
INSERT /* consumers.park */ INTO consumer_dead_letters
       (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id, event_id, event_type, event_version, headers,
       payload, error, cause)
SELECT @consumer, seq, key, tenant, aggregate_type, aggregate_id, event_id, event_type, event_version, headers, payload, error, cause
  FROM unnest(@seqs::bigint[], @keys::text[], @tenants::bigint[], @aggregate_types::text[], @aggregate_ids::text[],
       @event_ids::uuid[], @event_types::text[], @event_versions::smallint[], @headers::jsonb[], @payloads::bytea[], @errors::text[],
       @causes::text[])
  WITH ORDINALITY
    AS d(seq, key, tenant, aggregate_type, aggregate_id, event_id, event_type, event_version, headers, payload, error, cause, n)
 ORDER BY n`

func park(ctx context.Context, tx pgx.Tx, consumer string, dead []deadLetter) error {
	n := len(dead)
	if n == 0 {
		return nil
	}
	var (
		seqs, tenants, aggregates          = make([]int64, n), make([]int64, n), make([]event.ID, n)
		keys, aggregateTypes, types, texts = make([]string, n), make([]string, n), make([]string, n), make([]string, n)
		ids, headers, causes               = make([]string, n), make([]string, n), make([]string, n)
		versions                           = make([]int16, n)
		payloads                           = make([][]byte, n)
	)
	for i, d := range dead {
		e := &d.event
		a := aggregateOf(e)
		seqs[i], keys[i], tenants[i], aggregateTypes[i], aggregates[i] = int64(e.Seq), e.Stream, a.tenant, a.kind, a.id
		types[i], texts[i], payloads[i] = cleanText(e.Type), cleanText(d.reason), append([]byte{}, e.Payload...)
		causes[i] = deadletter.Cause(texts[i])
		versions[i] = int16(min(max(e.Version, math.MinInt16), math.MaxInt16))
		id, err := uuid.Parse(e.ID)
		if err != nil {
			id = uuid.Nil // the headers keep the invalid one
		}
		ids[i] = id.String()
		h := make(map[string][]string, len(d.headers))
		for name, values := range d.headers {
			for _, v := range values {
				h[cleanText(name)] = append(h[cleanText(name)], cleanText(v))
			}
		}
		text, err := json.Marshal(h)
		if err != nil {
			return fmt.Errorf("encode the headers of event %s: %w", e.ID, err)
		}
		headers[i] = string(text)
	}
	if _, err := tx.Exec(ctx, parkSQL, postgres.Args{
		"consumer": consumer, "seqs": seqs, "keys": keys, "tenants": tenants, "aggregate_types": aggregateTypes,
		"aggregate_ids": aggregates, "event_ids": ids, "event_types": types, "event_versions": versions, "headers": headers,
		"payloads": payloads, "errors": texts, "causes": causes,
	}); err != nil {
		return fmt.Errorf("park %d events of %s: %w", n, consumer, err)
	}
	return nil
}

// cleanText replaces bytes that PostgreSQL does not accept in a text.
func cleanText(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}
