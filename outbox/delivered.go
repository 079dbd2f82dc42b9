package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Delivered is a snapshot of what the relays have delivered. Every event committed up to AsOf is on
// the streams, up to the sequences in Tails, except for the events that Missing names.
type Delivered struct {
	AsOf    time.Time // by the database's clock, slightly before the snapshot
	Tails   []Tail
	Missing []Missing
}

// Tail is the last sequence of a stream that marks cover.
type Tail struct {
	Stream string `json:"stream"`
	Seq    uint64 `json:"seq"`
	Closed bool   `json:"closed"`
}

// Missing is a tenant and an aggregate type with messages that are delayed or in the DLQ, and the
// time of the oldest one.
type Missing struct {
	TenantID      int64     `json:"tenant"`
	AggregateType string    `json:"type"`
	Since         time.Time `json:"since"`
}

// maxMissing limits the delayed messages and the DLQ messages that one snapshot reads.
const maxMissing = 10_000

// deliveredSQL reads the delivery state in one snapshot.
//
// Index: outbox_messages_pkey from the lowest floor, outbox_messages_delayed_idx,
// outbox_messages_dlq_pkey: bounded. Locks: none.
const deliveredSQL = `SELECT /* outbox.delivered */ complete, tails, missing FROM outbox_delivered($1)`

// ReadDelivered reads what is delivered. It needs no tenant and no broker. It excludes transactions
// that still run: their events commit later. The cost does not grow with the backlog, only with the
// rows written since the oldest transaction began.
func ReadDelivered(ctx context.Context, pool *pgxpool.Pool) (d Delivered, err error) {
	if err := pool.QueryRow(ctx, deliveredSQL, maxMissing).Scan(&d.AsOf, &d.Tails, &d.Missing); err != nil {
		return d, fmt.Errorf("read the delivery state: %w", err)
	}
	return d, nil
}

// Reached reports whether a consumer with these offsets, by stream, has applied every event on the
// streams up to d. A consumer without an offset of a closed stream has one of a successor, or began
// later.
func (d *Delivered) Reached(offsets map[string]uint64) bool {
	for _, t := range d.Tails {
		if at, there := offsets[t.Stream]; at < t.Seq && (there || !t.Closed) {
			return false
		}
	}
	return true
}

// Whole returns the time up to which every event of all tenants is delivered.
func (d *Delivered) Whole() time.Time { return d.before(func(Missing) bool { return true }) }

// Of returns the time up to which every event of a tenant is delivered, for the aggregate types
// that wants accepts.
func (d *Delivered) Of(tenant int64, wants func(aggregateType string) bool) time.Time {
	return d.before(func(m Missing) bool { return m.TenantID == tenant && wants(m.AggregateType) })
}

func (d *Delivered) before(counts func(Missing) bool) time.Time {
	at := d.AsOf
	for _, m := range d.Missing {
		if before := m.Since.Add(-time.Microsecond); before.Before(at) && counts(m) {
			at = before
		}
	}
	return at
}
