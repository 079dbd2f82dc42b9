package samples

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// gap is the time between two samples of a source from which on the time between is unknown.
	gap = 3 * Every
	// lateFor is how much later than its moment a sample may be committed.
	lateFor = 3 * Every
	// sameVersions is for how many moments a version may write nothing and still be no new one.
	sameVersions = 12
)

// Day has the samples of the last day in memory. It is safe for concurrent use.
type Day struct {
	pool *pgxpool.Pool

	reading  sync.Mutex // of Refresh
	mu       sync.Mutex
	read     time.Time // when the samples were last read, by this process's clock
	moved    time.Time // when end last rose, likewise
	end      time.Time // the newest moment
	moments  int
	series   map[series][]Point
	versions map[string]int // the number of the last moment of each
	marks    []Mark
}

type series struct{ name, source string }

// Point is a figure at one moment.
type Point struct {
	At    time.Time
	Value float64
}

// Mark is something that happened, and that a line may explain.
type Mark struct {
	At   time.Time
	Says string // "threadcache paused"
}

// NewDay returns a Day without samples. The pool is one of the truth and acts as the system role.
func NewDay(pool *pgxpool.Pool) *Day {
	return &Day{pool: pool, series: make(map[series][]Point), versions: make(map[string]int)}
}

// Refresh reads the samples that are new since the last call. It does nothing within half of Every,
// and while another call reads: nobody waits for a database that does not answer another.
func (d *Day) Refresh(ctx context.Context) error {
	if !d.reading.TryLock() {
		return nil
	}
	defer d.reading.Unlock()
	d.mu.Lock()
	read, after := d.read, time.Time{}
	if !d.end.IsZero() {
		after = d.end.Add(-lateFor)
	}
	d.mu.Unlock()
	if time.Since(read) < Every/2 {
		return nil
	}
	all, err := Read(ctx, d.pool, after)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.read = time.Now()
	d.add(all)
	return nil
}

// add adds samples that are in order, and forgets those whose day is over. The caller holds d.mu.
func (d *Day) add(all []Sample) {
	for _, s := range all {
		if s.At.After(d.end) {
			d.end, d.moved, d.moments = s.At, time.Now(), d.moments+1
		}
		last, known := d.versions[s.Version]
		if d.versions[s.Version] = d.moments; d.moments > sameVersions && (!known || d.moments-last > sameVersions) {
			d.marks = append(d.marks, Mark{s.At, "version " + s.Version})
		}
		for name, value := range s.Figures {
			key := series{name, s.Source}
			line := d.series[key]
			if n := len(line); n > 0 {
				if !s.At.After(line[n-1].At) {
					continue // it was read before
				}
				d.mark(s.At, name, line[n-1].Value, value)
			}
			d.series[key] = append(line, Point{s.At, value})
		}
	}
	over := d.end.Add(-Kept)
	for key, line := range d.series {
		if line = line[search(line, over):]; len(line) == 0 {
			delete(d.series, key)
		} else {
			d.series[key] = line
		}
	}
	slices.SortStableFunc(d.marks, func(a, b Mark) int { return a.At.Compare(b.At) })
	for len(d.marks) > 0 && d.marks[0].At.Before(over) {
		d.marks = d.marks[1:]
	}
}

// ReplayBegan follows the name of the consumer in the mark of a replay.
const ReplayBegan = " is replayed"

// mark records a change that somebody made. The caller holds d.mu.
func (d *Day) mark(at time.Time, name string, was, is float64) {
	if was == is {
		return
	}
	if consumer, ok := strings.CutPrefix(name, Paused); ok {
		says := consumer + " resumed"
		if is > 0 {
			says = consumer + " paused"
		}
		d.marks = append(d.marks, Mark{at, says})
	} else if consumer, ok := strings.CutPrefix(name, Replaying); ok && is > 0 {
		d.marks = append(d.marks, Mark{at, consumer + ReplayBegan})
	} else if name == Partitions {
		d.marks = append(d.marks, Mark{at, fmt.Sprintf("resized from %.0f to %.0f partitions", was, is)})
	}
}

// search returns the index of the first point that is not before t.
func search(line []Point, t time.Time) int {
	i, _ := slices.BinarySearchFunc(line, t, func(p Point, t time.Time) int { return p.At.Compare(t) })
	return i
}

// Window is a part of the day, in steps.
type Window struct {
	From time.Time
	Step time.Duration
	N    int // steps
}

// Until returns the end of the window.
func (w Window) Until() time.Time { return w.From.Add(time.Duration(w.N) * w.Step) }

