package samples

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

// noon is a moment at which every step of a window begins.
var noon = time.Date(2030, 1, 31, 12, 0, 0, 0, time.UTC)

// at returns a sample of a source, n moments after noon.
func at(n int, source, version string, pairs ...any) Sample {
	s := Sample{noon.Add(time.Duration(n) * Every), source, version, map[string]float64{}}
	for i := 0; i < len(pairs); i += 2 {
		s.Figures[pairs[i].(string)] = float64(pairs[i+1].(int))
	}
	return s
}

// dayOf returns a day with samples.
func dayOf(all ...Sample) *Day {
	d := NewDay(nil)
	d.add(all)
	return d
}

var sameNaN = cmpopts.EquateNaNs()

func TestALineHasGapsAndNoZeros(t *testing.T) {
	d := dayOf(at(0, "", "1", Pending, 5, Published, 100), at(1, "", "1", Pending, 7, Published, 200),
		at(2, "", "1", Pending, 6), // the streams are unknown
		at(8, "", "1", Pending, 1, Published, 900), at(10, "", "1", Pending, 2, Published, 1000))
	w := Window{noon, Every, 11}
	nan := w.unknown()[0]
	if diff := cmp.Diff([]float64{5, 7, 6, nan, nan, nan, nan, nan, 1, nan, 2}, d.Largest(Pending, w), sameNaN); diff != "" {
		t.Errorf("pending (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]float64{nan, 10, nan, nan, nan, nan, nan, nan, nan, nan, 5}, d.Rates(Published, w), sameNaN); diff != "" {
		t.Errorf("published (-want +got):\n%s", diff)
	}
	w = Window{noon, 30 * time.Second, 4}
	if diff := cmp.Diff([]float64{7, nan, 1, 2}, d.Largest(Pending, w), sameNaN); diff != "" {
		t.Errorf("pending in longer steps (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]float64{10, nan, nan, 5}, d.Rates(Published, w), sameNaN); diff != "" {
		t.Errorf("published in longer steps (-want +got):\n%s", diff)
	}
	if got := d.Window(30*time.Second, 4); got != w {
		t.Errorf("the window is %v, want %v", got, w)
	}
}

func TestTheRequestsOfAllProcessesAddUp(t *testing.T) {
	d := dayOf(at(0, "a", "1", Requests, 0, P99, 1), at(0, "b", "1", Requests, 1000, P99, 2),
		at(1, "a", "1", Requests, 100, P99, 3), at(1, "b", "1", Requests, 1200, P99, 1),
		// b is replaced by c
		at(2, "a", "1", Requests, 200), at(2, "c", "1", Requests, 0), at(3, "a", "1", Requests, 300), at(3, "c", "1", Requests, 400))
	if diff := cmp.Diff([]float64{30, 10, 50}, d.Rates(Requests, Window{noon.Add(Every), Every, 3})); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]float64{2, 3}, d.Largest(P99, Window{noon, Every, 2})); diff != "" {
		t.Errorf("p99 (-want +got):\n%s", diff)
	}
	// Two processes, one after the other within a step, at 10 requests per second each.
	d = dayOf(at(0, "a", "1", Requests, 0), at(1, "a", "1", Requests, 100), at(2, "b", "1", Requests, 0), at(3, "b", "1", Requests, 100))
	if got := d.Rates(Requests, Window{noon, time.Minute, 1})[0]; got != 10 {
		t.Errorf("%v requests per second, want 10", got)
	}
}

func TestACountThatFallsIsNoNegativeRate(t *testing.T) {
	d := dayOf(at(0, "", "1", Applied+"x", 1000), at(1, "", "1", Applied+"x", 10))
	if got := d.Rates(Applied+"x", Window{noon, Every, 2})[1]; got != 0 {
		t.Errorf("%v, want 0", got)
	}
}

