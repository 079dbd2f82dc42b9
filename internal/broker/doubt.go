package broker

import (
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// SureAfter is how long a cluster must report a loss before Tidings believes it. A leader that is cut off from the
// other brokers continues to lead for up to 20 s: nats-server checks every 10 s whether it has heard from them within
// 10 s. Meanwhile such a leader misses all changes.
const SureAfter = 20 * time.Second

// Doubt decides when to believe a broker that reports a stream as gone or damaged. One Doubt is about one stream. The
// zero value is ready for use by one goroutine at a time.
type Doubt struct {
	After time.Duration // SureAfter if 0

	since, last time.Time
}

// Sure records another report of the loss. It returns true once the report has lasted for After, or at once if the
// broker is not a cluster.
func (d *Doubt) Sure(js jetstream.JetStream) bool {
	nc := js.Conn()
	return d.sure(nc.ConnectedClusterName() != "" || !nc.IsConnected(), time.Now())
}

func (d *Doubt) sure(cluster bool, now time.Time) bool {
	after := d.After
	if after == 0 {
		after = SureAfter
	}
	if d.since.IsZero() || now.Sub(d.last) > after { // no recent report: the broker may have reported otherwise in between
		d.since = now
	}
	d.last = now
	return !cluster || now.Sub(d.since) >= after
}

// Clear records that the broker no longer reports the loss.
func (d *Doubt) Clear() { d.since = time.Time{} }
