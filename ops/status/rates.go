package status

import "time"

// Rates is how many events per second were published and applied between two states.
type Rates struct {
	Published float64            `json:"published"`
	Applied   map[string]float64 `json:"applied"` // by consumer
}

// Moved returns the rates between two states; now was read the time apart after before. A value
// that is unknown in one of the states counts as unchanged.
func Moved(before, now State, apart time.Duration) *Rates {
	last := make(map[int]uint64)
	for _, p := range before.Partitions {
		last[p.Partition] = p.LastSeq
	}
	var published float64
	for _, p := range now.Partitions {
		if was, known := last[p.Partition]; known && p.LastSeq > was {
			published += float64(p.LastSeq - was)
		}
	}
	behind := make(map[string]int64)
	for _, c := range before.Consumers {
		if c.Unknown == "" {
			behind[c.Consumer] = c.Messages
		}
	}
	r := &Rates{Published: published / apart.Seconds(), Applied: make(map[string]float64)}
	for _, c := range now.Consumers {
		if was, known := behind[c.Consumer]; known && c.Unknown == "" {
			r.Applied[c.Consumer] = max(published+float64(was-c.Messages), 0) / apart.Seconds()
		}
	}
	return r
}
