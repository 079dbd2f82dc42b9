package natsserver

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

// TestARebuiltIndexIsNoWarning has the warnings of a server that was killed, of one with a
// password, and another one.
func TestARebuiltIndexIsNoWarning(t *testing.T) {
	for warning, want := range map[string]string{
		"Filestore [EVENTS-0] Stream state outdated, last block has additional entries, will rebuild": "level=INFO",
		"Filestore [EVENTS-0] Recovering stream state from index errored: prior state file":           "level=INFO",
		"Plaintext passwords detected, use nkeys or bcrypt":                                           "level=INFO",
		"Filestore [EVENTS-0] Stream state checksum did not match":                                    "level=WARN",
	} {
		var out bytes.Buffer
		serverLog{log: slog.New(slog.NewTextHandler(&out, nil))}.Warnf("%s", warning)
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q was logged as %s", warning, out.String())
		}
	}
}
