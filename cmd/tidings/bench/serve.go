package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/work"
)

// serveOptions are the flags of `tidings bench serve`.
type serveOptions struct {
	idle, duration time.Duration
	rate           float64
}

func serveCommand() *cobra.Command {
	var o serveOptions
	cmd := &cobra.Command{
		Use: "serve", Args: cobra.NoArgs,
		Short: "Compare the memory and processor time of one tidings serve with those of a process per part",
		Long: `The case serve runs all parts in one process. The case fleet runs five, as the binaries do: the API,
the relay, and the three consumers, of which the archiver also runs the jobs. Each case has new
servers. It measures --idle without requests, and then --duration with --rate writes a second
through the API. Memory is the sum of the processes' resident sets at the end of each phase.

The API refuses some of the 32 callers (503 overloaded, in the result: refused) while more than a
tenth of the writes take longer than API_MAX_WAIT, as on a slow disk.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.idle <= 0 || o.duration <= 0 || o.rate <= 0 {
				return errors.New("want an --idle, a --duration and a --rate above 0")
			}
			processes := map[string][]string{"fleet": {"api", "relay", "followercounts", "threadcache", "archiver jobs"}, "serve": {""}}
			return onEach(cmd, syncDefault, []string{"fleet", "serve"}, func(ctx context.Context, s *servers, name string) error {
				return o.run(ctx, s, name, processes[name])
			})
		},
	}
	f := cmd.Flags()
	f.DurationVar(&o.idle, "idle", time.Minute, "how long to measure without requests")
	f.DurationVar(&o.duration, "duration", time.Minute, "how long to measure with writes")
	f.Float64Var(&o.rate, "rate", 1000, "writes per second")
	return cmd
}

// serveResult is the output line of a case.
type serveResult struct {
	Case      string  `json:"case"`
	Processes int     `json:"processes"`
	IdleMiB   float64 `json:"idle_mib"`
	IdleCPU   float64 `json:"idle_cpu"` // processors
	Writes    int     `json:"writes"`
	Rate      float64 `json:"writes_per_second"`
	Refused   int     `json:"refused"` // 503 with Retry-After
	Errors    int     `json:"errors"`
	LoadMiB   float64 `json:"load_mib"`
	LoadCPU   float64 `json:"load_cpu"`
	settings
}

// run measures processes that have the parts of one string each.
func (o serveOptions) run(ctx context.Context, s *servers, name string, processes []string) error {
	token := tokens.New()
	if err := tokens.Ensure(ctx, s.pool, tenant, "bench", token, []string{tokens.RoleRead, tokens.RoleWrite}); err != nil {
		return err
	}
	api, err := freeAddr()
	if err != nil {
		return err
	}
	var all []*child
	for _, parts := range processes {
		c, err := s.startServe(ctx, api, strings.Fields(parts)...)
		if err != nil {
			return err
		}
		all = append(all, c)
	}
	r := serveResult{Case: name, Processes: len(all)}
	s.say("%d processes are ready; measuring %s without requests", len(all), o.idle)
	if r.IdleMiB, r.IdleCPU, err = measure(all, func() error { return work.Sleep(ctx, o.idle) }); err != nil {
		return err
	}
	s.say("%.0f writes/s for %s", o.rate, o.duration)
	load := newCallers(&apiUnderTest{addr: api, tokens: []string{token}}, 32, func(int, int) request {
		return request{method: "PUT", path: "/v1/follows/" + strconv.FormatInt(1+rand.Int64N(1_000_000_000_000), 10) + "/" +
			strconv.Itoa(1+rand.IntN(1000))}
	})
	if r.LoadMiB, r.LoadCPU, err = measure(all, func() error {
		_, err := load.run(ctx, workload{rate: o.rate, duration: o.duration})
		return err
	}); err != nil {
		return err
	}
	r.Writes, r.Refused, r.Errors, r.Rate = len(load.took), load.refused, load.failed, perSecond(len(load.took), o.duration)
	if load.lastErr != nil {
		s.say("%d writes were refused and %d failed, the last: %v", r.Refused, r.Errors, load.lastErr)
	}
	for _, c := range all {
		if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		if err := c.await(); err != nil {
			return fmt.Errorf("stop a process: %w", err)
		}
	}
	return s.print(&r)
}

// measure returns the memory and the processors that the children use while run runs.
func measure(all []*child, run func() error) (mib, processors float64, err error) {
	for _, c := range all {
		c.mark()
	}
	start := time.Now()
	if err := run(); err != nil {
		return 0, 0, err
	}
	took := time.Since(start)
	for _, c := range all {
		resident, err := c.resident()
		if err != nil {
			return 0, 0, err
		}
		mib, processors = mib+resident, processors+c.used().Seconds()/took.Seconds()
	}
	return round(mib, 0), round(processors, 3), nil
}

// startServe starts `tidings serve` with the parts, or with all, and returns when it is ready.
func (s *servers) startServe(ctx context.Context, api string, parts ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ops, err := freeAddr()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, append([]string{"serve"}, parts...)...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+s.url, "PROJECTIONS_DATABASE_URL="+s.url, "NATS_URL="+s.broker.URL, "LOG_LEVEL=warn",
		"OPS_ADDR="+ops, "API_ADDR="+api, "API_CURSOR_KEY="+strings.Repeat("ab", 32), "API_RATE_WRITE=off", "API_RATE_AUTHOR=off")
	if len(parts) == 1 && parts[0] == partRelay {
		cmd.Env = append(cmd.Env, "GOMAXPROCS=1") // as the relay's binary
	}
	cmd.Stderr = logTo(s.say)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start serve: %w", err)
	}
	c := &child{part: strings.Join(parts, " "), cmd: cmd, out: bufio.NewReader(strings.NewReader("")), wait: sync.OnceValue(cmd.Wait)}
	s.undo = append(s.undo, func() error { c.kill(); return nil })
	for deadline := time.Now().Add(time.Minute); ; {
		resp, err := http.Get("http://" + ops + "/readyz")
		if err == nil {
			err = resp.Body.Close()
		}
		if err == nil && resp.StatusCode == http.StatusOK {
			return c, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("serve %s is not ready after a minute: %w", c.part, err)
		}
		if err := work.Sleep(ctx, 50*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// resident returns the process's resident set in MiB.
func (c *child) resident() (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return 0, fmt.Errorf("process %d has ended", c.cmd.Process.Pid)
	}
	kb, err := strconv.ParseFloat(fields[0], 64)
	return kb / 1024, err
}
