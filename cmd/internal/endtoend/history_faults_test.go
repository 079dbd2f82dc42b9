//go:build faults

package endtoend_test

import (
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
)

// historyFaults are what TestAnOrderExplainsWhatTheAPIAnswersDuringFaults does to the line, and in
// this order.
var historyFaults = []string{"restart", "pause", "cut", "links", "kill", "relay", "slow", "kill all", "freeze", "promote", "links"}

func TestAnOrderExplainsWhatTheAPIAnswersDuringFaults(t *testing.T) {
	seed, _ := testkit.Seed(t)
	histories(t, seed, newPairedLine, func(l *line, calls func() int) {
		for _, what := range historyFaults {
			l.more(150, calls)
			l.historyFault(what)
		}
		l.more(150, calls)
	})
}

// historyFault also has faults that leave writes without a clear answer, because they come at any
// moment.
func (l *line) historyFault(what string) {
	l.t.Helper()
	switch {
	case what == "links":
		l.cutLinks()
	case what != "promote":
		l.fault(what)
	case !l.promoted:
		l.t.Log("fault: promote")
		l.promote()
	}
}

// cutLinks cuts the links to the database and to NATS for a moment, each in the middle of what
// happens. Writes then have no clear answer.
func (l *line) cutLinks() {
	l.t.Helper()
	for _, link := range []*testkit.Proxy{l.toDB, l.toNATS} {
		link.Cut()
		l.pass(time.Duration(50+l.rng.IntN(150)) * time.Millisecond)
		link.Heal()
		l.pass(100 * time.Millisecond)
	}
}
