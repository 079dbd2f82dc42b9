package console

import (
	"context"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

// late is the age from which on a waiting row is late.
const late = doctor.LateSeconds * time.Second

type partitionsPage struct {
	Rows        []partitionRow
	Cell        []slotCell
	More        bool
	Unavailable []string // what is unavailable or locked
}

type partitionRow struct {
	status.Partition
	Floor            int64
	Level            string
	Pending, Delayed int
	Oldest           time.Duration
	Says             string
}

// slotCell is a slot in the heat map.
type slotCell struct {
	outbox.Slot
	Partition int // the open partition with this slot; -1: none
	Heat      int // 0 to 4
	Stuck     bool
}

func (c *Console) partitionsData(ctx context.Context, _ *view) (any, error) {
	now, err := c.observer.state(ctx, false)
	if err != nil {
		return nil, err
	}
	p := partitionsPage{More: now.More, Unavailable: now.State.Missing()}
	floors := map[int]int64{}
	if !now.State.IsUnavailable(status.ServerTruth) && !now.State.IsUnread(status.PartPartitions) {
		known, err := outbox.Partitions(status.WithShortLockTimeout(ctx, now.State), c.deps.Truth)
		if err != nil && !postgres.IsLockTimeout(err) {
			return nil, err
		}
		for _, k := range known {
			floors[k.Number] = k.Floor
		}
	}
	slots := make([]slotCell, event.Slots)
	for i := range slots {
		slots[i] = slotCell{Slot: outbox.Slot{Slot: i}, Partition: -1}
	}
	for _, s := range now.Slots {
		slots[s.Slot].Slot, slots[s.Slot].Heat = s, heat(s)
	}
	for _, s := range now.State.Partitions {
		row := partitionRow{Partition: s, Floor: floors[s.Partition]}
		if s.State == status.Open {
			for i := s.FirstSlot; i <= s.LastSlot; i++ {
				slots[i].Partition = s.Partition
				slots[i].Stuck = slots[i].Oldest > late
				row.Pending, row.Delayed, row.Oldest = row.Pending+slots[i].Pending, row.Delayed+slots[i].Delayed,
					max(row.Oldest, slots[i].Oldest)
			}
		}
		row.Level, row.Says = partitionLevel(row)
		p.Rows = append(p.Rows, row)
	}
	p.Cell = slots
	return p, nil
}

// partitionLevel describes the state of a partition in a word.
func partitionLevel(r partitionRow) (level, says string) {
	condition := r.Condition()
	switch {
	case condition == status.Refused, condition == status.NoLeader, condition == status.Failing:
		return "bad", condition
	case r.State == status.Closed:
		return "off", r.State
	case r.State != status.Open:
		return "info", r.State
	case r.Relay == "":
		return "bad", "no relay"
	case r.Oldest > late:
		return "bad", "stuck"
	case condition != "":
		return "warn", condition
	}
	return "ok", r.State
}

// heat grows with the age of the oldest waiting row and with the number of waiting rows.
func heat(s outbox.Slot) int {
	switch {
	case s.Oldest > late:
		return 4
	case s.Oldest > 10*time.Second:
		return 3
	case s.Oldest > 2*time.Second || s.Pending > 1000:
		return 2
	case s.Pending > 0:
		return 1
	}
	return 0
}