func TestADayForgetsWhatIsOlder(t *testing.T) {
	d := dayOf(at(0, "old", "1", Requests, 5), at(0, "", "1", Paused+"x", 0), at(1, "", "1", Paused+"x", 1))
	if len(d.Marks(Window{noon, time.Hour, 1})) != 1 {
		t.Fatalf("marks: %v", d.marks)
	}
	d.add([]Sample{at(int(Kept/Every)+2, "", "1", Paused+"x", 1)})
	if len(d.marks) != 0 || len(d.series) != 1 || len(d.series[series{Paused + "x", ""}]) != 1 {
		t.Errorf("the day has %v and %v", d.marks, d.series)
	}
}

func TestMarksAreChanges(t *testing.T) {
	var all []Sample
	for n := range 40 {
		s := at(n, "", "1.0", Paused+"threadcache", 0, Partitions, 1)
		if n >= 20 && n < 25 {
			s.Figures[Paused+"threadcache"] = 1
		}
		if n >= 22 {
			s.Figures[Partitions] = 4
		}
		s.Figures[Replaying+"archiver"] = 0
		if n == 27 || n == 28 {
			s.Figures[Replaying+"archiver"] = 1
		}
		all = append(all, s)
		if n >= 30 { // a rollout: both versions run for a while
			all = append(all, at(n, "api", "1.1", Requests, n))
		}
	}
	all = append(all, at(400, "", "1.0", Partitions, 4)) // nothing ran meanwhile
	d := dayOf(all...)
	d.add(all[len(all)-10:]) // read again
	var got []string
	for _, m := range d.Marks(Window{noon, 2 * time.Hour, 1}) {
		got = append(got, fmt.Sprintf("%d %s", m.At.Sub(noon)/Every, m.Says))
	}
	want := "20 threadcache paused, 22 resized from 1 to 4 partitions, 25 threadcache resumed, " +
		"27 archiver is replayed, 30 version 1.1"
	if strings.Join(got, ", ") != want {
		t.Errorf("%v, want %s", got, want)
	}
}

func TestAConsumerSaysHowLongItIsBehind(t *testing.T) {
	for name, c := range map[string]struct {
		behind []int // at each moment; -1: no sample
		says   string
	}{
		"no sample":           {nil, "false"},
		"is up to date":       {[]int{3, 0}, "false"},
		"behind for a moment": {[]int{0, 0, 724}, "2 unknown "},
		"grows":               {[]int{0, 150, 300, 450, 600}, "1 15/s growing by 15/s"},
		"grows slowly":        {[]int{0, 5, 10, 15}, "1 0.5/s growing by 30/min"},
		"catches up":          {[]int{0, 900, 800, 700, 600, 500, 400}, "1 -10/s catches up in 40 s"},
		"catches up late": {[]int{0, 90000002, 90000001, 90000001, 90000001, 90000000},
			"1 -0.0333/s catches up in more than a day"},
		"is steady":                       {[]int{0, 700, 700, 700, 700, 700, 700, 700}, "1 0/s "},
		"has always been behind":          {[]int{700, 700, 700}, "at least 0 0/s "},
		"is behind since a gap":           {[]int{0, 5, -1, -1, -1, -1, -1, -1, -1, 60, 80, 100}, "1 2/s growing by 2/s"},
		"has just begun, and is the only": {[]int{5}, "at least 0 unknown "},
	} {
		t.Run(name, func(t *testing.T) {
			d := NewDay(nil)
			last := 0
			for n, behind := range c.behind {
				if behind >= 0 {
					d.add([]Sample{at(n, "", "1", Behind+"x", behind)})
					last = behind
				}
			}
			trend, got := d.Trend("x"), "false"
			if !trend.Since.IsZero() {
				got = fmt.Sprint(int(trend.Since.Sub(noon) / Every))
				if trend.AtLeast {
					got = "at least " + got
				}
				rate := "unknown"
				if trend.Known {
					rate = fmt.Sprintf("%.3g/s", trend.PerSecond)
				}
				span := func(d time.Duration) string { return fmt.Sprintf("%.0f s", d.Seconds()) }
				got += " " + rate + " " + trend.Says(int64(last), span)
			}
			if got != c.says {
				t.Errorf("got %q, want %q", got, c.says)
			}
		})
	}
	d := dayOf(at(0, "", "1", Behind+"x", 0), at(1, "", "1", Behind+"x", 5))
	if d.moved = time.Now().Add(-time.Minute); d.Trend("x") != (Trend{}) {
		t.Error("an old sample tells a trend")
	}
}

