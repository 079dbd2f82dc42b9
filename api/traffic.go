package api

import (
	"math"
	"sync/atomic"
	"time"
)

// A bucket of traffic is a tenth wider than the one before it. The first ends at 0.1 ms, and the
// last has everything above 16 s.
const (
	trafficFirst   = 100 * time.Microsecond
	trafficGrowth  = 1.1
	trafficBuckets = 128
)

// traffic counts the requests of this process and their durations. It is safe for concurrent use.
// The metrics have more detail; this is what the console draws.
type traffic struct {
	requests atomic.Int64
	took     [trafficBuckets]atomic.Int64 // since the last call of sample
}

func (t *traffic) add(took time.Duration) {
	i := 0
	if took > trafficFirst {
		i = min(int(math.Ceil(math.Log(float64(took)/float64(trafficFirst))/math.Log(trafficGrowth))), trafficBuckets-1)
	}
	t.requests.Add(1)
	t.took[i].Add(1)
}

// sample returns the number of requests since the start, and the duration that 99 of 100 requests
// did not exceed since the last call, to a tenth. It is 0 without a request.
func (t *traffic) sample() (requests int64, p99 time.Duration) {
	requests = t.requests.Load()
	var counts [trafficBuckets]int64
	var all int64
	for i := range counts {
		counts[i] = t.took[i].Swap(0)
		all += counts[i]
	}
	slow := all / 100 // requests that may take longer
	for i := trafficBuckets - 1; i >= 0 && all > 0; i-- {
		if slow -= counts[i]; slow < 0 {
			return requests, time.Duration(float64(trafficFirst) * math.Pow(trafficGrowth, float64(i)))
		}
	}
	return requests, 0
}
