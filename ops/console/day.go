package console

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/replay"
	"github.com/tidings/tidings/ops/samples"
	"github.com/tidings/tidings/ops/status"
)

// dayRange is a part of the last day that the page shows.
type dayRange struct {
	Name, Title string
	step        time.Duration // one point of a line
	n           int           // points
	between     time.Duration // times on the axis
}

// dayRanges are the choices of the page. The first is what it shows without a choice.
var dayRanges = []dayRange{
	{"15m", "15 minutes", samples.Every, 90, 5 * time.Minute},
	{"1h", "1 hour", 30 * time.Second, 120, 15 * time.Minute},
	{"24h", "24 hours", 10 * time.Minute, 144, 4 * time.Hour},
}

// lastHour is the window of the small lines.
func (c *Console) lastHour() samples.Window { return c.day.Window(dayRanges[1].step, dayRanges[1].n) }

type dayPage struct {
	Ranges []dayRange
	Range  dayRange
	Marks  []samples.Mark // newest first
	Charts []chart
}

// Rows returns the values of all lines, newest first.
func (p dayPage) Rows() (rows []column) {
	for i := range p.Range.n {
		var row column
		for _, c := range p.Charts {
			row.Time = c.Columns[len(c.Columns)-1-i].Time
			row.Values = append(row.Values, c.Columns[len(c.Columns)-1-i].Values...)
		}
		rows = append(rows, row)
	}
	return rows
}

func (c *Console) dayData(ctx context.Context, v *view) (any, error) {
	p := dayPage{Ranges: dayRanges, Range: dayRanges[0]}
	if name := v.query("range"); name != "" {
		i := slices.IndexFunc(dayRanges, func(r dayRange) bool { return r.Name == name })
		if i < 0 {
			return nil, &inputError{"range is 15m, 1h or 24h."}
		}
		p.Range = dayRanges[i]
	}
	if err := c.day.Refresh(ctx); err != nil {
		return nil, err
	}
	w := c.day.Window(p.Range.step, p.Range.n)
	marks, err := c.marks(ctx, w)
	if err != nil {
		return nil, err
	}
	for i, f := range c.figures(w) {
		p.Charts = append(p.Charts, f.draw(fmt.Sprint("chart-", i), w, p.Range.between, marks))
	}
	slices.Reverse(marks)
	p.Marks = marks
	return p, nil
}

// marks returns what happened in the window: what the samples show, and the replays of the console.
func (c *Console) marks(ctx context.Context, w samples.Window) ([]samples.Mark, error) {
	all := c.day.Marks(w)
	replays, err := audit.Last(ctx, c.deps.Truth, actReplay, c.observer.src.Consumers)
	if err != nil {
		return nil, err
	}
	for consumer, a := range replays {
		all = slices.DeleteFunc(all, func(m samples.Mark) bool { // the same replay, as a sample saw it
			since := m.At.Sub(a.Started)
			return m.Says == consumer+samples.ReplayBegan && since > -samples.Every && since < 2*samples.Every
		})
		if !a.Started.Before(w.From) && a.Started.Before(w.Until()) {
			all = append(all, samples.Mark{At: a.Started, Says: consumer + " replayed by " + a.TokenName})
		}
	}
	slices.SortFunc(all, func(a, b samples.Mark) int { return a.At.Compare(b.At) })
	return all, nil
}

// figures returns what the page draws.
func (c *Console) figures(w samples.Window) []figure {
	largest := func(name, figure string) chartLine { return chartLine{Name: name, values: c.day.Largest(figure, w)} }
	rates := func(name, figure string) chartLine { return chartLine{Name: name, values: c.day.Rates(figure, w)} }
	var behind, late, applied, dead []chartLine
	dead = append(dead, largest("outbox", samples.DeadOutbox))
	for _, name := range c.observer.src.Consumers {
		behind, late = append(behind, largest(name, samples.Behind+name)), append(late, largest(name, samples.Late+name))
		applied, dead = append(applied, rates(name, samples.Applied+name)), append(dead, largest(name, samples.Dead+name))
	}
	const lateSays = "late from 1 min"
	return []figure{
		{title: "Events per second", unit: inPerSecond,
			lines: []chartLine{rates("written", samples.Written), rates("published", samples.Published)}},
		{title: "Pending messages", unit: inMessages, lines: []chartLine{largest("pending", samples.Pending)}},
		{title: "Oldest pending message", unit: inSeconds, limit: doctor.LateSeconds, why: lateSays,
			lines: []chartLine{largest("oldest due", samples.Oldest)}},
		{title: "Messages that consumers are behind", unit: inMessages, lines: behind},
		{title: "Time that consumers are behind", unit: inSeconds, limit: doctor.LateSeconds, why: lateSays, lines: late},
		{title: "Events per second that consumers apply", unit: inPerSecond, lines: applied},
		{title: "Dead letters", unit: inMessages, lines: dead},
		{title: "Requests per second", unit: inPerSecond, lines: []chartLine{rates("requests", samples.Requests)}},
		{title: "Duration of requests", unit: inSeconds, lines: []chartLine{largest("p99", samples.P99)}},
	}
}

// refreshDay reads the new samples, for pages that work without them. While the truth is
// unavailable or the table is locked, the lines end earlier.
func (c *Console) refreshDay(ctx context.Context, st status.State) error {
	if st.IsUnavailable(status.ServerTruth) {
		return nil
	}
	err := c.day.Refresh(status.WithShortLockTimeout(ctx, st))
	if postgres.IsLockTimeout(err) {
		return nil
	}
	return err
}

// sample reads the figures of the installation.
func (c *Console) sample(ctx context.Context) (map[string]float64, error) {
	st, err := status.Read(ctx, c.observer.src)
	f := samples.Of(st)
	if err != nil || st.IsUnavailable(status.ServerProjections) {
		return f, err
	}
	running, err := replay.Running(ctx, c.deps.Projections, c.observer.src.Consumers)
	if err != nil {
		c.log.DebugContext(ctx, "replays not sampled", "err", err) // the projections have become unavailable
		return f, nil
	}
	for _, name := range c.observer.src.Consumers {
		if f[samples.Replaying+name] = 0; slices.Contains(running, name) {
			f[samples.Replaying+name] = 1
		}
	}
	return f, nil
}
