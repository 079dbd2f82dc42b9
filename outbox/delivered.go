package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Delivered is a look at what the relays have delivered: everything that was committed up to AsOf is on the streams, up to where Tails says that
// they end, but for what Missing names.
type Delivered struct {
	AsOf    time.Time // by the database's clock; a little before the look
	Tails   []Tail
	Missing []Missing
}

// Tail is the last sequence of a stream that a mark covers.
type Tail struct {
	Stream string `json:"stream"`
	Seq    uint64 `json:"seq"`
	Closed bool   `json:"closed"`
}

// Missing says since when messages of a tenant's aggregates of a type wait for a retry or behind one, or are in the DLQ.
type Missing struct {
	TenantID      int64     `json:"tenant"`
	AggregateType string    `json:"type"`
	Since         time.Time `json:"since"`
}

// maxMissing bounds what a look reads of the messages that wait, and of the DLQ.
const maxMissing = 10_000

// deliveredSQL looks at the outbox in one snapshot.
// Index: outbox_messages_pkey from the lowest floor, outbox_messages_delayed_idx, outbox_messages_dlq_pkey: bounded.   Locks: none.
const deliveredSQL = `SELECT /* outbox.delivered */ complete, tails, missing FROM outbox_delivered($1)`

// ReadDelivered looks at what is delivered. It needs no tenant and asks no broker. Transactions that have not ended are not part of it: what they write
// commits later. The cost does not grow with the backlog; it grows with what was written since the oldest transaction began.
func ReadDelivered(ctx context.Context, pool *pgxpool.Pool) (d Delivered, err error) {
	if err := pool.QueryRow(ctx, deliveredSQL, maxMissing).Scan(&d.AsOf, &d.Tails, &d.Missing); err != nil {
		return d, fmt.Errorf("look at what is delivered: %w", err)
	}
	return d, nil
}

// Reached reports whether a consumer with these offsets, by stream, has applied all that the look says is on the streams. A consumer that
// has no offset of a closed stream has one of its successors, or began later.
func (d *Delivered) Reached(offsets map[string]uint64) bool {
	for _, t := range d.Tails {
		if at, there := offsets[t.Stream]; at < t.Seq && (there || !t.Closed) {
			return false
		}
	}
	return true
}

// Whole returns up to when everything that was committed is delivered, of all tenants.
func (d *Delivered) Whole() time.Time { return d.before(func(Missing) bool { return true }) }

// Of returns up to when everything of a tenant that was committed is delivered, of the aggregate types that wants reports.
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
