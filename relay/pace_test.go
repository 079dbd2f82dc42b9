package relay

import (
	"testing"
	"time"
)

func TestPaceSendsAsABatchWhatIsCheaperAsABatch(t *testing.T) {
	for name, c := range map[string]struct {
		from          int
		single, batch time.Duration // measured costs of one message alone, and of a batch of 8 to 15
		n             int
		want          bool
	}{
		"one message, without a measurement":            {n: 1},
		"a few messages, without a measurement":         {n: 15},
		"many messages, without a measurement":          {n: 16, want: true},
		"one message on a link that is slow for it":     {single: time.Second, batch: time.Millisecond, n: 1},
		"messages that cost more than a batch":          {single: time.Millisecond, batch: 9 * time.Millisecond, n: 10, want: true},
		"messages that cost less than a batch":          {single: time.Millisecond, batch: 11 * time.Millisecond, n: 10},
		"fewer messages than the test's limit":          {from: 12, single: time.Second, batch: time.Millisecond, n: 11},
		"as many messages as the test's limit":          {from: 12, single: time.Millisecond, batch: time.Second, n: 12, want: true},
		"one message, though the test's limit is one":   {from: 1, n: 1},
		"two messages, because the test's limit is one": {from: 1, n: 2, want: true},
	} {
		p := pace{from: c.from}
		if c.single > 0 {
			p.observe(1, 1, c.single)
			p.observe(10, 2, c.batch)
		}
		if got := p.batch(c.n); got != c.want {
			t.Errorf("%s: as a batch: %t, want %t", name, got, c.want)
		}
	}
}

// TestPaceTriesTheSlowerWayUnlessItCostsMuch: without that, a measurement of a bad moment would
// stay forever.
func TestPaceTriesTheSlowerWayUnlessItCostsMuch(t *testing.T) {
	for name, c := range map[string]struct {
		batch time.Duration
		want  int
	}{
		"less than four times as much": {39 * time.Millisecond, 2},
		"four times as much":           {40 * time.Millisecond, 0},
	} {
		p := pace{}
		p.observe(1, 1, time.Millisecond)
		p.observe(10, 2, c.batch)
		tries := 0
		for range 2 * exploreEvery {
			if p.batch(10) {
				tries++
			}
		}
		if tries != c.want {
			t.Errorf("%s: %d batches in %d decisions, want %d", name, tries, 2*exploreEvery, c.want)
		}
		if p.batch(10); p.turn(10, c.batch) || !p.turn(10, c.batch+time.Millisecond) {
			t.Errorf("%s: the rest becomes a batch once the single messages took longer than one", name)
		}
	}
}