func TestFiguresAreOfWhatIsKnown(t *testing.T) {
	paused := &consumers.Paused{Actor: "ann"}
	all := status.State{Outbox: &outbox.Stats{Pending: 3, LagSeconds: 2, DLQDepth: 4},
		Partitions: []status.Partition{{State: status.Closed, LastSeq: 10, Messages: 1}, {State: status.Open, LastSeq: 20, Messages: 2},
			{State: status.Waiting}},
		Consumers: []status.Consumer{{Paused: paused,
			ConsumerLag: consumers.ConsumerLag{Consumer: "x", Messages: 5, Seconds: 6, DeadLetters: 7}}}}
	want := map[string]float64{Pending: 3, Oldest: 2, DeadOutbox: 4, Partitions: 2, Published: 30, Stored: 3, Written: 37,
		Behind + "x": 5, Late + "x": 6, Dead + "x": 7, Paused + "x": 1, Applied + "x": 25}
	without := func(names ...string) map[string]float64 {
		rest := map[string]float64{}
		for name, value := range want {
			rest[name] = value
		}
		for _, name := range names {
			delete(rest, name)
		}
		return rest
	}
	for name, c := range map[string]struct {
		change func(*status.State)
		want   map[string]float64
	}{
		"everything": {func(*status.State) {}, want},
		"without NATS": {func(st *status.State) {
			st.Unavailable = []status.Unavailable{{Server: status.ServerNATS}}
			st.Consumers[0] = status.Consumer{ConsumerLag: consumers.ConsumerLag{Consumer: "x"}, Paused: paused, Unknown: "no NATS"}
		}, without(Published, Stored, Written, Behind+"x", Late+"x", Applied+"x", Dead+"x")},
		"without the truth": {func(st *status.State) {
			st.Unavailable, st.Outbox = []status.Unavailable{{Server: status.ServerTruth}}, nil
			for i := range st.Partitions {
				st.Partitions[i].Unknown = status.ServerTruth
			}
		}, without(Pending, Oldest, DeadOutbox, Partitions, Published, Stored, Written, Applied+"x")},
		"without the projections": {func(st *status.State) { st.Consumers = nil },
			without(Behind+"x", Late+"x", Dead+"x", Paused+"x", Applied+"x")},
		"a partition without a leader": {func(st *status.State) { st.Partitions[1].NoLeader = "no leader" },
			without(Published, Stored, Written, Applied+"x")},
		"more pending than are counted": {func(st *status.State) { st.Outbox.PendingMax = true }, without(Written)},
		"locked tables": {func(st *status.State) {
			st.Unread = []status.Unread{{Part: status.PartConsumers}, {Part: status.PartPartitions}}
			st.Consumers[0] = status.Consumer{ConsumerLag: consumers.ConsumerLag{Consumer: "x"}, Unknown: "a table is locked"}
		}, without(Behind+"x", Late+"x", Applied+"x", Dead+"x", Paused+"x", Partitions)},
	} {
		st, stats := all, *all.Outbox
		st.Outbox = &stats
		st.Partitions = append([]status.Partition{}, all.Partitions...)
		st.Consumers = append([]status.Consumer{}, all.Consumers...)
		c.change(&st)
		if diff := cmp.Diff(c.want, Of(st)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
