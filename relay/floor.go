package relay

import (
	"context"
	"time"

	"github.com/tidings/tidings/outbox"
)

// floorEvery is between two raises of the floors, so that a claim does not walk the dead index entries of what was published since
// the last vacuum. (docs/adr/0004-floor.md)
const floorEvery = time.Second

// raise raises the floors of the partitions, and asserts that no row contradicts one. A row that does is claimed at once.
func (s *session) raise(ctx context.Context, parts map[int]*partition, held []int) error {
	if err := outbox.RaiseFloors(ctx, s.pool, held); err != nil {
		return err
	}
	found, err := outbox.BelowFloor(ctx, s.pool, held)
	for _, v := range found {
		s.metrics.belowFloor.Inc()
		s.log.ErrorContext(ctx, "a row below the floor: later events of its entity may be on the stream", "partition", v.Partition, "id", v.ID, "floor", v.Floor)
		if p := parts[v.Partition]; p != nil {
			p.more = true
		}
	}
	s.at("after floors")
	return err
}
