package samples

import (
	"github.com/tidings/tidings/ops/status"
)

// Names of figures. Those of counts rise, and lines show their rates (Day.Rates). Of the figures of
// a consumer, the consumer's name follows.
const (
	Written    = "written"    // count: events that were written to the outbox
	Published  = "published"  // count: events on the streams
	Pending    = "pending"    // messages of the outbox
	Oldest     = "oldest"     // seconds since the oldest of them was due
	Stored     = "stored"     // messages that the streams have now
	Partitions = "partitions" // open ones, and those that will open
	DeadOutbox = "dead outbox"
	Behind     = "behind "    // messages
	Late       = "late "      // seconds
	Applied    = "applied "   // count: events
	Dead       = "dead "      // dead letters
	Paused     = "paused "    // 1 or 0
	Replaying  = "replaying " // 1 or 0

	Requests = "requests" // count: requests that the process answered
	P99      = "p99"      // seconds: 99 of 100 of its requests since the previous sample took less
)

// Of returns the figures of a state. A figure that the state does not know is missing.
func Of(st status.State) map[string]float64 {
	f := make(map[string]float64)
	published, known := streams(st, f)
	if o := st.Outbox; o != nil {
		f[Pending], f[Oldest], f[DeadOutbox] = float64(o.Pending), o.LagSeconds, float64(o.DLQDepth)
		if known && !o.PendingMax {
			f[Written] = published + float64(o.Pending+o.DLQDepth)
		}
	}
	for _, c := range st.Consumers {
		f[Dead+c.Consumer] = float64(c.DeadLetters)
		f[Paused+c.Consumer] = 0
		if c.Paused != nil {
			f[Paused+c.Consumer] = 1
		}
		if c.Unknown != "" {
			delete(f, Dead+c.Consumer) // its fields are 0
			continue
		}
		f[Behind+c.Consumer], f[Late+c.Consumer] = float64(c.Messages), c.Seconds
		if known {
			f[Applied+c.Consumer] = published - float64(c.Messages)
		}
	}
	if st.IsUnread(status.PartConsumers) {
		for _, c := range st.Consumers {
			delete(f, Paused+c.Consumer)
		}
	}
	return f
}

// streams adds the figures of the partitions. known is false if a stream is unknown now.
func streams(st status.State, f map[string]float64) (published float64, known bool) {
	known = len(st.Partitions) > 0 && !st.IsUnavailable(status.ServerNATS)
	var stored, open float64
	for _, p := range st.Partitions {
		published, stored = published+float64(p.LastSeq), stored+float64(p.Messages)
		known = known && p.NoLeader == "" && p.Unknown == ""
		if p.State == status.Open || p.State == status.Waiting {
			open++
		}
	}
	if !st.IsUnavailable(status.ServerTruth) && !st.IsUnread(status.PartPartitions) {
		f[Partitions] = open
	}
	if known {
		f[Published], f[Stored] = published, stored
	}
	return published, known
}
