package broker

import (
	"testing"
	"time"
)

func TestALossIsBelievedOnceAClusterHasSaidSoForLong(t *testing.T) {
	at := func(seconds int) time.Time { return time.Unix(int64(1000+seconds), 0) }
	var d Doubt
	if !d.sure(false, at(0)) {
		t.Error("a broker outside a cluster is not believed at once")
	}
	d.Clear()
	for _, c := range []struct {
		seconds int
		want    bool
	}{
		{0, false}, {10, false}, {19, false}, {20, true}, {25, true},
		{50, false}, {60, false}, {70, true}, // no report for 25 s: it begins again
	} {
		if got := d.sure(true, at(c.seconds)); got != c.want {
			t.Errorf("after %d s: sure is %v", c.seconds, got)
		}
	}
	d.Clear()
	if d.sure(true, at(80)) {
		t.Error("believed at once, although it reported otherwise before")
	}
}
