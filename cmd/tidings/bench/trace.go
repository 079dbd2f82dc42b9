package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
)

// traceOptions are the flags of `tidings bench trace`.
type traceOptions struct {
	rate, pairs int
	ratio       float64
	duration    time.Duration
}

func traceCommand() *cobra.Command {
	var o traceOptions
	cmd := &cobra.Command{
		Use: "trace", Args: cobra.NoArgs,
		Short: "Measure the processor time of tracing at a steady rate of writes",
		Long: `Trace offers --rate follows per second for --duration to the API, with a relay and followercounts
behind it, in --pairs pairs of runs. One run of a pair has no tracing (trace-off). The other one
samples --ratio of the requests and exports the spans to a collector that discards them (trace-on).
The order changes from pair to pair. cpu_us_per_write is the processor time of the three processes.
The last line has the ratio of each pair and their median.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.rate < 1 || o.pairs < 1 || o.duration <= 0 || !(o.ratio > 0 && o.ratio <= 1) {
				return errors.New("want --rate and --pairs of 1 or more, a --duration above 0, and a --ratio above 0 and up to 1")
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), progress(cmd))
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.rate, "rate", 1000, "writes per second")
	f.IntVar(&o.pairs, "pairs", 3, "pairs of runs, with and without tracing")
	f.Float64Var(&o.ratio, "ratio", 0.01, "the ratio of sampled requests")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "how long each run writes")
	return cmd
}

// traceResult is the output line of a run.
type traceResult struct {
	writeResult
	CPU         float64 `json:"cpu_us_per_write"`
	APICPU      float64 `json:"api_cpu_us_per_write"`
	RelayCPU    float64 `json:"relay_cpu_us_per_write"`
	ConsumerCPU float64 `json:"consumer_cpu_us_per_write"`
	Exported    int64   `json:"exported_bytes"`
}

// traceRatios is the last output line.
type traceRatios struct {
	Case   string    `json:"case"`
	Ratios []float64 `json:"ratios"` // processor time with tracing to that without, per pair
	Median float64   `json:"median"`
	Sample float64   `json:"sample_ratio"`
	Rate   int       `json:"writes_per_second"`
	settings
}

func (o traceOptions) run(ctx context.Context, out io.Writer, say func(string, ...any)) (err error) {
	say("starting servers")
	s, err := startServers(ctx, syncDefault, slog.Default())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := declareStream(ctx, s); err != nil {
		return err
	}
	total := traceRatios{Case: "trace", Sample: o.ratio, Rate: o.rate}
	if total.settings, err = s.settings(ctx); err != nil {
		return err
	}
	for pair := range o.pairs {
		cpu := map[bool]float64{}
		for _, on := range []bool{pair%2 == 1, pair%2 == 0} {
			r, err := o.measure(ctx, s, on, say)
			if err != nil {
				return fmt.Errorf("%s: %w", r.Case, err)
			}
			r.settings = total.settings
			if err := writeLine(out, r); err != nil {
				return err
			}
			cpu[on] = r.CPU
		}
		total.Ratios = append(total.Ratios, round(cpu[true]/cpu[false], 3))
	}
	sorted := slices.Sorted(slices.Values(total.Ratios))
	total.Median = round((sorted[(o.pairs-1)/2]+sorted[o.pairs/2])/2, 3)
	return writeLine(out, total)
}

// measure does one run, with tracing if on is set.
func (o traceOptions) measure(ctx context.Context, s *servers, on bool, say func(string, ...any)) (r traceResult, err error) {
	const clients = 64
	r = traceResult{writeResult: writeResult{Case: "trace-off", Clients: clients}}
	var exported atomic.Int64
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		n, _ := io.Copy(io.Discard, req.Body) // an interrupted request counts in part
		exported.Add(n)
	}))
	defer collector.Close()
	env := []string{"OTEL_EXPORTER_OTLP_ENDPOINT=", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="}
	if on {
		r.Case = "trace-on"
		env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + collector.URL, "OTEL_TRACES_SAMPLER=parentbased_traceidratio",
			fmt.Sprint("OTEL_TRACES_SAMPLER_ARG=", o.ratio)}
	}
	a, err := startAPI(ctx, s, 1, logTo(say), env...)
	if err != nil {
		return r, err
	}
	parts := []*child{a.child}
	defer func() {
		for _, c := range parts {
			c.kill()
		}
	}()
	for _, part := range []string{partRelay, partFollowerCounts} {
		c, err := startChild(s, part, leaseTTL, logTo(say), env...)
		if err != nil {
			return r, err
		}
		parts = append(parts, c)
	}
	warm, w := newWriters(a, clients, follows), newWriters(a, clients, follows)
	warm.offer(ctx, float64(o.rate), min(o.duration, 3*time.Second))
	if err := drained(ctx, s); err != nil {
		return r, err
	}
	before := make([]time.Duration, len(parts))
	for i, c := range parts {
		c.sample()
		before[i] = c.cpu
	}
	say("%s: %d writes per second for %s", r.Case, o.rate, o.duration)
	start := time.Now()
	w.offer(ctx, float64(o.rate), o.duration)
	if err := drained(ctx, s); err != nil {
		return r, err
	}
	w.fill(&r.writeResult, time.Since(start))
	if *r.Errors > 0 || r.Accepted == 0 { // a machine that is busy with other work may refuse some
		return r, fmt.Errorf("%d writes were accepted, %d refused, %d failed", r.Accepted, *r.Refused, *r.Errors)
	}
	for i, to := range []*float64{&r.APICPU, &r.RelayCPU, &r.ConsumerCPU} {
		parts[i].sample()
		*to = *perEvent(parts[i].cpu-before[i], r.Accepted)
		r.CPU += *to
	}
	r.CPU = round(r.CPU, 1)
	for len(parts) > 0 {
		c := parts[0]
		parts = parts[1:]
		if _, err := c.stop(); err != nil {
			return r, err
		}
	}
	r.Exported = exported.Load()
	if on != (r.Exported > 0) {
		return r, fmt.Errorf("%d bytes of spans were exported", r.Exported)
	}
	return r, nil
}

// drained waits until the outbox has no pending row.
func drained(ctx context.Context, s *servers) error {
	for {
		var pending bool
		err := s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&pending)
		if err != nil || !pending {
			return err
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}
