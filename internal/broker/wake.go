package broker

import (
	"context"
	"math/bits"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// WakeSubject carries wake-ups for the relays: which slots have new rows. It is plain NATS, outside the stream; a wake-up
// that is lost costs a poll interval and nothing else.
const WakeSubject = "tidings.wake"

// wakeEvery bounds how often a process wakes the relays: what is committed meanwhile shares the next wake-up. A relay's rounds are as far apart
// (RELAY_ROUND_INTERVAL), so more would only cost it the processor.
const wakeEvery = 2 * time.Millisecond

// Waker tells the relays that rows were committed. Wake may be called from any goroutine and never waits.
type Waker struct {
	nc      *nats.Conn
	stream  string        // of the relays' configuration: those of other cells have nothing to do
	touched atomic.Uint32 // a bit per slot
	signal  chan struct{}
}

// NewWaker returns a waker over nc of the relays that publish to cfg's streams. Wakes are sent while Run runs.
func NewWaker(nc *nats.Conn, cfg Config) *Waker {
	return &Waker{nc: nc, stream: cfg.Stream, signal: make(chan struct{}, 1)}
}

// Wake notes that the slot has new rows, after their commit.
func (w *Waker) Wake(slot int) {
	w.touched.Or(1 << slot)
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

// Run sends wake-ups, at most one per wakeEvery, until ctx ends. It returns nil.
func (w *Waker) Run(ctx context.Context) error {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.signal:
		}
		if touched := w.touched.Swap(0); touched != 0 {
			_ = w.nc.Publish(WakeSubject, encodeWake(touched, w.stream)) // while the broker is away nobody could publish the rows either
		}
		pause.Reset(wakeEvery)
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}

// encodeWake lists the slots of the set and names the streams: "3,17,=EVENTS".
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

// DecodeWake reads the slots that a wake-up names, as a set of bits: none when it is for the relays of other streams. What it cannot read it leaves out. A
// wake-up that names no streams is for all relays.
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
