package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
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
			return onServers(cmd, "", syncDefault, o.run)
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
	CPU         float64  `json:"cpu_us_per_write"`
	RelayCPU    *float64 `json:"relay_cpu_us_per_write"`
	ConsumerCPU *float64 `json:"consumer_cpu_us_per_write"`
	Exported    int64    `json:"exported_bytes"`
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

func (o traceOptions) run(ctx context.Context, s *servers) error {
	on, off, err := alternate(o.pairs, false, func(on bool) (traceResult, error) {
		r := traceResult{writeResult: writeResult{Case: "trace-off", Clients: traceClients}}
		if on {
			r.Case = "trace-on"
		}
		if err := o.measure(ctx, s, on, &r); err != nil {
			return r, fmt.Errorf("%s: %w", r.Case, err)
		}
		return r, s.print(&r)
	})
	if err != nil {
		return err
	}
	total := traceRatios{Case: "trace", Sample: o.ratio, Rate: o.rate}
	total.Ratios, total.Median = ratios(on, off, func(r traceResult) float64 { return r.CPU })
	return s.print(&total)
}

// traceClients is the number of connections that write.
const traceClients = 64

// measure does one run, with tracing if on is set, and sets the results of r.
func (o traceOptions) measure(ctx context.Context, s *servers, on bool, r *traceResult) error {
	var exported atomic.Int64
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		n, _ := io.Copy(io.Discard, req.Body) // an interrupted request counts in part
		exported.Add(n)
	}))
	defer collector.Close()
	env := []string{"OTEL_EXPORTER_OTLP_ENDPOINT=", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="}
	if on {
		env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + collector.URL, "OTEL_TRACES_SAMPLER=parentbased_traceidratio",
			fmt.Sprint("OTEL_TRACES_SAMPLER_ARG=", o.ratio)}
	}
	a, err := s.startAPI(ctx, 1, env...)
	if err != nil {
		return err
	}
	parts, err := s.startChildren([]string{partRelay, partFollowerCounts}, env...)
	if err != nil {
		return err
	}
	parts = append([]*child{a.child}, parts...)
	write := func(d time.Duration) (*callers, error) {
		c := newCallers(a, traceClients, integerIDs.follows)
		c.fromDue = true
		if _, err := c.run(ctx, workload{rate: float64(o.rate), duration: d}); err != nil {
			return nil, err
		}
		return c, await(ctx, 10*time.Millisecond, 0, func() (bool, error) { return s.published(ctx) })
	}
	if _, err := write(min(o.duration, 3*time.Second)); err != nil { // to warm up
		return err
	}
	for _, c := range parts {
		c.mark()
	}
	s.say("%s: %d writes per second for %s", r.Case, o.rate, o.duration)
	start := time.Now()
	c, err := write(o.duration)
	if err != nil {
		return err
	}
	r.fill(c, time.Since(start))
	if *r.Errors > 0 || r.Accepted == 0 { // a machine that is busy with other work may refuse some
		return fmt.Errorf("%d writes were accepted, %d refused, %d failed", r.Accepted, *r.Refused, *r.Errors)
	}
	for i, to := range []**float64{&r.APICPU, &r.RelayCPU, &r.ConsumerCPU} {
		*to = perEvent(parts[i].used(), r.Accepted)
		r.CPU += **to
	}
	r.CPU = round(r.CPU, 1)
	if _, _, err := stop(parts...); err != nil {
		return err
	}
	if r.Exported = exported.Load(); on != (r.Exported > 0) {
		return fmt.Errorf("%d bytes of spans were exported", r.Exported)
	}
	return nil
}
