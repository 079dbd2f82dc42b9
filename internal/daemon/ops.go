package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// checkTimeout limits one readiness check. It is below the usual timeout of probes.
const checkTimeout = 2 * time.Second

// Ops is the port for operators. Host, and Ready of a host, are safe to call before and while Run
// runs.
type Ops struct {
	addr string
	reg  *prometheus.Registry
	log  *slog.Logger

	mu       sync.Mutex
	checks   map[string]func(context.Context) error
	starting map[string]int // parts that have no checks yet, by the prefix of their checks
	ln       net.Listener
}

// NewOps prepares the ops port of a binary on addr (host:port). It adds the metrics of the Go
// runtime, the process and the build to reg. It does not listen yet.
func NewOps(binary, addr string, reg *prometheus.Registry, log *slog.Logger) *Ops {
	for _, c := range []prometheus.Collector{buildInfo(binary), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})} {
		var already prometheus.AlreadyRegisteredError
		if err := reg.Register(c); err != nil && !errors.As(err, &already) {
			panic(err) // only a programming error: these collectors describe themselves consistently
		}
	}
	return &Ops{addr: addr, reg: reg, log: log.With("component", "ops"), checks: map[string]func(context.Context) error{},
		starting: map[string]int{}}
}

// buildInfo says that a binary, or a part with that name, runs in the process.
func buildInfo(binary string) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "tidings_build_info",
		Help:        "1, with the binary or the part of a process, and its version, as labels.",
		ConstLabels: prometheus.Labels{"binary": binary, "version": Version()}}, func() float64 { return 1 })
}

// Listen opens the port, so that its address is known before Run. Without it Run opens the port.
func (o *Ops) Listen() (net.Addr, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ln == nil {
		if _, _, err := net.SplitHostPort(o.addr); err != nil { // with "" it would listen on a random port of all addresses
			return nil, fmt.Errorf("OPS_ADDR is %q: want host:port: %w", o.addr, err)
		}
		l, err := net.Listen("tcp", o.addr)
		if err != nil {
			return nil, fmt.Errorf("listen for ops: %w", err)
		}
		o.ln = l
	}
	return o.ln.Addr(), nil
}

// Run serves until ctx ends, and returns nil on a clean stop.
func (o *Ops) Run(ctx context.Context) error {
	addr, err := o.Listen()
	if err != nil {
		return err
	}
	o.log.Info("listening", "addr", addr.String())
	return Serve(ctx, o.ln, o.Handler(), maxConnections/2, o.log)
}

// Handler returns the handler of /healthz, /readyz and /metrics.
func (o *Ops) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, readiness{Status: "ok"}) })
	mux.HandleFunc("GET /readyz", o.readyz)
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.reg, promhttp.HandlerOpts{Registry: o.reg, EnableOpenMetrics: true}))
	return mux
}

type readiness struct {
	Status  string    `json:"status"` // ok or unavailable
	Failing []failing `json:"failing,omitempty"`
}

type failing struct {
	Check string `json:"check"`
	Error string `json:"error"`
}

// readyz runs all checks, or with ?part=NAME those of the part. It runs them at the same time, so
// several that time out take no longer than one.
func (o *Ops) readyz(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), checkTimeout)
	defer cancel()
	part := ""
	if name := r.URL.Query().Get("part"); name != "" {
		part = name + ": "
	}
	o.mu.Lock()
	if _, runs := o.starting[part]; part != "" && !runs {
		o.mu.Unlock()
		http.Error(w, "no such part", http.StatusNotFound)
		return
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var bad []failing
	for name, check := range o.checks {
		if !strings.HasPrefix(name, part) {
			continue
		}
		wg.Go(func() {
			if err := check(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				bad = append(bad, failing{Check: name, Error: Plain(err)})
			}
		})
	}
	for prefix, parts := range o.starting {
		if parts > 0 && strings.HasPrefix(prefix, part) {
			mu.Lock()
			bad = append(bad, failing{Check: prefix + "start", Error: "starting"})
			mu.Unlock()
		}
	}
	o.mu.Unlock()
	wg.Wait()
	if len(bad) > 0 {
		sort.Slice(bad, func(i, j int) bool { return bad[i].Check < bad[j].Check })
		answer(w, http.StatusServiceUnavailable, readiness{Status: "unavailable", Failing: bad})
		return
	}
	answer(w, http.StatusOK, readiness{Status: "ok"})
}

func answer(w http.ResponseWriter, status int, body readiness) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false) // people read it, and subjects end in >
	_ = e.Encode(body)     // the only error is a client that has gone
}
