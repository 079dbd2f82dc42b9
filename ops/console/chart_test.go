package console

import (
	"bytes"
	"flag"
	"html/template"
	"math"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/ops/samples"
)

var update = flag.Bool("update", false, "write the golden file")

// TestAChartIsThisSVG draws two lines with a gap, a point alone, a threshold and a mark.
func TestAChartIsThisSVG(t *testing.T) {
	noon, nan := time.Date(2030, 1, 31, 12, 0, 0, 0, time.UTC), math.NaN()
	f := figure{title: "Oldest", unit: inSeconds, limit: 60, why: "late from 1 min", lines: []chartLine{
		{Name: "threadcache", values: []float64{0, 30, nan, 90, nan, 5}}, {Name: "archiver", values: []float64{1, 1, 1, 1, 1, nan}}}}
	w := samples.Window{From: noon, Step: 10 * time.Second, N: 6}
	c := f.draw("chart-0", w, 30*time.Second, []samples.Mark{{At: noon.Add(20 * time.Second), Says: "threadcache paused"}})
	see := &Console{templates: make(map[string]*template.Template)}
	see.pages = see.allPages()
	if err := see.parse(); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := see.templates["day"].ExecuteTemplate(&got, "live", &frame{Data: dayPage{Charts: []chart{c}}}); err != nil {
		t.Fatal(err)
	}
	const file = "testdata/chart.html"
	if *update {
		if err := os.WriteFile(file, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("(-want +got; go test ./ops/console -run %s -update writes the file):\n%s", t.Name(), diff)
	}
}

func TestAnAxisEndsAtARoundNumber(t *testing.T) {
	for v, want := range map[float64]float64{0: 1, .0003: .0005, .9: 1, 1: 1, 1.1: 2, 4: 5, 5.01: 10, 60: 100, 724: 1000,
		1_000_001: 2_000_000} {
		if got := roundUp(v); math.Abs(got-want) > want/1e9 {
			t.Errorf("%v: %v, want %v", v, got, want)
		}
	}
}

func TestAnAxisOfTimeHasRoundTimes(t *testing.T) {
	for v, want := range map[float64]string{.003: "0 s, 5 ms, 10 ms", 4: "0 s, 2.5 s, 5 s", 60: "0 s, 30 s, 1 min", 61: "0 s, 1 min, 2 min",
		800: "0 s, 10 min, 20 min", 5000: "0 s, 1 h 0 min, 2 h 0 min"} {
		f, w := figure{unit: inSeconds, lines: []chartLine{{values: []float64{v}}}}, samples.Window{Step: samples.Every, N: 1}
		c := f.draw("c", w, time.Minute, nil)
		if got := c.Y[0].Label + ", " + c.Y[1].Label + ", " + c.Y[2].Label; got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}

func TestValuesOfLines(t *testing.T) {
	for v, want := range map[float64]string{0: "0/s", 1.0 / 3: "0.33/s", 4.96: "5/s", 12.7: "12/s", 12345: "12,345/s"} {
		if got := perSecond(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}
