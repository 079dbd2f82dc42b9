package tokens

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/tidings/tidings/store"
)

// Bounds of a Rate. The database checks the same bounds.
const (
	maxRate       = 9_999_999
	maxRateWindow = 99_999 * time.Second // a little over a day
)

// Rate allows N requests in each Window, which is whole seconds. The zero Rate sets no limit.
type Rate struct {
	N      int64
	Window time.Duration
}

// Off reports whether there is no limit.
func (r Rate) Off() bool { return r.N == 0 }

// ParseRate reads a number of requests and a duration, for example "100/1s", or "off".
func ParseRate(s string) (Rate, error) {
	if s == "off" {
		return Rate{}, nil
	}
	number, window, _ := strings.Cut(s, "/")
	n, err := strconv.ParseInt(number, 10, 64)
	w, werr := time.ParseDuration(window)
	if err != nil || werr != nil || n < 1 || n > maxRate || w < time.Second || w > maxRateWindow || w%time.Second != 0 {
		return Rate{}, fmt.Errorf("%w: rate %.80q: want 1 to %d per 1s to %s in whole seconds, for example 100/1s, or off",
			store.ErrInvalid, s, maxRate, maxRateWindow)
	}
	return Rate{n, w}, nil
}

func (r Rate) String() string {
	if r.Off() {
		return "off"
	}
	return fmt.Sprintf("%d/%ds", r.N, r.Window/time.Second)
}

// MarshalText returns the text of String.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads the text with ParseRate.
func (r *Rate) UnmarshalText(b []byte) (err error) {
	*r, err = ParseRate(string(b))
	return err
}
