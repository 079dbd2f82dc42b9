package daemon

import (
	"log/slog"
	"strings"
	"time"
)

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
