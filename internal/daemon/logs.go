package daemon

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// LogConfig says which lines a process logs, and in which format.
type LogConfig struct {
	Level  string `env:"LOG_LEVEL"`  // debug, info, warn or error; info when empty
	Format string `env:"LOG_FORMAT"` // text or json; when empty, text on a terminal, else json
}

// NewLogger returns a logger that writes to w, with durations in readable units (1.5s) and errors
// as Plain returns them. It writes the first warning or error with a message, and then suppresses
// that message for 10 s. After that one line reports the last repetition, and the attribute
// repeated has the number of suppressed lines. flush writes the reports that wait; call it before
// the process ends.
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
	opts := &slog.HandlerOptions{Level: at, ReplaceAttr: readableAttr}
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

// CommandLogger returns a logger for a command that a person runs. It writes text and every line of
// the level or above.
func CommandLogger(w io.Writer, level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: readableAttr}))
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

const (
	quietFor    = 10 * time.Second // between two lines with the same message
	maxMessages = 1000             // tracked at once; Tidings has some hundred. Any beyond count as one message
)

// limiter is a handler that writes a warning or an error at most once in quietFor. It does not
// limit lower levels: they report facts that do not repeat by themselves, for example requests in
// the access log. A loop that retries logs warnings.
type limiter struct {
	slog.Handler
	who   string // the logger's own attributes: component, consumer
	known *messages
}

// message identifies equal lines. The attributes of the line itself, for example ids, do not count.
type message struct {
	level     slog.Level
	who, text string
}

// repetitions are the suppressed lines with one message.
type repetitions struct {
	n    int
	last slog.Record
	by   slog.Handler // the handler of the last line
}

type messages struct {
	mu sync.Mutex
	of map[message]*repetitions // messages of the last quietFor
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

// repeats reports whether a line with the message was written less than quietFor ago. If so, it
// records this line.
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

// pass writes the report of the repetitions and starts the next quietFor. Without repetitions it
// forgets the message.
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

// flush writes the reports of all repetitions.
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
		_ = s.by.Handle(context.Background(), s.last) // slog.Logger ignores this error too
	}
}

// plain translates texts of libraries into an operator's words. Without a connection to NATS
// nothing is buffered (broker.Connect), and nats.go then reports a full buffer.
var plain = strings.NewReplacer("nats: outbound buffer limit exceeded", "NATS is unreachable")

// Plain returns the text of an error in an operator's words.
func Plain(err error) string { return plain.Replace(err.Error()) }

// readableAttr formats attributes for people. The JSON handler would write durations in
// nanoseconds.
func readableAttr(_ []string, a slog.Attr) slog.Attr {
	switch v := a.Value.Any().(type) {
	case time.Duration:
		a.Value = slog.StringValue(rounded(v).String())
	case error:
		a.Value = slog.StringValue(Plain(v))
	}
	return a
}

// rounded keeps about three digits of a duration.
func rounded(d time.Duration) time.Duration {
	for unit := time.Second; unit >= time.Microsecond; unit /= 1000 {
		if d >= unit || d <= -unit {
			return d.Round(unit / 100)
		}
	}
	return d
}
