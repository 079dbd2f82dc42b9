package samples

import (
	"fmt"
	"time"
)

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
