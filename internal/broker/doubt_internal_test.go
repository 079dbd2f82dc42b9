package broker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidings/tidings/internal/work"
)

// TestALossIsConfirmedHoweverLongAProbeTakes: a probe of a large stream takes longer than the
// reports of a loss must last.
func TestALossIsConfirmedHoweverLongAProbeTakes(t *testing.T) {
	for probe, within := range map[time.Duration]time.Duration{time.Second: 25 * time.Second, 25 * time.Second: 60 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			began, probes := time.Now(), 0
			lost, err := confirm(t.Context(), func() bool { return true }, func(ctx context.Context) (Stream, bool, error) {
				probes++
				return Stream{}, true, work.Sleep(ctx, probe)
			})
			if took := time.Since(began); !lost || err != nil || probes < 2 || took < SureAfter || took > within {
				t.Errorf("probes of %s: lost %v, %v after %d probes and %s", probe, lost, err, probes, took)
			}
		})
	}
}

// TestAPageShowsTheFirstReport: a caller without the time for a confirmation gets what one leader
// says.
func TestAPageShowsTheFirstReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), SureAfter/2)
		defer cancel()
		probes := 0
		lost, err := confirm(ctx, func() bool { return true }, func(context.Context) (Stream, bool, error) {
			probes++
			return Stream{}, true, nil
		})
		if !lost || err != nil || probes != 1 {
			t.Errorf("lost %v, %v after %d probes", lost, err, probes)
		}
	})
}
