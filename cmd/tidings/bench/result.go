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
	Case            string  `json:"case"`
	Events          int     `json:"events"`
	Seconds         float64 `json:"seconds"`
	EventsPerSecond float64 `json:"events_per_second"`
	quantiles
	FirstP99         *float64 `json:"first_minute_p99_ms,omitempty"`
	LastP99          *float64 `json:"last_minute_p99_ms,omitempty"`
	Missing          *int     `json:"missing,omitempty"`
	Duplicates       *int     `json:"duplicates,omitempty"`
	Inversions       *int     `json:"inversions,omitempty"`
	CatchUps         *int     `json:"catch_ups,omitempty"`
	Conflicts        *int     `json:"conflicts,omitempty"`
	PeakRSS          *float64 `json:"peak_rss_mib,omitempty"`
	RelayCPU         *float64 `json:"relay_cpu_us_per_event,omitempty"`
	ConsumerCPU      *float64 `json:"consumer_cpu_us_per_event,omitempty"`
	RelayPostgres    *float64 `json:"relay_postgres_us_per_event,omitempty"`
	ConsumerPostgres *float64 `json:"consumer_postgres_us_per_event,omitempty"`
	Delivery         *float64 `json:"delivery_us_per_event,omitempty"` // the sum of the four above
	WritersPostgres  *float64 `json:"writers_postgres_us_per_event,omitempty"`
	RTT              *float64 `json:"rtt_ms,omitempty"` // measured
	Consumer         string   `json:"consumer,omitempty"`
	Instances        int      `json:"instances,omitempty"`
	Relays           int      `json:"relays,omitempty"`
	Takeovers        *int     `json:"takeovers,omitempty"`
	Payload          int      `json:"payload_bytes,omitempty"`
	Processed        int      `json:"processed_before,omitempty"`
	Tenants          int      `json:"tenants,omitempty"`
	Partitions       int      `json:"partitions,omitempty"`
	IDs              idForm   `json:"ids,omitempty"`
	settings
}

// rate sets the number of events, the time, and the rate.
func (r *result) rate(events int, took time.Duration) {
	r.Events, r.Seconds, r.EventsPerSecond = events, round(took.Seconds(), 3), perSecond(events, took)
}

// configured is a result that has the servers' settings.
type configured interface{ configure(settings) }

func (c *settings) configure(s settings) { *c = s }

// print writes the output line of a result, with the servers' settings.
func (s *servers) print(r configured) error {
	r.configure(s.set)
	return writeLine(s.out, r)
}

func writeLine(w io.Writer, r any) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", b)
	return err
}

// quantiles are quantiles (nearest rank) of times, in milliseconds.
type quantiles struct {
	P50 *float64 `json:"p50_ms,omitempty"`
	P95 *float64 `json:"p95_ms,omitempty"`
	P99 *float64 `json:"p99_ms,omitempty"`
}

// quantilesOf returns the quantiles of times: none if there are no times.
func quantilesOf(times []time.Duration) quantiles {
	if len(times) == 0 {
		return quantiles{}
	}
	times = slices.Sorted(slices.Values(times))
	at := func(q float64) *float64 {
		return ptr(round(float64(times[int(math.Ceil(q*float64(len(times))))-1])/float64(time.Millisecond), 3))
	}
	return quantiles{at(0.5), at(0.95), at(0.99)}
}

// perSecond returns the rate of n in the time took.
func perSecond(n int, took time.Duration) float64 { return round(float64(n)/took.Seconds(), 0) }

// perEvent returns the microseconds per event.
func perEvent(d time.Duration, events int) *float64 {
	return ptr(round(float64(d)/float64(time.Microsecond)/float64(events), 1))
}

// alternate runs measurements in pairs, one with the subject of the comparison and one without it.
// The order changes from pair to pair, so that a trend of the machine favors neither. withFirst
// says how the first pair begins.
func alternate[R any](pairs int, withFirst bool, measure func(with bool) (R, error)) (with, without []R, err error) {
	for i := range 2 * pairs {
		is := (i%4 == 0 || i%4 == 3) == withFirst
		r, err := measure(is)
		if err != nil {
			return nil, nil, err
		}
		if is {
			with = append(with, r)
		} else {
			without = append(without, r)
		}
	}
	return with, without, nil
}

// ratios returns the ratio of a figure in each measurement with the subject to that without it, and
// their median.
func ratios[R any](with, without []R, figure func(R) float64) (all []float64, middle float64) {
	for i := range with {
		all = append(all, round(figure(with[i])/figure(without[i]), 3))
	}
	return all, round(median(all), 3)
}

// median returns the median of some numbers.
func median(all []float64) float64 {
	all = slices.Sorted(slices.Values(all))
	return (all[(len(all)-1)/2] + all[len(all)/2]) / 2
}

func round(v float64, digits int) float64 {
	p := math.Pow10(digits)
	return math.Round(v*p) / p
}

func ptr[T any](v T) *T { return &v }
