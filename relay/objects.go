package relay

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

const (
	objectsQueue   = 1024        // publishes that wait
	objectsWaiting = 16 << 20    // bytes of their payloads; one more publish may exceed them
	objectsQuiet   = time.Minute // between two warnings, and after the server denied a subject
)

// objects publishes stored events to the subjects of their objects (event.ObjectSubject), for plain
// subscribers. It never delays or fails the relay: it drops events that it cannot publish at once.
// It has a connection of its own, because a server slows down the publisher if a plain subscriber
// reads too slowly.
type objects struct {
	*Relay
	queue   chan published
	waiting atomic.Int64 // bytes in the queue and of the publish that left it last
	warned  atomic.Int64 // when the last warning was, in Unix ns
	denied  atomic.Int64 // when the server last denied a subject, in Unix ns
}

// published are rows with their places on a stream. naming is of names.of.
type published struct {
	stream string
	rows   []outbox.Row
	at     []outbox.Published
	naming map[string]event.Naming
}

// events returns the number of its events from row i that have an object.
func (p *published) events(i int) (n int) {
	for ; i < len(p.rows); i++ {
		if hasObject(&p.rows[i].Event) {
			n++
		}
	}
	return n
}

// hasObject is false for events of a partition.
func hasObject(e *event.Event) bool {
	return !event.System(e.AggregateType) && e.AggregateType != event.AggregatePerson
}

func (p *published) bytes() (n int64) {
	for i := range p.rows {
		n += int64(len(p.rows[i].Payload))
	}
	return n
}

func newObjects(r *Relay) *objects {
	return &objects{Relay: r, queue: make(chan published, objectsQueue)}
}

// offer queues rows, or drops them if too much waits.
func (o *objects) offer(p published) {
	if o == nil {
		return
	}
	size := p.bytes()
	if before := o.waiting.Add(size) - size; before <= objectsWaiting {
		select {
		case o.queue <- p:
			return
		default:
		}
	}
	o.waiting.Add(-size)
	o.drop(p.events(0), errors.New("the connection to NATS is slower than the relay"))
}

// run publishes what the queue has until it is closed.
func (o *objects) run(ctx context.Context) {
	for {
		nc, err := broker.Connect(o.broker, o.owner+" objects", o.base, nats.FlusherTimeout(o.cfg.PublishTimeout),
			nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { o.warn(err) }),
			nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
				if errors.Is(err, nats.ErrPermissionViolation) {
					o.denied.Store(time.Now().UnixNano())
					o.drop(1, err)
					return
				}
				o.warn(err)
			}))
		if err == nil {
			err = o.publish(nc)
			nc.Close()
		}
		if err == nil || work.Sleep(ctx, maxReconnectDelay) != nil {
			return
		}
		o.warn(err)
	}
}

// publish returns nil once the queue is closed and empty, and an error if the connection is closed.
func (o *objects) publish(nc *nats.Conn) error {
	m := &nats.Msg{Header: make(nats.Header, 16)} // one for all messages: the client copies each
	for p := range o.queue {
		err := o.send(nc, m, &p)
		o.waiting.Add(-p.bytes())
		if err != nil {
			return err
		}
	}
	return nil
}

func (o *objects) send(nc *nats.Conn, m *nats.Msg, p *published) error {
	if isQuiet(o.denied.Load(), time.Now()) {
		o.metrics.dropped.Add(float64(p.events(0)))
		return nil
	}
	m.Header[jetstream.StreamHeader] = []string{p.stream}
	for i := range p.rows {
		e := &p.rows[i].Event
		if !hasObject(e) {
			continue
		}
		m.Subject, m.Data = event.ObjectSubject(o.broker.LivePrefix, e.TenantID, e.AggregateType, e.Type, e.AggregateID), e.Payload
		e.SetHeaders(m.Header, p.naming[e.AggregateType])
		m.Header[jetstream.SequenceHeader] = []string{strconv.FormatUint(p.at[i].Seq, 10)}
		if err := nc.PublishMsg(m); errors.Is(err, nats.ErrConnectionClosed) {
			o.drop(p.events(i), err)
			return err
		} else if err != nil {
			o.drop(1, err)
		}
	}
	return nil
}

// drop counts and logs events that are lost.
func (o *objects) drop(events int, err error) {
	o.metrics.dropped.Add(float64(events))
	o.warn(err)
}

// isQuiet reports whether now is within objectsQuiet after a Unix time in ns. A later one is of a
// clock that was set back.
func isQuiet(since int64, now time.Time) bool {
	age := now.Sub(time.Unix(0, since))
	return age >= 0 && age < objectsQuiet
}

// warn logs that events are lost, once per objectsQuiet.
func (o *objects) warn(err error) {
	now, last := time.Now(), o.warned.Load()
	if !isQuiet(last, now) && o.warned.CompareAndSwap(last, now.UnixNano()) {
		o.log.Warn("live subscribers of single objects miss events", "err", err)
	}
}
