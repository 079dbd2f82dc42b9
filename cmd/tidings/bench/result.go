package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

// result is the output line of a case. It omits members that do not apply.
type result struct {
	Case            string   `json:"case"`
	Events          int      `json:"events"`
	Seconds         float64  `json:"seconds"`
	EventsPerSecond float64  `json:"events_per_second"`
	P50             *float64 `json:"p50_ms,omitempty"`
	P95             *float64 `json:"p95_ms,omitempty"`
	P99             *float64 `json:"p99_ms,omitempty"`
	FirstP99        *float64 `json:"first_minute_p99_ms,omitempty"`
	LastP99         *float64 `json:"last_minute_p99_ms,omitempty"`
	Missing         *int     `json:"missing,omitempty"`
	Duplicates      *int     `json:"duplicates,omitempty"`
	Inversions      *int     `json:"inversions,omitempty"`
	CatchUps        *int     `json:"catch_ups,omitempty"`
	Conflicts       *int     `json:"conflicts,omitempty"`
	PeakRSS         *float64 `json:"peak_rss_mib,omitempty"`
	RelayCPU        *float64 `json:"relay_cpu_us_per_event,omitempty"`
	ConsumerCPU     *float64 `json:"consumer_cpu_us_per_event,omitempty"`
	Consumer        string   `json:"consumer,omitempty"`
	Instances       int      `json:"instances,omitempty"`
	Relays          int      `json:"relays,omitempty"`
	Takeovers       *int     `json:"takeovers,omitempty"`
	Payload         int      `json:"payload_bytes,omitempty"`
	Processed       int      `json:"processed_before,omitempty"`
	Tenants         int      `json:"tenants,omitempty"`
	Partitions      int      `json:"partitions,omitempty"`
	settings
}

func (r result) write(w io.Writer) error { return writeLine(w, r) }

func writeLine(w io.Writer, r any) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", b)
	return err
}

// rate sets the number of events, the time, and the rate.
func (r *result) rate(events int, took time.Duration) {
	r.Events = events
	r.Seconds = round(took.Seconds(), 3)
	r.EventsPerSecond = round(float64(events)/took.Seconds(), 0)
}

// perEvent returns the microseconds per event.
func perEvent(d time.Duration, events int) *float64 {
	return ptr(round(float64(d)/float64(time.Microsecond)/float64(events), 1))
}

// quantiles returns the quantiles (nearest rank) of times in milliseconds, or nil if times is
// empty.
func quantiles(times []time.Duration) (p50, p95, p99 *float64) {
	if len(times) == 0 {
		return nil, nil, nil
	}
	times = slices.Sorted(slices.Values(times))
	at := func(q float64) *float64 {
		return ptr(round(float64(times[int(math.Ceil(q*float64(len(times))))-1])/float64(time.Millisecond), 3))
	}
	return at(0.5), at(0.95), at(0.99)
}

func round(v float64, digits int) float64 {
	p := math.Pow10(digits)
	return math.Round(v*p) / p
}

func ptr[T any](v T) *T { return &v }
