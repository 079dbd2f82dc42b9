package main

import (
	"math"
	"slices"
	"time"
)

// change is one version of an entity. A transaction of the load makes it, and one event tells it.
type change struct {
	Entity  string `json:"entity"`
	Version int64  `json:"version"`
}

// stored is a message on the stream.
type stored struct {
	change
	at time.Time // when the broker stored it
}

// verdict is what judge finds.
type verdict struct {
	Events   int `json:"events"`   // committed
	Lost     int `json:"lost"`     // neither on the stream nor in the outbox as unpublished
	Stuck    int `json:"stuck"`    // not on the stream, but still in the outbox or set aside there
	Doubled  int `json:"doubled"`  // further messages of an event
	Inverted int `json:"inverted"` // events that came after a later version of their entity
	Invented int `json:"invented"` // events on the stream that no transaction committed

	Stalled time.Duration `json:"stalled_ns"` // the longest time of the load without a message while a committed event waited
	P50     time.Duration `json:"p50_ns"`     // from the COMMIT to the stream, or to the end of the observation
	P99     time.Duration `json:"p99_ns"`
	Max     time.Duration `json:"max_ns"`
}

// evidence is what a run leaves behind.
type evidence struct {
	committed map[change]bool      // the truth: what the database has in the end
	sent      map[change]time.Time // when the writer sent the COMMIT, unless it got no answer
	stream    []stored             // in the stream's order
	waiting   map[change]bool      // what the outbox has as unpublished
	poison    map[change]bool      // events that no broker takes: they stall nothing by waiting
	loaded    time.Time            // the end of the load; a drain has none
	end       time.Time            // of the observation
}

// judge compares the stream with the truth.
func judge(e evidence) verdict {
	v := verdict{Events: len(e.committed)}
	first := make(map[change]time.Time, len(e.stream))
	newest := make(map[string]int64)
	var order []stored // first messages only
	for _, m := range e.stream {
		if !e.committed[m.change] {
			v.Invented++
			continue
		}
		if _, again := first[m.change]; again {
			v.Doubled++
			continue
		}
		first[m.change] = m.at
		order = append(order, m)
		if m.Version < newest[m.Entity] {
			v.Inverted++
		}
		newest[m.Entity] = max(newest[m.Entity], m.Version)
	}
	var delays []time.Duration
	for c := range e.committed {
		at, there := first[c]
		if !there {
			at = e.end
			if e.waiting[c] {
				v.Stuck++
			} else {
				v.Lost++
			}
		}
		if sent, known := e.sent[c]; known && !e.poison[c] {
			delays = append(delays, at.Sub(sent))
		}
	}
	slices.Sort(delays)
	v.P50, v.P99, v.Max = quantile(delays, 0.5), quantile(delays, 0.99), quantile(delays, 1)
	v.Stalled = stalled(e, first, order)
	return v
}

// stalled returns the longest time of the load between two messages in which a committed event
// waited. A gap counts from the first COMMIT of an event that came after it. After the load a gap
// says nothing: one last event that waits for a retry is no stall of the others.
func stalled(e evidence, first map[change]time.Time, order []stored) (longest time.Duration) {
	waits := time.Time{} // the earliest COMMIT of the events that come after the gap
	earlier := func(c change) {
		if at, known := e.sent[c]; known && (waits.IsZero() || at.Before(waits)) {
			waits = at
		}
	}
	for c := range e.committed {
		if _, there := first[c]; !there && !e.poison[c] {
			earlier(c)
		}
	}
	gap := func(from, to time.Time) {
		if waits.IsZero() {
			return
		}
		if waits.After(from) {
			from = waits
		}
		if to.After(e.loaded) {
			to = e.loaded
		}
		longest = max(longest, to.Sub(from))
	}
	to := e.end
	for _, m := range slices.Backward(order) {
		gap(m.at, to)
		earlier(m.change)
		to = m.at
	}
	gap(time.Time{}, to)
	return longest
}

// quantile returns the smallest value that is not below the share q of the sorted values.
func quantile[T any](sorted []T, q float64) (v T) {
	if len(sorted) == 0 {
		return v
	}
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
