package bench

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestAnOpenLoopKeepsItsScheduleAndTellsWhatIsLate(t *testing.T) {
	for name, test := range map[string]struct {
		workers int
		want    []time.Duration // of the first calls, from when they were due to their end
	}{
		"a free worker starts each call when it is due":      {3, []time.Duration{250, 250, 250, 250}},
		"the time counts how long a call waits for a worker": {1, []time.Duration{250, 400, 550, 700}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				took := make([]time.Duration, 4)
				made, err := workload{workers: test.workers, rate: 10, calls: 4}.run(t.Context(), func(_, n int, due time.Time) error {
					time.Sleep(250 * time.Millisecond)
					mu.Lock()
					defer mu.Unlock()
					took[n] = time.Since(due) / time.Millisecond
					return nil
				})
				if err != nil || made != 4 {
					t.Errorf("%d calls: %v", made, err)
				}
				if diff := cmp.Diff(test.want, took); diff != "" {
					t.Errorf("milliseconds (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestALoadEndsWithItsTimeOrAnError(t *testing.T) {
	broken := errors.New("broken")
	for name, test := range map[string]struct {
		load workload
		fail int // the call that fails
		made int
		err  error
	}{
		"a closed loop makes one call after the other": {workload{workers: 2, duration: time.Second}, -1, 8, nil},
		"an open loop starts no call after its time":   {workload{workers: 9, rate: 5, duration: time.Second}, -1, 5, nil},
		"busy workers start no call after the time":    {workload{workers: 1, rate: 50, duration: time.Second}, -1, 4, nil},
		"the first error ends the others":              {workload{workers: 1, duration: time.Second}, 1, 2, broken},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				made, err := test.load.run(t.Context(), func(_, n int, _ time.Time) error {
					time.Sleep(250 * time.Millisecond)
					if n == test.fail {
						return broken
					}
					return nil
				})
				if made != test.made || !errors.Is(err, test.err) {
					t.Errorf("%d calls and error %v, want %d and %v", made, err, test.made, test.err)
				}
			})
		})
	}
}

func TestPairsAlternate(t *testing.T) {
	for first, want := range map[bool][]bool{
		true:  {true, false, false, true, true, false},
		false: {false, true, true, false, false, true},
	} {
		var order []bool
		with, without, err := alternate(3, first, func(with bool) (float64, error) {
			order = append(order, with)
			return float64(len(order)), nil
		})
		if diff := cmp.Diff(want, order); diff != "" || err != nil || len(with) != 3 || len(without) != 3 {
			t.Errorf("order (-want +got): %v\n%s", err, diff)
		}
	}
	all, middle := ratios([]float64{1, 2, 9, 4}, []float64{2, 2, 3, 1}, func(f float64) float64 { return f })
	if diff := cmp.Diff([]float64{0.5, 1, 3, 4}, all); diff != "" || middle != 2 {
		t.Errorf("median %v, ratios (-want +got):\n%s", middle, diff)
	}
}

func TestQuantilesAreNearestRanks(t *testing.T) {
	var times []time.Duration
	for ms := range 200 {
		times = append(times, time.Duration(200-ms)*time.Millisecond)
	}
	if q := quantilesOf(times); *q.P50 != 100 || *q.P95 != 190 || *q.P99 != 198 {
		t.Errorf("%v, %v, %v", *q.P50, *q.P95, *q.P99)
	}
	if q := quantilesOf(nil); q != (quantiles{}) {
		t.Errorf("without times: %v", q)
	}
}
