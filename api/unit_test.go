package api

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
)

func TestStrictJSON(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		want string // part of the error; empty for none
	}{
		"an object":                                 {`{"a":"b"}`, ""},
		"white space around it":                     {" {\"a\": \"b\"}\r\n", ""},
		"a pair of surrogates":                      {`{"a":"\ud83d\ude00"}`, ""},
		"an escaped backslash before u":             {`{"a":"\\ud83d"}`, ""},
		"members of the same name apart":            {`{"a":[{"b":1},{"b":2}]}`, ""},
		"invalid UTF-8":                             {"{\"a\":\"\xff\"}", "UTF-8"},
		"a surrogate cut short":                     {`{"a":"\ud83d"}`, "half"},
		"a low surrogate alone":                     {`{"a":"\ude00"}`, "half"},
		"a high surrogate before another escape":    {`{"a":"\ud83dA"}`, "half"},
		"a member twice":                            {`{"a":1,"a":2}`, "is repeated"},
		"a member twice, once escaped":              {`{"a":1,"\u0061":2}`, "is repeated"},
		"a member twice, deep":                      {`{"x":[{"a":1,"a":2}]}`, "is repeated"},
		"a member in another case":                  {`{"A":1}`, "unknown"},
		"a member that folds to ours (Kelvin sign)": {"{\"\u212a\":1}", "unknown"},
		"nothing":         {``, "JSON"},
		"half an object":  {`{"a":1`, "JSON"},
		"text after it":   {`{"a":1} {}`, "after"},
		"a missing comma": {`{"a":1 "b":2}`, "JSON"},
		"too deep":        {strings.Repeat("[", 100000), "nest"},
	} {
		t.Run(name, func(t *testing.T) {
			var v any
			err := strictJSON([]byte(c.in), &v)
			switch {
			case c.want == "" && err != nil:
				t.Errorf("got %v, want no error", err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

func TestCursorsBelongToTheirList(t *testing.T) {
	c := newCursors([][]byte{[]byte("0123456789abcdef0123456789abcdef")})
	home := list{tenant: 1, name: "followers", of: "42"}
	cursor, err := c.encode(home, edgeCursor{User: "7"})
	if err != nil {
		t.Fatal(err)
	}
	var got edgeCursor
	if err := c.decode(home, cursor, &got); err != nil || got.User != event.ID("7") {
		t.Fatalf("got %v, %v", got, err)
	}
	flipped := []byte(cursor)
	flipped[len(flipped)/2] ^= 1
	for name, try := range map[string]struct {
		list   list
		cursor string
		key    string
	}{
		"another tenant":  {list{2, "followers", "42"}, cursor, ""},
		"another route":   {list{1, "following", "42"}, cursor, ""},
		"another user":    {list{1, "followers", "43"}, cursor, ""},
		"another key":     {home, cursor, "another key of 32 bytes, or more"},
		"a changed byte":  {home, string(flipped), ""},
		"cut short":       {home, cursor[:10], ""},
		"nothing":         {home, "", ""},
		"not base64":      {home, "%%%", ""},
		"too long":        {home, strings.Repeat("A", 10000), ""},
		"something after": {home, cursor + "AAAA", ""},
	} {
		d := c
		if try.key != "" {
			d = newCursors([][]byte{[]byte(try.key)})
		}
		if err := d.decode(try.list, try.cursor, &got); !errors.Is(err, errCursor) {
			t.Errorf("%s: got %v, want errCursor", name, err)
		}
	}
}

func TestVersionOf(t *testing.T) {
	for in, want := range map[string]struct {
		version int64
		ok      bool
	}{
		`"3"`: {3, true}, `*`: {0, true}, `W/"3"`: {-1, true}, `"abc"`: {-1, true}, `"03"`: {-1, true},
		`"-3"`: {-1, true}, `"0"`: {-1, true},
		`"99999999999999999999"`: {-1, true}, `3`: {0, false}, `"3`: {0, false}, `"1", "2"`: {0, false}, `"`: {0, false},
	} {
		if v, ok := versionOf(in); v != want.version || ok != want.ok {
			t.Errorf("versionOf(%s) = %d, %t, want %d, %t", in, v, ok, want.version, want.ok)
		}
	}
}

func TestTraceParent(t *testing.T) {
	good := "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	for in, want := range map[string]string{
		good: good,
		"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01": "",
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01": "",
		"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01": "",
		"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01": "",
		good + "-00": "", "": "", "x": "",
	} {
		if got := traceParent([]string{in}); got != want {
			t.Errorf("traceParent(%q) = %q, want %q", in, got, want)
		}
	}
	if got := traceParent([]string{good, good}); got != "" {
		t.Errorf("two headers: got %q, want them ignored", got)
	}
}

// TestTheCursorKeyIsReplacedWhileClientsHoldCursors goes through the steps of
// docs/runbook/cursor-key.md. Processes of one step and of the next run side by side: each accepts
// every cursor of the others. Cursors of the old key are valid until the key is removed.
func TestTheCursorKeyIsReplacedWhileClientsHoldCursors(t *testing.T) {
	before, after := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	accepted, signed := []string{"b", "ba", "ba", "a"}, "bbaa" // neighboring steps accept each other's cursors
	steps := []string{before, before + "," + after, after + ", " + before, after}
	l := list{tenant: 1, name: "followers", of: "42"}
	var processes []cursors
	var given []string
	for _, step := range steps {
		keys, err := Config{CursorKey: step}.CursorKeys()
		if err != nil {
			t.Fatal(err)
		}
		c := newCursors(keys)
		cursor, err := c.encode(l, 7)
		if err != nil {
			t.Fatal(err)
		}
		processes, given = append(processes, c), append(given, cursor)
	}
	for i, c := range processes {
		for j, cursor := range given {
			var got int
			err := c.decode(l, cursor, &got)
			if want := strings.Contains(accepted[i], signed[j:j+1]); (err == nil && got == 7) != want {
				t.Errorf("a process of step %d and a cursor of step %d: %d, %v, want it accepted: %t", i, j, got, err, want)
			}
		}
	}
}

func TestConfigRefusesWhatCannotWork(t *testing.T) {
	good := Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 1 << 17, MaxBatchBytes: 1 << 20, RequestTimeout: 1e9,
		AddressConnections: 100, MaxRequests: 512, MaxWait: 1e9}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"no key":         func(c *Config) { c.CursorKey = "" },
		"a short key":    func(c *Config) { c.CursorKey = "abcd" },
		"a short second": func(c *Config) { c.CursorKey += ",abcd" },
		"three keys":     func(c *Config) { c.CursorKey += "," + c.CursorKey + "," + c.CursorKey },
		"a tiny body":    func(c *Config) { c.MaxBodyBytes = 1 },
		"a tiny batch":   func(c *Config) { c.MaxBatchBytes = 1 },
		"no time":        func(c *Config) { c.RequestTimeout = 0 },
		"no requests":    func(c *Config) { c.MaxRequests = 1 },
		"no connections": func(c *Config) { c.AddressConnections = 0 },
		"no wait":        func(c *Config) { c.MaxWait = 0 },
	} {
		c := good
		change(&c)
		if c.Validate() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestWhatIsRecentIsSoOnBothClocks(t *testing.T) {
	asOf := time.Now()
	wall := asOf.Round(0) // without a monotonic reading
	for name, c := range map[string]struct {
		now  time.Time
		want bool
	}{
		"at once":                      {asOf, true},
		"within the second":            {asOf.Add(authTTL - 1), true},
		"a second later":               {asOf.Add(authTTL), false},
		"the wall clock an hour ahead": {wall.Add(time.Hour), false},
		"the wall clock set back":      {wall.Add(-time.Millisecond), false},
		"the wall clock the same":      {wall, true},
	} {
		if got := recent(asOf, c.now); got != c.want {
			t.Errorf("%s: %t, want %t", name, got, c.want)
		}
	}
}
