package testkit

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
)

// Eventually calls cond again and again until it says true, and fails the test when it has not within the time; what says what
// was waited for. An error of cond is not the end: the last one is part of the failure.
func Eventually(t testing.TB, within time.Duration, what string, cond func() (bool, error)) {
	t.Helper()
	const longest = 50 * time.Millisecond
	deadline := time.Now().Add(within)
	for pause := time.Millisecond; ; pause = min(2*pause, longest) {
		ok, err := cond()
		if ok && err == nil {
			return
		}
		if time.Now().After(deadline) {
			if err != nil {
				t.Fatalf("not within %s: %s: %v", within, what, err)
			}
			t.Fatalf("not within %s: %s", within, what)
		}
		time.Sleep(pause)
	}
}

// Logger returns a logger that writes to the test's log, and nowhere once the test has ended.
func Logger(t testing.TB) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(w.close)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			a.Value = slog.StringValue(a.Value.Time().Format("15:04:05.000"))
		}
		return a
	}}))
}

// testWriter guards t.Log, which panics when a straggler logs after the test.
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

func (w *testWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.t = nil
}
