package broker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidings/tidings/internal/work"
)

// TestALossIsConfirmedHoweverLongALookTakes: a look at a large stream takes longer than the reports
// of a loss must last.
func TestALossIsConfirmedHoweverLongALookTakes(t *testing.T) {
	for look, within := range map[time.Duration]time.Duration{time.Second: 25 * time.Second, 25 * time.Second: 60 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			began, looks := time.Now(), 0
			lost, err := confirm(t.Context(), func() bool { return true }, func(ctx context.Context) (Stream, bool, error) {
				looks++
				return Stream{}, true, work.Sleep(ctx, look)
			})
			if took := time.Since(began); !lost || err != nil || looks < 2 || took < SureAfter || took > within {
				t.Errorf("looks of %s: lost %v, %v after %d looks and %s", look, lost, err, looks, took)
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
		looks := 0
		lost, err := confirm(ctx, func() bool { return true }, func(context.Context) (Stream, bool, error) {
			looks++
			return Stream{}, true, nil
		})
		if !lost || err != nil || looks != 1 {
			t.Errorf("lost %v, %v after %d looks", lost, err, looks)
		}
	})
}