// Window returns n steps, of which the last includes the newest sample.
func (d *Day) Window(step time.Duration, n int) Window {
	d.mu.Lock()
	defer d.mu.Unlock()
	last := d.end.Truncate(step)
	return Window{last.Add(-time.Duration(n-1) * step), step, n}
}

// Marks returns what happened in the window, oldest first.
func (d *Day) Marks(w Window) (all []Mark) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.marks {
		if !m.At.Before(w.From) && m.At.Before(w.Until()) {
			all = append(all, m)
		}
	}
	return all
}

// Largest returns the largest value of a figure in each step, of any source. It is NaN in a step
// without a sample.
func (d *Day) Largest(name string, w Window) []float64 {
	values := w.unknown()
	d.each(name, w, func(line []Point, i, step int) {
		if !(values[step] >= line[i].Value) {
			values[step] = line[i].Value
		}
	})
	return values
}

// Rates returns how much a count rose per second in each step, over all sources. It is NaN in a
// step without two samples that follow each other.
func (d *Day) Rates(name string, w Window) []float64 {
	rose, covered, longest := make([]float64, w.N), make([]float64, w.N), make([]float64, w.N)
	d.each(name, w, func(line []Point, i, step int) {
		if i == 0 || line[i].At.Sub(line[i-1].At) > gap {
			return
		}
		apart := line[i].At.Sub(line[i-1].At).Seconds()
		rose[step] += line[i].Value - line[i-1].Value
		covered[step] += apart
		longest[step] = max(longest[step], apart)
	})
	values := w.unknown()
	for i := range values {
		if covered[i] > 0 { // several sources cover the same seconds
			values[i] = max(0, rose[i]/min(covered[i], max(w.Step.Seconds(), longest[i])))
		}
	}
	return values
}

func (w Window) unknown() []float64 { return slices.Repeat([]float64{math.NaN()}, w.N) }

// each calls fn with each point of the window, as the i-th of its line, and with its step.
func (d *Day) each(name string, w Window, fn func(line []Point, i, step int)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for key, line := range d.series {
		if key.name != name {
			continue
		}
		for i := search(line, w.From); i < len(line) && line[i].At.Before(w.Until()); i++ {
			fn(line, i, int(line[i].At.Sub(w.From)/w.Step))
		}
	}
}

const (
	// trendOver is the time over which a trend is measured.
	trendOver = 30 * time.Second
	// trendFor is how long the newest sample tells a trend.
	trendFor = 3 * Every
)

// Trend is how the number of messages that a consumer is behind changes.
type Trend struct {
	Since     time.Time // it is behind since then; zero: unknown
	AtLeast   bool      // or longer: no sample shows that it was not
	PerSecond float64   // how fast the number grows; negative: it shrinks
	Known     bool      // PerSecond is known
}

// Trend returns the trend of a consumer. It is zero if the newest sample is old, or if the consumer
// was not behind then.
func (d *Day) Trend(consumer string) (t Trend) {
	d.mu.Lock()
	defer d.mu.Unlock()
	line := d.series[series{Behind + consumer, Installation}]
	last := len(line) - 1
	if last < 0 || line[last].Value == 0 || d.end.Sub(line[last].At) > trendFor || time.Since(d.moved) > trendFor {
		return t
	}
	first := last
	for first > 0 && line[first-1].Value > 0 {
		first--
	}
	t.Since, t.AtLeast = line[first].At, first == 0
	from := max(first, search(line, line[last].At.Add(-trendOver)))
	if apart := line[last].At.Sub(line[from].At); apart >= 2*Every {
		t.PerSecond, t.Known = (line[last].Value-line[from].Value)/apart.Seconds(), true
	}
	return t
}

// Says describes the trend of a consumer that is some messages behind: "growing by 15/s", "catches
// up in 40 s". It is empty if the number is steady, or if the trend is unknown.
func (t Trend) Says(behind int64, span func(time.Duration) string) string {
	const slow = 1.0 / 60 // of a message per second
	switch {
	case !t.Known || behind == 0 || -slow < t.PerSecond && t.PerSecond < slow:
		return ""
	case t.PerSecond >= 1:
		return fmt.Sprintf("growing by %.0f/s", t.PerSecond)
	case t.PerSecond > 0:
		return fmt.Sprintf("growing by %.0f/min", t.PerSecond*60)
	}
	left := float64(behind) / -t.PerSecond
	if left > Kept.Seconds() {
		return "catches up in more than a day"
	}
	return "catches up in " + span(time.Duration(max(left, 1))*time.Second)
}
