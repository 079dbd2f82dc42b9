package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/work"
)

// SureAfter is how long a cluster must report a loss before Tidings believes it. A leader that is
// cut off from the other brokers continues to lead for up to 20 s: nats-server checks every 10 s
// whether it has heard from them within 10 s. Meanwhile such a leader misses all changes.
const SureAfter = 20 * time.Second

// Doubt decides when to believe a broker that reports a stream as gone or damaged. One Doubt is
// about one stream. The zero value is ready for use by one goroutine at a time.
type Doubt struct {
	After time.Duration // SureAfter if 0

	since, last time.Time
}

// Sure records another report of the loss. It returns true once the report has lasted for After, or
// at once if the broker is not a cluster.
func (d *Doubt) Sure(js jetstream.JetStream) bool { return d.sure(isCluster(js), time.Now()) }

// isCluster reports whether the connected server belongs to a cluster, or may belong to one.
func isCluster(js jetstream.JetStream) bool {
	nc := js.Conn()
	return nc.ConnectedClusterName() != "" || !nc.IsConnected()
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

const (
	probeInterval = time.Second      // between two reads of a stream that seems to have lost messages
	quorumWait    = 45 * time.Second // for elections and answers of further leaders; an election takes 4 s to 9 s
)

// ErrNoQuorum reports a loss that one leader of a stream reports, while no majority of its replicas
// could be asked.
var ErrNoQuorum = errors.New("broker: a replica of a stream reports a loss of messages, and no majority of the replicas confirmed it: " +
	"wait until all replicas are current, and run this again")

// Probe reads a stream from its leader, and reports whether messages seem lost. It returns the
// description of the stream on which that rests, or an empty one if the stream is gone.
type Probe func(ctx context.Context) (s Stream, lost bool, err error)

// Confirm calls probe until it reports no loss, or has reported one for SureAfter, however long a
// call takes. It changes nothing. The result is that of the last call. So act on a loss only if the
// action can be undone, as a stop of a partition can. If ctx ends sooner than SureAfter, as that of
// a page does, Confirm returns the first report.
func Confirm(ctx context.Context, js jetstream.JetStream, probe Probe) (lost bool, err error) {
	return confirm(ctx, func() bool { return isCluster(js) }, probe)
}

func confirm(ctx context.Context, cluster func() bool, probe Probe) (lost bool, err error) {
	end, limited := ctx.Deadline()
	brief := limited && time.Until(end) < SureAfter
	var first time.Time
	for {
		_, lost, err := probe(ctx)
		if err != nil || !lost || brief || !cluster() {
			return lost, err
		}
		if first.IsZero() {
			first = time.Now()
		}
		if time.Since(first) >= SureAfter {
			return true, nil
		}
		if err := work.Sleep(ctx, probeInterval); err != nil {
			return lost, err
		}
	}
}

// ConfirmByQuorum is Confirm for a loss on which an irreversible action rests. A replica of a
// stream may lack messages that the others have, and may lead
// (docs/adr/0023-a-leader-from-the-past.md). So ConfirmByQuorum then asks the leader to step down
// and calls probe again, until it reports no loss or leaders that are a majority of the replicas
// have all reported one. It returns ErrNoQuorum if the replicas elect no further leader. A login
// needs the permission to make a leader step down.
func ConfirmByQuorum(ctx context.Context, js jetstream.JetStream, probe Probe) (lost bool, err error) {
	if lost, err = Confirm(ctx, js, probe); err != nil || !lost {
		return lost, err
	}
	agree := make(map[string]bool)
	for until := time.Now().Add(quorumWait); time.Now().Before(until); {
		began := time.Now()
		s, lost, err := probe(ctx)
		switch {
		case IsTransient(err) && ctx.Err() == nil: // between two leaders
		case err != nil || !lost || s.Replicas <= 1:
			return lost, err
		default:
			if agree[s.Leader] = true; len(agree) > s.Replicas/2 {
				return true, nil
			}
			if err := stepDown(ctx, js, s.Name); err != nil {
				return lost, err
			}
			until = until.Add(time.Since(began)) // the wait is for elections, not for reads
		}
		if err := work.Sleep(ctx, probeInterval); err != nil {
			return lost, err
		}
	}
	return true, ErrNoQuorum
}

// stepDown asks a stream's leader to hand over to another replica. It ignores answers: the next
// probe shows the result.
func stepDown(ctx context.Context, js jetstream.JetStream, stream string) error {
	short, cancel := context.WithTimeout(ctx, getTimeout)
	defer cancel()
	_, err := js.Conn().RequestWithContext(short, "$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil)
	if err != nil && (!IsTransient(err) || ctx.Err() != nil) {
		return fmt.Errorf("ask the leader of stream %s to step down: %w", stream, err)
	}
	return nil
}
