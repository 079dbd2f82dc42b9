package console

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/letters"
)

// funcs returns the functions that templates call.
func (c *Console) funcs() template.FuncMap {
	return template.FuncMap{
		"dict": dict,
		"when": func(is any, then string) string {
			if truth, _ := template.IsTrue(is); truth {
				return then
			}
			return ""
		},
		"values":  values,
		"list":    func(all ...any) []any { return all },
		"time":    timeHTML,
		"span":    span,
		"soon":    soon,
		"since":   func(t time.Time) string { return age(time.Since(t)) },
		"repair":  repairOf,
		"pretty":  pretty,
		"stateOf": stateOf,
		"scanned": scanned,
		"opLevel": func(o letters.Operation) string {
			switch {
			case o.Failed == 0:
				return "ok"
			case o.Done == 0:
				return "bad"
			}
			return "warn"
		},
		"titleOf": c.titleOf,
		"num":     num,
		"capped":  capped,
		"counted": func(n int64) string { return capped(int(min(n, deadletter.MaxCount)), n > deadletter.MaxCount) },
		"plural":  func(n int, noun string) string { return words.Of(int64(n), noun) },
		"join":    strings.Join,
		"lower":   strings.ToLower,
		"quoted":  quoted,
		"fit":     fit,
		"url":     func(path string, pairs ...any) string { return address(path, pairs...) },
		"act":     func(f *frame, name string) *act { return f.View.c.acts[name] },
		"mayAct":  func(f *frame, name string) bool { return f.View.mayAct(f.View.c.acts[name]) },
		"actURL": func(f *frame, name string, in url.Values) string {
			q := url.Values{}
			for k, v := range in {
				q[k] = v
			}
			if !q.Has("back") {
				q.Set("back", f.View.r.URL.RequestURI())
			}
			return root + "act/" + name + "?" + q.Encode()
		},
		"label":       func(a *act) string { return a.label },
		"danger":      func(a *act) bool { return a.irreversible },
		"repairInput": repairInput,
		"undoable":    c.undoable,
		"storeCounts": c.counts,
		"holdWords":   holdWords,
		"mib":         func(bytes int64) string { return strconv.FormatFloat(float64(bytes)/(1<<20), 'f', 1, 64) },
		"has":         func(list, one string) bool { return containsItem(list, one) },
	}
}

func containsItem(list, one string) bool {
	for item := range strings.SplitSeq(list, ",") {
		if item == one {
			return true
		}
	}
	return false
}

// dict returns a map of names and values, for templates that take several arguments.
func dict(pairs ...any) (map[string]any, error) {
	if len(pairs)%2 != 0 {
		return nil, fmt.Errorf("dict: %d arguments", len(pairs))
	}
	m := make(map[string]any, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		name, ok := pairs[i].(string)
		if !ok {
			return nil, fmt.Errorf("dict: the name %v is not a string", pairs[i])
		}
		m[name] = pairs[i+1]
	}
	return m, nil
}

// values returns the input of an act.
func values(pairs ...any) url.Values {
	v := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		v.Add(fmt.Sprint(pairs[i]), fmt.Sprint(pairs[i+1]))
	}
	return v
}

// address returns the URL of a path below /console/ with a query. It omits empty values.
func address(path string, pairs ...any) string {
	q := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if s := fmt.Sprint(pairs[i+1]); s != "" {
			q.Set(fmt.Sprint(pairs[i]), s)
		}
	}
	u := url.URL{Path: root + path, RawQuery: q.Encode()}
	return u.String()
}

// timeHTML renders how long ago a time is, or in how long it comes. Its title has the exact time.
// A reader without scripts, whose page grows old, sees the time in UTC, and console.css says so. v
// is a time.Time or a *time.Time; a zero or nil time is a dash.
func timeHTML(v any) template.HTML {
	var t time.Time
	switch v := v.(type) {
	case time.Time:
		t = v
	case *time.Time:
		if v != nil {
			t = *v
		}
	}
	if t.IsZero() {
		return `<span class="none">–</span>`
	}
	t = t.UTC()
	exact := t.Format("2006-01-02T15:04:05.000000Z")
	spans := `<span class="unscripted">` + t.Format("2006-01-02 15:04:05") + `</span>` +
		`<span class="scripted">` + relative(t, time.Now()) + `</span>`
	return template.HTML(`<time datetime="` + exact + `" title="` + exact + `">` + spans + `</time>`) //nolint:gosec // no markup
}

// relative formats a time for somebody who reads it at now: "3 min ago", "in 2 days". Beyond 60
// days it is a date. console.js has the same rule.
func relative(t, now time.Time) string {
	d, form := now.Sub(t), "%s ago"
	if d < 0 {
		d, form = -d, "in %s"
	}
	switch {
	case d < time.Minute:
		return "just now"
	case d < 60*24*time.Hour:
		return fmt.Sprintf(form, age(d))
	}
	return t.UTC().Format(time.DateOnly)
}

// span formats a duration for people. v is a time.Duration or a number of seconds.
func span(v any) string {
	var d time.Duration
	switch v := v.(type) {
	case time.Duration:
		d = v
	case float64:
		if math.IsNaN(v) || math.Abs(v) > 1e9 {
			return "–"
		}
		d = time.Duration(v * float64(time.Second))
	case int64:
		d = time.Duration(v) * time.Second
	case int:
		d = time.Duration(v) * time.Second
	default:
		return fmt.Sprint(v)
	}
	switch {
	case d < 0:
		return "–" + span(-d)
	case d < time.Millisecond:
		return "0 s"
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < time.Minute:
		return strconv.FormatFloat(d.Seconds(), 'f', 1, 64) + " s"
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// quotedRunes bounds a text that a card quotes.
const quotedRunes = 200

// quoted cuts a text that is quoted beside its answer.
func quoted(text string) string {
	if runes := []rune(text); len(runes) > quotedRunes {
		return string(runes[:quotedRunes]) + "…"
	}
	return text
}

// pretty indents JSON. It returns other text unchanged.
func pretty(text string) string {
	var b bytes.Buffer
	if json.Indent(&b, []byte(text), "", "  ") != nil {
		return text
	}
	return b.String()
}

// age formats how long something has lasted, in one unit.
func age(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// num formats a whole number with thousands separators. It returns any other value unchanged.
func num(v any) string {
	s := fmt.Sprint(v)
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return s
	}
	return words.Count(n)
}

// capped formats a count that stopped at a limit if more is true.
func capped(n int, more bool) string { return words.Capped(int64(n), more) }
