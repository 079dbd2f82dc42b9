package daemon

import (
	"log/slog"
	"strings"
	"time"
)

// plain has what libraries say in words that an operator knows. While a connection to NATS is away nothing is buffered (broker.Connect), and nats.go calls that a buffer that is full.
var plain = strings.NewReplacer("nats: outbound buffer limit exceeded", "NATS is unreachable")

// Plain is the text of an error for an operator.
func Plain(err error) string { return plain.Replace(err.Error()) }

// readable writes attributes for people: JSON has durations in nanoseconds.
func readable(_ []string, a slog.Attr) slog.Attr {
	switch v := a.Value.Any().(type) {
	case time.Duration:
		a.Value = slog.StringValue(rounded(v).String())
	case error:
		a.Value = slog.StringValue(Plain(v))
	}
	return a
}

// rounded leaves three digits or so.
func rounded(d time.Duration) time.Duration {
	for unit := time.Second; unit >= time.Microsecond; unit /= 1000 {
		if d >= unit || d <= -unit {
			return d.Round(unit / 100)
		}
	}
	return d
}
