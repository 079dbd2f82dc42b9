package console

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/samples"
)

// chart is lines over a window of the last day. The template day.html draws it as an SVG: the
// server computes every coordinate, so the page needs no library and works without scripts.
type chart struct {
	ID, Title string
	Says      string // the chart in words, for readers who do not see it
	Lines     []chartLine
	X, Y      []tick
	Limit     *tick     // the value from which on the doctor finds something
	Marks     []float64 // x
	Columns   []column
}

// chartLine is one line. It has several runs if there are gaps.
type chartLine struct {
	Name      string
	Runs      []string // points of polylines
	Now, Most string
	values    []float64
}

// tick is a place on an axis.
type tick struct {
	At    float64 // x or y
	Label string
	Time  time.Time // of x
}

// column is the place of a time, with the values of the lines and what happened then.
type column struct {
	X, W     float64
	Time     time.Time
	Values   []string
	Happened []string
}

// The size of a chart, and of its plot within.
const (
	chartWidth  = 480
	chartHeight = 180
	plotLeft    = 64
	plotRight   = chartWidth - 10
	plotTop     = 14
	plotBottom  = chartHeight - 24
)

// Size returns the view box, and Left to Bottom the edges of the plot, for the template.
func (chart) Size() string { return fmt.Sprintf("0 0 %d %d", chartWidth, chartHeight) }
func (chart) Left() int    { return plotLeft }
func (chart) Right() int   { return plotRight }
func (chart) Top() int     { return plotTop }
func (chart) Bottom() int  { return plotBottom }
func (chart) Tall() int    { return plotBottom - plotTop }

// plot is a rectangle in which lines are drawn.
type plot struct{ x, y, w, h float64 }

// runs returns the points of polylines for values from 0 to most, one per run without a gap.
func (p plot) runs(values []float64, most float64) (all []string) {
	var b strings.Builder
	points, last := 0, ""
	end := func() {
		if points == 1 {
			b.WriteString(last) // a line of no length has round ends, which are a dot
		}
		if points > 0 {
			all = append(all, strings.TrimSpace(b.String()))
		}
		b.Reset()
		points = 0
	}
	for i, v := range values {
		if math.IsNaN(v) {
			end()
			continue
		}
		last = fmt.Sprintf("%.1f,%.1f ", p.x+p.w*(float64(i)+.5)/float64(len(values)), p.y+p.h*(1-v/most))
		b.WriteString(last)
		points++
	}
	end()
	return all
}

// largest returns the largest of values, and 0 without one.
func largest(values []float64) (most float64) {
	for _, v := range values {
		if v > most { // false for NaN
			most = v
		}
	}
	return most
}

// newest returns the last value, and NaN if it is unknown.
func newest(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	return values[len(values)-1]
}

// spark returns the runs of a small line.
func spark(values []float64, p plot) []string { return p.runs(values, max(largest(values), 1)) }

// roundUp returns the next larger number of 1, 2 or 5 and zeros.
func roundUp(v float64) float64 {
	if v <= 0 {
		return 1 // an axis needs a length
	}
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, by := range []float64{1, 2, 5} {
		if v <= by*unit {
			return by * unit
		}
	}
	return 10 * unit
}

// roundTime is roundUp for seconds, of which half is round, too.
func roundTime(v float64) float64 {
	if v > 50 {
		for _, round := range []float64{60, 120, 240, 600, 1200, 3600, 7200, 14400, 43200, 86400} {
			if v <= round {
				return round
			}
		}
		return math.Ceil(v/86400) * 86400
	}
	return roundUp(v)
}

// unit is how a figure measures.
type unit struct {
	says  func(float64) string // formats a value,
	axis  func(float64) string // and one on the axis
	round func(float64) float64
	least float64 // the axis ends there or above
}

var (
	inMessages  = unit{whole, whole, roundUp, 10}
	inPerSecond = unit{perSecond, perSecond, roundUp, 1}
	inSeconds   = unit{seconds, axisSeconds, roundTime, .01}
)

func whole(v float64) string { return words.Count(int64(v)) }

func perSecond(v float64) string {
	if v < 10 {
		return strconv.FormatFloat(v, 'g', 2, 64) + "/s"
	}
	return words.Count(int64(v)) + "/s"
}

func seconds(v float64) string { return span(v) }

func axisSeconds(v float64) string {
	if v < 1 || v >= 60 {
		return strings.TrimSuffix(span(v), " 0 s")
	}
	return strconv.FormatFloat(v, 'g', 2, 64) + " s"
}

// figure is what a chart shows.
type figure struct {
	title string
	unit
	lines []chartLine // with names and values
	limit float64     // 0: none
	why   string      // what the limit is
}

// draw draws a figure. Every line has a value, or NaN, for each step of the window.
func (f figure) draw(id string, w samples.Window, between time.Duration, marks []samples.Mark) chart {
	c := chart{ID: id, Title: f.title, Lines: f.lines}
	most := max(f.least, f.limit)
	for _, l := range f.lines {
		most = max(most, largest(l.values))
	}
	most = f.round(most)
	p := plot{plotLeft, plotTop, plotRight - plotLeft, plotBottom - plotTop}
	round := func(v float64) float64 { return math.Round(10*v) / 10 }
	x := func(t time.Time) float64 {
		return round(p.x + p.w*float64(t.Sub(w.From))/float64(w.Until().Sub(w.From)))
	}
	for _, part := range []float64{0, .5, 1} {
		c.Y = append(c.Y, tick{At: round(p.y + p.h*(1-part)), Label: f.axis(most * part)})
	}
	for t := w.From.Add(between - 1).Truncate(between); t.Before(w.Until()); t = t.Add(between) {
		c.X = append(c.X, tick{At: x(t), Label: t.UTC().Format("15:04"), Time: t.UTC()})
	}
	if f.limit > 0 {
		c.Limit = &tick{At: round(p.y + p.h*(1-f.limit/most)), Label: f.why}
	}
	says := []string{f.title}
	for i := range c.Lines {
		l := &c.Lines[i]
		l.Runs = p.runs(l.values, most)
		l.Now, l.Most = f.say(newest(l.values)), f.say(largest(l.values))
		says = append(says, fmt.Sprintf("%s: %s now, at most %s", l.Name, l.Now, l.Most))
	}
	c.Says = strings.Join(says, ". ")
	for i := range w.N {
		from := w.From.Add(time.Duration(i) * w.Step)
		column := column{X: x(from), W: round(p.w / float64(w.N)), Time: from.UTC()}
		for _, l := range f.lines {
			column.Values = append(column.Values, f.say(l.values[i]))
		}
		c.Columns = append(c.Columns, column)
	}
	for _, m := range marks { // they are in the window
		in := &c.Columns[int(m.At.Sub(w.From)/w.Step)]
		c.Marks, in.Happened = append(c.Marks, x(m.At)), append(in.Happened, m.Says)
	}
	return c
}

// say formats a value, which may be unknown.
func (f figure) say(v float64) string {
	if math.IsNaN(v) {
		return "unknown"
	}
	return f.says(v)
}
