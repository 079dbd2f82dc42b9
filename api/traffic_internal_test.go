package api

import (
	"sync"
	"testing"
	"time"
)

func TestTrafficKnowsTheSlowestOfAHundred(t *testing.T) {
	var all traffic
	if n, p99 := all.sample(); n != 0 || p99 != 0 {
		t.Errorf("without a request: %d, %s", n, p99)
	}
	var g sync.WaitGroup
	for range 10 {
		g.Go(func() {
			for range 99 {
				all.add(20 * time.Millisecond)
			}
			all.add(time.Hour)
		})
	}
	g.Wait()
	if n, p99 := all.sample(); n != 1000 || p99 < 20*time.Millisecond || p99 > 22*time.Millisecond {
		t.Errorf("of 990 quick and 10 slow ones: %d, %s", n, p99)
	}
	for range 98 {
		all.add(0)
	}
	all.add(time.Second)
	all.add(time.Second)
	if n, p99 := all.sample(); n != 1100 || p99 < time.Second || p99 > 1100*time.Millisecond {
		t.Errorf("of 98 quick and 2 slow ones: %d, %s", n, p99)
	}
	all.add(time.Microsecond)
	if n, p99 := all.sample(); n != 1101 || p99 != trafficFirst {
		t.Errorf("of one: %d, %s", n, p99)
	}
}

func BenchmarkTraffic(b *testing.B) {
	var all traffic
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			all.add(3 * time.Millisecond)
		}
	})
}
