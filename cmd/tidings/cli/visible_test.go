package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
)

// TestNoTextActsOnTheTerminal: writers put control characters into payloads, titles and types.
// Every output for people that has such text shows them.
func TestNoTextActsOnTheTerminal(t *testing.T) {
	const evil = "a\x1b[2J\u009b2J\u202eb\x7f\r\nSAFE\tc\u2028é😀"
	payload := json.RawMessage(`{"body": "` + evil + `"}`)
	for name, print := range map[string]func(p Process) error{
		"events watch": func(p Process) error {
			w := &eventWatch{session: &session{Process: p}, ctx: context.Background(), stop: func() {}}
			w.Hear(&event.Event{Stream: "EVENTS-0", AggregateType: "post", Type: "created", Payload: payload}, nil)
			return w.err
		},
		"events watch, damaged": func(p Process) error {
			w := &eventWatch{session: &session{Process: p}, ctx: context.Background(), stop: func() {}}
			w.Hear(&event.Event{Stream: "EVENTS-0"}, errors.New(evil))
			return w.err
		},
		"events find --payload": func(p Process) error {
			found := outbox.Found{Event: event.Event{AggregateType: evil, Type: evil, Payload: payload}}
			return (&session{Process: p}).printFound([]outbox.Found{found}, nil, "", true)
		},
		"a table": func(p Process) error { return p.table([]string{"A", "B"}, []string{evil, evil}) },
		"verify": func(p Process) error {
			return printVerification(p.Stdout, verify.Report{Why: []string{evil}, Projections: []verify.Projection{{
				Projection: "threadcache", Different: 1, Differences: []projections.Difference{{Field: "title", Want: evil}}}}})
		},
		"an error": func(p Process) error { p.exitCode(p.commands(), errors.New(evil), true); return nil },
	} {
		var out bytes.Buffer
		if err := print(Process{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &out}); err != nil {
			t.Fatal(name, err)
		}
		text := out.String()
		if strings.ContainsFunc(text, func(r rune) bool {
			return r != '\n' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r))
		}) ||
			strings.Contains(text, "\nSAFE") && name != "an error" || !strings.Contains(text, "é😀") {
			t.Errorf("%s prints %q", name, text)
		}
	}
	if got := visible(evil); got != `a\u001b[2J\u009b2J\u202eb\u007f\u000d\u000aSAFE\u0009c\u2028é😀` {
		t.Errorf("visible text is %q", got)
	}
	if got := visible("\xff"); got != "\uFFFD" {
		t.Errorf("a damaged byte is %q", got)
	}
}
