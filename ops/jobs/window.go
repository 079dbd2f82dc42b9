package jobs

import (
	"fmt"
	"strings"
	"time"
)

// Window is a time of day in UTC from From up to To, both since midnight. If To is before From, it
// continues past midnight. The zero Window is the whole day.
type Window struct{ From, To time.Duration }

const day = 24 * time.Hour

// UnmarshalText parses "01:00-05:30". The empty text is the whole day.
func (w *Window) UnmarshalText(text []byte) error {
	*w = Window{}
	if len(text) == 0 {
		return nil
	}
	from, to, ok := strings.Cut(string(text), "-")
	var err error
	if w.From, err = clock(from); err != nil || !ok {
		return fmt.Errorf("window %q: want HH:MM-HH:MM, in UTC", text)
	}
	if w.To, err = clock(to); to == "24:00" {
		w.To = day
	} else if err != nil {
		return fmt.Errorf("window %q: want HH:MM-HH:MM, in UTC", text)
	}
	if w.From == w.To {
		return fmt.Errorf("window %q is empty", text)
	}
	return nil
}

func clock(text string) (time.Duration, error) {
	t, err := time.Parse("15:04", text)
	if err == nil && len(text) != len("15:04") {
		err = fmt.Errorf("%q: want HH:MM", text)
	}
	return time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute, err
}

// String returns the text that UnmarshalText parses.
func (w Window) String() string {
	if w == (Window{}) {
		return ""
	}
	hm := func(d time.Duration) string { return fmt.Sprintf("%02d:%02d", d/time.Hour, d%time.Hour/time.Minute) }
	return hm(w.From) + "-" + hm(w.To)
}

// left returns how long the window remains open at now; 0 means that it is closed. The whole day
// never closes.
func (w Window) left(now time.Time) time.Duration {
	if w == (Window{}) {
		return 1<<63 - 1
	}
	now = now.UTC()
	at := now.Sub(now.Truncate(day))
	width := (w.To - w.From + day) % day
	if width == 0 { // From and To are a whole day apart
		width = day
	}
	since := (at - w.From + day) % day
	return max(width-since, 0)
}
