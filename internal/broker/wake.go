package broker

import (
	"context"
	"math/bits"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/internal/work"
)

// WakeSubject carries wake-ups for the relays: the slots with new rows. It is plain NATS, outside
// the streams. A lost wake-up delays rows by at most a poll interval.
const WakeSubject = "tidings.wake"

// wakeEvery is the least time between two wake-ups of a process. Commits in between share the next
// one. A relay's rounds are as far apart (RELAY_ROUND_INTERVAL), so more wake-ups would only cost
// processor time.
const wakeEvery = 2 * time.Millisecond

// Waker tells the relays that rows were committed. Wake may be called from any goroutine and never
// blocks.
type Waker struct {
	nc      *nats.Conn
	stream  string        // the name of the relays' streams: relays of other cells ignore the wake-up
	touched atomic.Uint32 // a bit per slot
	signal  work.Signal
}

// NewWaker returns a waker over nc for the relays that publish to cfg's streams. It sends wake-ups
// while Run runs.
func NewWaker(nc *nats.Conn, cfg Config) *Waker {
	return &Waker{nc: nc, stream: cfg.Stream, signal: work.NewSignal()}
}

// Wake records that the slot has new rows. Call it after their commit.
func (w *Waker) Wake(slot int) {
	w.touched.Or(1 << slot)
	w.signal.Notify()
}

// Run sends wake-ups, at most one per wakeEvery, until ctx ends. It returns nil.
func (w *Waker) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.signal:
		}
		if touched := w.touched.Swap(0); touched != 0 {
			_ = w.nc.Publish(WakeSubject, encodeWake(touched, w.stream)) // on an error no relay can publish the rows either
		}
		work.Sleep(ctx, wakeEvery)
	}
}

// encodeWake writes the slots of the set and the name of the streams: "3,17,=EVENTS".
func encodeWake(touched uint32, stream string) []byte {
	var b []byte
	for ; touched != 0; touched &= touched - 1 {
		if len(b) > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(bits.TrailingZeros32(touched)), 10)
	}
	return append(append(b, ",="...), stream...)
}

// DecodeWake returns the slots of a wake-up as a set of bits: empty if the wake-up is for relays of
// other streams. It ignores malformed parts. A wake-up without a name of streams is for all relays.
func DecodeWake(data []byte, cfg Config) (touched uint32) {
	for s := range strings.SplitSeq(string(data), ",") {
		if of, named := strings.CutPrefix(s, "="); named && of != cfg.Stream {
			return 0
		}
		if n, err := strconv.ParseUint(s, 10, 8); err == nil && n < 32 {
			touched |= 1 << n
		}
	}
	return touched
}
