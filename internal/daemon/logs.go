package daemon

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// LogConfig says what a process logs, and how.
type LogConfig struct {
	Level  string `env:"LOG_LEVEL"`  // debug, info, warn or error; info when empty
	Format string `env:"LOG_FORMAT"` // text or json; when empty text on a terminal, else json
}

// NewLogger returns a logger that writes to w, with durations as people write them (1.5s) and errors by Plain. A warning or an error is written at once, and
// then its message not again for 10 s; when they are over, one line has the attributes of the last repetition, and in repeated how many lines it stands for.
// flush writes those that wait; call it before the process ends.
func NewLogger(w io.Writer, cfg LogConfig) (log *slog.Logger, flush func(), err error) {
	var at slog.Level
	if cfg.Level != "" {
		if err := at.UnmarshalText([]byte(cfg.Level)); err != nil {
			return nil, nil, fmt.Errorf("LOG_LEVEL is %q: want debug, info, warn or error", cfg.Level)
		}
	}
	if f, ok := w.(*os.File); cfg.Format == "" && ok && isTerminal(f) {
		cfg.Format = "text"
	}
	opts := &slog.HandlerOptions{Level: at, ReplaceAttr: readable}
	h := limiter{known: &messages{of: map[message]*repetitions{}}}
	switch cfg.Format {
	case "text":
		h.Handler = slog.NewTextHandler(w, opts)
	case "json", "":
		h.Handler = slog.NewJSONHandler(w, opts)
	default:
		return nil, nil, fmt.Errorf("LOG_FORMAT is %q: want text or json", cfg.Format)
	}
	return slog.New(h), h.known.flush, nil
}

// CommandLogger returns a logger for a command that a person runs: text, every line, from level on.
func CommandLogger(w io.Writer, level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: readable}))
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

const (
	quietFor    = 10 * time.Second // from one line with a message to the next
	maxMessages = 1000             // that are known at once: ours are constants, some hundred. Those beyond it count as one message
)

// limiter is a handler that writes a warning or an error once in quietFor. Lines below are facts, such as requests of the access log, and not limited.
// They do not repeat by themselves: what is tried again in a loop warns.
type limiter struct {
	slog.Handler
	who   string // what the logger was made with: component, consumer
	known *messages
}

// message is what makes two lines the same: attributes of the line itself, such as ids, do not.
type message struct {
	level     slog.Level
	who, text string
}

// repetitions are the lines with a message that were not written.
type repetitions struct {
	n    int
	last slog.Record
	by   slog.Handler // of the last one
}

type messages struct {
	mu sync.Mutex
	of map[message]*repetitions // since quietFor at most
}

// WithAttrs implements slog.Handler.
func (l limiter) WithAttrs(attrs []slog.Attr) slog.Handler {
	l.Handler = l.Handler.WithAttrs(attrs)
	for _, a := range attrs {
		l.who += a.String() + " "
	}
	return l
}

// WithGroup implements slog.Handler.
func (l limiter) WithGroup(name string) slog.Handler {
	l.Handler = l.Handler.WithGroup(name)
	return l
}

// Handle implements slog.Handler.
func (l limiter) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelWarn && l.known.repeats(message{r.Level, l.who, r.Message}, r, l.Handler) {
		return nil
	}
	return l.Handler.Handle(ctx, r)
}

// repeats reports whether a line with the message was written less than quietFor ago, and keeps this one.
func (m *messages) repeats(of message, r slog.Record, by slog.Handler) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.of[of] == nil && len(m.of) >= maxMessages {
		of = message{level: r.Level}
	}
	if s := m.of[of]; s != nil {
		s.n, s.last, s.by = s.n+1, r.Clone(), by
		return true
	}
	m.of[of] = &repetitions{}
	time.AfterFunc(quietFor, func() { m.pass(of) })
	return false
}

// pass writes what was repeated, and begins the next quietFor; without repetitions the message is new again.
func (m *messages) pass(of message) {
	m.mu.Lock()
	s := *m.of[of]
	if s.n == 0 {
		delete(m.of, of)
	} else {
		*m.of[of] = repetitions{}
		time.AfterFunc(quietFor, func() { m.pass(of) })
	}
	m.mu.Unlock()
	s.write()
}

// flush writes all that was repeated.
func (m *messages) flush() {
	m.mu.Lock()
	var all []repetitions
	for _, s := range m.of {
		all = append(all, *s)
		*s = repetitions{}
	}
	m.mu.Unlock()
	for _, s := range all {
		s.write()
	}
}

func (s repetitions) write() {
	if s.n > 0 {
		s.last.AddAttrs(slog.Int("repeated", s.n))
		_ = s.by.Handle(context.Background(), s.last) // a logger reports no errors either
	}
}
