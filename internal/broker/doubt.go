package broker

import (
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// SureAfter is how long a cluster says that something is lost before that is believed. A leader that is cut off from the other brokers
// goes on for up to 20 s as if it led (nats-server: it looks every 10 s whether it has heard of them within 10 s), and does not know what
// happened meanwhile.
const SureAfter = 20 * time.Second

// Doubt is about one stream of which a broker says that it is gone, or that it has lost something. The zero value is ready for use, by one
// goroutine at a time.
type Doubt struct {
	After time.Duration // SureAfter when 0

	since, last time.Time
}

// Sure takes in that the broker says so once more, and reports whether it is to be believed: at once when it is no cluster.
func (d *Doubt) Sure(js jetstream.JetStream) bool {
	nc := js.Conn()
	return d.sure(nc.ConnectedClusterName() != "" || !nc.IsConnected(), time.Now())
}

func (d *Doubt) sure(cluster bool, now time.Time) bool {
	after := d.After
	if after == 0 {
		after = SureAfter
	}
	if d.since.IsZero() || now.Sub(d.last) > after { // it was not asked for long, and may have said otherwise
		d.since = now
	}
	d.last = now
	return !cluster || now.Sub(d.since) >= after
}

// Clear takes in that the broker says otherwise.
func (d *Doubt) Clear() { d.since = time.Time{} }
