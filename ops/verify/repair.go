package verify

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/cells"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
)

const (
	maxRepairs    = 100_000 // differences in memory; a projection with more needs a replay
	keysPerRepair = 100     // keys per transaction; the consumer waits for each transaction
)

// flaw is a difference without its values.
type flaw struct {
	key    projections.Key
	entity string
	field  string
	record bool
}

// Repaired is an entity that a repair changed, would change, or leaves.
type Repaired struct {
	TenantID int64  `json:"tenant_id,string"`
	Entity   string `json:"entity"`
	Left     string `json:"left,omitempty"` // why the repair leaves it unchanged

	key projections.Key
}

// String returns the name of the entity, and the reason if the repair leaves it.
func (m Repaired) String() string {
	s := fmt.Sprintf("tenant %d, %s", m.TenantID, m.Entity)
	if m.Left != "" {
		s += ": " + m.Left
	}
	return s
}

// Reasons for a difference, or for leaving it.
const (
	whyDead    = "its aggregate has messages in the outbox's DLQ"
	whyParked  = "the consumer has parked events of its aggregate"
	whyWaiting = "messages of its aggregate wait in the outbox"
	whyRecord  = "a history is a record: a repair only adds to it"
)

// explained returns the reason among facts that explains a difference, or "".
func (d Deps) explained(k projections.Key, facts map[string]projections.Parked) string {
	for _, why := range slices.Sorted(maps.Keys(facts)) {
		is := facts[why]
		if is(k.TenantID, k.Type, k.Aggregate) {
			return why
		}
		if child, ok := d.Kinds().Child(cmp.Or(k.Kind, k.Type)); ok &&
			(is(k.TenantID, child.Name, k.Aggregate) || is(k.TenantID, event.AggregateThread, k.Aggregate)) {
			return why
		}
	}
	return ""
}

// Repair sets the differing rows of one projection to the truth, and returns its action for each
// entity. It repairs only entities that differ in two comparisons. Between these it waits for
// lagging parts, because the first comparison may have found events that were not applied yet. With
// dry it returns the same and changes nothing.
func Repair(ctx context.Context, d Deps, p projections.Projection, wait time.Duration, dry bool) ([]Repaired, error) {
	found, err := d.lastingFlaws(ctx, p, wait)
	if err != nil || len(found) == 0 {
		return nil, err
	}
	parked, err := consumers.AllParked(ctx, d.Projections, p.Name())
	if err != nil {
		return nil, err
	}
	dead, err := outbox.Dead(ctx, d.Truth)
	if err != nil {
		return nil, err
	}
	var all []Repaired
	var keys []projections.Key
	known := make(map[projections.Key]bool)
	for _, m := range found {
		if m.Left == "" {
			m.Left = d.explained(m.key, map[string]projections.Parked{whyParked: parked, whyDead: dead})
		}
		if all = append(all, m); m.Left == "" && !known[m.key] {
			known[m.key], keys = true, append(keys, m.key)
		}
	}
	if dry {
		return all, nil
	}
	return all, d.repairKeys(ctx, p, keys, dead)
}

// RepairKeys sets the rows of the keys to the truth while the system runs. The consumer waits for
// each hundred keys. It leaves the rows of an aggregate in a DLQ. A key whose rows do not differ
// stays unchanged.
func RepairKeys(ctx context.Context, d Deps, p projections.Projection, keys ...projections.Key) error {
	ours, err := cells.Read(ctx, d.Projections, d.Broker.Stream)
	if err != nil {
		return err
	}
	for _, k := range keys {
		if !ours.Has(k.TenantID) {
			return fmt.Errorf("repair tenant %d: %w: the tenant belongs to another truth", k.TenantID, cells.ErrShared)
		}
	}
	dead, err := outbox.Dead(ctx, d.Truth)
	if err != nil {
		return err
	}
	return d.repairKeys(ctx, p, keys, dead)
}

func (d Deps) repairKeys(ctx context.Context, p projections.Projection, keys []projections.Key, dead projections.Parked) error {
	for chunk := range slices.Chunk(keys, keysPerRepair) {
		for left := chunk; len(left) > 0; {
			var rest []projections.Key
			if err := postgres.InTx(ctx, d.Projections, pgx.TxOptions{}, func(tx pgx.Tx) error {
				parked, err := consumers.Hold(ctx, tx, p.Name())
				if err != nil {
					return err
				}
				rest, err = p.Repair(ctx, tx, d.Truth, left, func(tenant int64, aggregateType string, aggregateID event.ID) bool {
					return parked(tenant, aggregateType, aggregateID) || dead(tenant, aggregateType, aggregateID)
				})
				return err
			}); err != nil {
				return fmt.Errorf("repair %d differences of %s: %w", len(chunk), p.Name(), err)
			}
			left = rest
		}
	}
	return nil
}

// lastingFlaws returns the entities that differ in two comparisons, in the order of their names.
func (d Deps) lastingFlaws(ctx context.Context, p projections.Projection, wait time.Duration) ([]Repaired, error) {
	first, err := d.flaws(ctx, p)
	if err != nil || len(first) == 0 {
		return nil, err
	}
	if _, err := status.Await(ctx, d.Sources, wait, status.State.Settled); err != nil {
		return nil, err
	}
	second, err := d.flaws(ctx, p)
	if err != nil {
		return nil, err
	}
	type about struct {
		key    projections.Key
		entity string
	}
	stay := make(map[about]Repaired)
	for f := range second {
		if !first[f] {
			continue
		}
		at := about{f.key, f.entity}
		m, again := stay[at]
		if m = (Repaired{TenantID: f.key.TenantID, Entity: f.entity, Left: m.Left, key: f.key}); !again && f.record {
			m.Left = whyRecord
		} else if !f.record {
			m.Left = ""
		}
		stay[at] = m
	}
	return slices.SortedFunc(maps.Values(stay), func(a, b Repaired) int {
		return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.Entity, b.Entity),
			cmp.Compare(fmt.Sprint(a.key), fmt.Sprint(b.key)))
	}), nil
}

func (d Deps) flaws(ctx context.Context, p projections.Projection) (map[flaw]bool, error) {
	ours, err := cells.Read(ctx, d.Projections, d.Broker.Stream)
	if err != nil {
		return nil, err
	}
	all := make(map[flaw]bool)
	_, err = p.Verify(ctx, d.Truth, d.Projections, func(diff projections.Difference) {
		if ours.Has(diff.TenantID) && len(all) < maxRepairs {
			all[flaw{diff.Key, diff.Entity, diff.Field, diff.Record}] = true
		}
	})
	if err == nil && len(all) == maxRepairs {
		err = fmt.Errorf("%s or more differences: run `tidings replay --consumer %s`", words.Count(maxRepairs), p.Name())
	}
	if err != nil {
		return nil, fmt.Errorf("verify %s: %w", p.Name(), err)
	}
	return all, nil
}
