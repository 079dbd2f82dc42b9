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

// Eventually calls cond until it returns true without an error. It fails the test if that does not happen within the
// time. what names the condition. After an error of cond it tries again; the failure includes the last error.
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

// Logger returns a logger that writes to the test's log, and drops lines after the test has ended. A line with the
// same key twice, or with an empty url, fails the test.
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

// strict is a handler that fails the test at lines with repeated keys or an empty url, because a search by key misses
// them.
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
