package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// printTable prints one row per scenario and peer. Counts are sums over the rounds, and all else is
// their median.
func printTable(w io.Writer, o options, ps []peer, ss []scenario, all []result) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Each load offers %d transactions per second for %g seconds. A drain has %d events.\n\n", o.rate, o.seconds, o.backlog)
	b.WriteString("| scenario | peer | events | lost | stuck | doubled | inverted | stalled, s | p50, ms | p99, ms | slowest, ms |" +
		" events/s | relay, us/event | PostgreSQL, us/event |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, s := range ss {
		for _, p := range ps {
			var these []result
			for _, r := range all {
				if r.Scenario == s.name && r.Peer == p.name {
					these = append(these, r)
				}
			}
			if len(these) > 0 {
				b.WriteString(row(s, p, these))
			}
		}
	}
	b.WriteByte('\n')
	for _, s := range ss {
		fmt.Fprintf(&b, "- `%s`: %s.\n", s.name, s.what)
	}
	for _, p := range ps {
		if v := p.versions(); len(v) > 0 {
			fmt.Fprintf(&b, "- `%s` is %s.\n", p.name, strings.Join(v, ", "))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func row(s scenario, p peer, these []result) string {
	sum := func(of func(result) int) (n int) {
		for _, r := range these {
			n += of(r)
		}
		return n
	}
	middle := func(of func(result) float64) float64 {
		values := make([]float64, len(these))
		for i, r := range these {
			values[i] = of(r)
		}
		slices.Sort(values)
		return quantile(values, 0.5)
	}
	cells := []string{s.name, p.name,
		fmt.Sprint(sum(func(r result) int { return r.Events })),
		fmt.Sprint(sum(func(r result) int { return r.Lost })),
		fmt.Sprint(sum(func(r result) int { return r.Stuck })),
		fmt.Sprint(sum(func(r result) int { return r.Doubled })),
		fmt.Sprint(sum(func(r result) int { return r.Inverted })),
	}
	if n := sum(func(r result) int { return r.Invented }); n > 0 {
		cells[1] += fmt.Sprintf(" (%d invented)", n)
	}
	if s.drain {
		cells = append(cells, "", "", "", "")
	} else {
		cells = append(cells,
			fmt.Sprintf("%.1f", middle(func(r result) float64 { return r.Stalled.Seconds() })),
			fmt.Sprintf("%.1f", middle(func(r result) float64 { return ms(r.P50) })),
			fmt.Sprintf("%.0f", middle(func(r result) float64 { return ms(r.P99) })),
			fmt.Sprintf("%.0f", middle(func(r result) float64 { return ms(r.Max) })))
	}
	if s.fault == nil && !s.pair {
		cells = append(cells,
			fmt.Sprintf("%.0f", middle(func(r result) float64 { return r.Rate })),
			fmt.Sprintf("%.0f", middle(func(r result) float64 { return r.RelayCPU })),
			fmt.Sprintf("%.0f", middle(func(r result) float64 { return r.PostCPU })))
	} else {
		cells = append(cells, "", "", "")
	}
	return "| " + strings.Join(cells, " | ") + " |\n"
}
