package tokens

import (
	"errors"
	"testing"
	"time"

	"github.com/tidings/tidings/store"
)

// A rate that ParseRate accepts is within its bounds, and its text leads to the same rate.
func FuzzParseRate(f *testing.F) {
	for _, s := range []string{"off", "100/1s", "1/24h", "9999999/99999s", "0/1s", "-1/1s", "1/1ms", "1/1.5s", "+5/1m", "05/1h1m1s", "1/",
		"/1s", "1/1s/1s", "9223372036854775808/1s", "1/9223372036854775808h", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRate(s)
		if err != nil {
			if !errors.Is(err, store.ErrInvalid) || r != (Rate{}) {
				t.Fatalf("%q: %v, %v", s, r, err)
			}
			return
		}
		if !r.Off() && (r.N < 1 || r.N > maxRate || r.Window < time.Second || r.Window > maxRateWindow || r.Window%time.Second != 0) {
			t.Fatalf("%q is %v", s, r)
		}
		if again, err := ParseRate(r.String()); err != nil || again != r {
			t.Fatalf("%q is %v, and again %v, %v", s, r, again, err)
		}
	})
}
