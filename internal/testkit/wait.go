package testkit

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience is how long Eventually waits on a machine of the speed that measureSlowness takes as 1.
// It only ends a broken test.
const patience = 90 * time.Second

// Eventually calls cond until it returns true without an error. It fails the test if that does not
// happen in time. what names the condition. After an error of cond it tries again; the failure
// includes the last error. On a machine that is slow now, each second counts less, as much as
// measureSlowness says. So there is no limit to choose.
func Eventually(t testing.TB, what string, cond func() (bool, error)) {
	t.Helper()
	var waited time.Duration // by the machine's own speed
	began, last := time.Now(), time.Now()
	await(t, what, cond, func() (time.Duration, bool) {
		now := time.Now()
		waited += time.Duration(float64(now.Sub(last)) / slowness())
		last = now
		return now.Sub(began), waited > patience
	})
}

// Within is like Eventually where the time is what the test asserts.
func Within(t testing.TB, within time.Duration, what string, cond func() (bool, error)) {
	t.Helper()
	began := time.Now()
	await(t, what, cond, func() (time.Duration, bool) { return time.Since(began), time.Since(began) > within })
}

func await(t testing.TB, what string, cond func() (bool, error), over func() (after time.Duration, over bool)) {
	t.Helper()
	const longest = 50 * time.Millisecond
	for pause := time.Millisecond; ; pause = min(2*pause, longest) {
		asked := time.Now()
		ok, err := cond()
		took := time.Since(asked)
		if ok && err == nil {
			return
		}
		if after, over := over(); over {
			if err != nil {
				t.Fatalf("not after %s: %s: %v", after.Round(time.Millisecond), what, err)
			}
			t.Fatalf("not after %s: %s", after.Round(time.Millisecond), what)
		}
		time.Sleep(max(pause, min(took, time.Second))) // a condition that takes long leaves half of the time to what it waits for
	}
}

// speed is the last measurement of slowness. All tests of a binary share it.
var speed struct {
	sync.Mutex
	at    time.Time
	times float64
}

// Stretched returns d on an idle machine, and up to ten times d on one that is slow now: for the
// time limits of what a test runs, for example a lease's TTL.
func Stretched(d time.Duration) time.Duration {
	return time.Duration(float64(d) * min(slowness(), 10))
}

// slowness returns how many times slower this process runs now than on an idle machine with 2 cores
// of 2024. It measures at most every two seconds, for about 10 ms.
func slowness() float64 {
	speed.Lock()
	defer speed.Unlock()
	if time.Since(speed.at) > 2*time.Second {
		speed.times = measureSlowness()
		speed.at = time.Now()
	}
	return speed.times
}

// measureSlowness times a fixed piece of work, which no instruction set speeds up, and three
// sleeps, which end late where others take the processors.
func measureSlowness() float64 {
	const work, idle = 2_000_000, 8 * time.Millisecond // measured on such a machine
	began := time.Now()
	x := uint64(began.UnixNano())
	for range work {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
	}
	for range 3 {
		time.Sleep(time.Millisecond)
	}
	if x == 0 { // never: xorshift keeps what is not 0
		return 1
	}
	return max(1, float64(time.Since(began))/float64(idle))
}

// Logger returns a logger that writes to the test's log, and drops lines after the test has ended.
// A line with the same key twice, or with an empty url, fails the test.
func Logger(t testing.TB) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(w.close)
	return slog.New(strict{Handler: slog.NewTextHandler(w,
		&slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				a.Value = slog.StringValue(a.Value.Time().Format("15:04:05.000"))
			}
			return a
		}}), w: w})
}

// DefaultLogger makes slog.Default log like Logger until the test ends.
func DefaultLogger(t testing.TB) {
	before := slog.Default()
	slog.SetDefault(Logger(t))
	t.Cleanup(func() { slog.SetDefault(before) })
}

// strict is a handler that fails the test at lines with repeated keys or an empty url, because a
// search by key misses them.
type strict struct {
	slog.Handler
	w    *testWriter
	with []slog.Attr
}

// Enabled implements slog.Handler.
func (s strict) Enabled(ctx context.Context, level slog.Level) bool {
	return s.Handler.Enabled(ctx, level)
}

// WithAttrs implements slog.Handler.
func (s strict) WithAttrs(attrs []slog.Attr) slog.Handler {
	return strict{s.Handler.WithAttrs(attrs), s.w, append(slices.Clip(s.with), attrs...)}
}

// Handle implements slog.Handler.
func (s strict) Handle(ctx context.Context, r slog.Record) error {
	seen := map[string]bool{slog.TimeKey: true, slog.LevelKey: true, slog.MessageKey: true}
	check := func(a slog.Attr) bool {
		if seen[a.Key] {
			s.w.fail("the line %q has the key %q twice", r.Message, a.Key)
		}
		if a.Key == "url" && a.Value.String() == "" {
			s.w.fail("the line %q has an empty url", r.Message)
		}
		seen[a.Key] = true
		return true
	}
	for _, a := range s.with {
		check(a)
	}
	r.Attrs(check)
	return s.Handler.Handle(ctx, r)
}

// testWriter guards t.Log, which panics if a goroutine logs after the test.
type testWriter struct {
	mu sync.Mutex
	t  testing.TB
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Log(strings.TrimSuffix(string(p), "\n"))
	}
	return len(p), nil
}

func (w *testWriter) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Errorf(format, args...)
	}
}

func (w *testWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.t = nil
}
