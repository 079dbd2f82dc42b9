package work

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestAKeyHasOneWorkerUntilThatHasReturned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hired []int
		crew := Crew[int, string]{Ended: NewSignal()}
		finish := make(chan struct{})
		assign := func(keys ...int) {
			crew.Assign(t.Context(), keys, func(n int) (string, func(context.Context)) {
				hired = append(hired, n)
				return "worker", func(ctx context.Context) {
					<-ctx.Done()
					<-finish // the batch in hand
				}
			})
			synctest.Wait()
		}
		check := func(when string, want ...int) {
			t.Helper()
			if !slices.Equal(hired, want) {
				t.Errorf("%s: hired %v, want %v", when, hired, want)
			}
		}
		assign(1, 2)
		assign(2, 1)
		check("assigned twice", 1, 2)
		assign(2)
		assign(1, 2)
		if w, ok := crew.Of(1); w != "worker" || !ok {
			t.Errorf("the worker that stops is %q, %t", w, ok)
		}
		check("lost and regained while its worker stops", 1, 2)
		finish <- struct{}{}
		<-crew.Ended
		if _, ok := crew.Of(1); ok {
			t.Error("a worker that has returned is still there")
		}
		assign(1, 2)
		check("regained after that", 1, 2, 1)
		crew.Stop(2)
		crew.Stop(3)
		finish <- struct{}{}
		<-crew.Ended
		if n := len(slices.Collect(crew.All)); n != 1 {
			t.Errorf("%d workers are left, want 1", n)
		}
		close(finish)
		crew.Close()
		if n := len(slices.Collect(crew.All)); n != 0 {
			t.Errorf("%d workers are left after Close", n)
		}
	})
}

func TestTheEndOfTheContextStopsTheWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		crew, ended := Crew[string, int]{}, 0
		for _, key := range []string{"a", "a", "b"} {
			crew.Start(ctx, key, 0, func(ctx context.Context) {
				<-ctx.Done()
				ended++
			})
		}
		crew.Keep([]string{"a"})
		synctest.Wait()
		if ended != 1 {
			t.Errorf("%d workers have ended, want that of b", ended)
		}
		stop()
		synctest.Wait()
		if ended != 2 {
			t.Errorf("%d workers have ended, want both", ended)
		}
		crew.Close()
	})
}

func TestTheWorkInProgressHasItsOwnClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		drain, cancel := Drain(ctx, time.Minute)
		defer cancel()
		time.Sleep(time.Hour)
		stop()
		start := time.Now()
		<-drain.Done()
		if took := time.Since(start); took != time.Minute {
			t.Errorf("it ends %s after the context, want a minute", took)
		}
		done, cancel := Drain(ctx, time.Minute)
		cancel()
		if done.Err() == nil {
			t.Error("cancel does not end it")
		}
	})
}

func TestWaitsDoubleAndAreRandom(t *testing.T) {
	for n, most := range map[int]time.Duration{1: 50 * time.Millisecond, 4: 400 * time.Millisecond, 8: MaxRetry, 1000: MaxRetry} {
		for range 100 {
			if d := Retry(n); d < most/2 || d > most {
				t.Errorf("the wait after failure %d is %s, want %s..%s", n, d, most/2, most)
			}
		}
	}
}

func TestSleepEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		start := time.Now()
		if err := Sleep(ctx, time.Second); err != nil || time.Since(start) != time.Second {
			t.Errorf("slept %s, want 1s", time.Since(start))
		}
		if err := Sleep(ctx, time.Hour); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Minute {
			t.Errorf("slept until %s, want the end of the context after 1m", time.Since(start))
		}
	})
}
