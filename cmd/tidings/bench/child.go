package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/relay"
)

// tally is the last output of a part under test. Its counters are those of a relay.
type tally struct {
	CatchUps  int `json:"catch_ups"`
	Conflicts int `json:"conflicts"`
}

// The parts that a child process can run.
const (
	partRelay          = "relay"
	partFollowerCounts = followercounts.Name
	partArchiver       = history.Name
	partAPI            = "api"
	partCeiling        = "ceiling"
	partArchive        = outbox.ArchiveJob
)

// childConfig is the environment of a part under test.
type childConfig struct {
	DatabaseURL string `env:"DATABASE_URL, required"`
	Postgres    postgres.Config
	Broker      broker.Config
	Relay       relay.Config
	Consumers   consumers.Config
	API         api.Config
	Archive     outbox.ArchiveConfig
}

// childCommand returns the hidden command that runs one part like its binary, and prints its tally
// at the end.
func childCommand() *cobra.Command {
	return &cobra.Command{
		Use: "child", Hidden: true, Args: cobra.ExactArgs(1), Short: "One part under test",
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			var cfg childConfig
			if err := envconfig.Process(ctx, &cfg); err != nil {
				return err
			}
			ctx, stop, err := daemon.Trace(ctx, envconfig.OsLookuper(), args[0], slog.Default(), nil)
			if err != nil {
				return err
			}
			defer stop()
			reg, role := prometheus.NewRegistry(), postgres.RoleSystem
			if args[0] == partAPI || args[0] == partCeiling {
				role = postgres.RoleAPI
			}
			pool, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, role, args[0])
			if err != nil {
				return err
			}
			defer pool.Close()
			switch args[0] {
			case partRelay:
				err = cfg.runRelay(ctx, pool, reg)
			case partAPI:
				err = cfg.runAPI(ctx, pool, reg, cmd.OutOrStdout())
			case partCeiling:
				err = cfg.runCeiling(ctx, pool, cmd.OutOrStdout())
			case partArchive:
				err = cfg.runArchive(ctx, pool, reg)
			case partFollowerCounts:
				err = cfg.runConsumer(ctx, pool, reg, followercounts.New(kinds.Builtin))
			case partArchiver:
				err = cfg.runConsumer(ctx, pool, reg, history.New(kinds.Builtin))
			default:
				err = fmt.Errorf("no part %q", args[0])
			}
			if err != nil {
				return err
			}
			t := tally{CatchUps: counted(reg, "tidings_relay_catch_ups_total"), Conflicts: counted(reg, "tidings_relay_conflicts_total")}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(t)
		},
	}
}

func (cfg childConfig) runRelay(ctx context.Context, pool *pgxpool.Pool, reg *prometheus.Registry) error {
	relay.UseOneProcessor()
	r, err := relay.New(cfg.Relay, pool, cfg.Broker, slog.Default(), reg)
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func (cfg childConfig) runConsumer(ctx context.Context, pool *pgxpool.Pool, reg *prometheus.Registry, p consumers.Projection) error {
	consumers.CollectLess()
	nc, js, err := broker.Open(cfg.Broker, p.Name(), slog.Default())
	if err != nil {
		return err
	}
	defer nc.Close()
	c, err := consumers.New(cfg.Consumers, consumers.Deps{Pool: pool, JetStream: js,
		Streams:  consumers.Streams{Name: cfg.Broker.Stream, Prefix: cfg.Broker.Prefix, Timeout: cfg.Broker.Timeout},
		Registry: reg, Log: slog.Default()}, p)
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// counted returns the sum of a counter.
func counted(reg *prometheus.Registry, name string) (n int) {
	families, err := reg.Gather()
	if err != nil {
		return -1
	}
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				n += int(m.GetCounter().GetValue())
			}
		}
	}
	return n
}

// child is a process under test.
type child struct {
	part string
	cmd  *exec.Cmd
	out  *bufio.Reader
	wait func() error

	mu     sync.Mutex
	peak   float64       // MiB
	cpu    time.Duration // processor time
	before time.Duration // processor time until mark
	ended  bool
}

// leaseTTL is the lease time of parts under test. It is short, so that a takeover happens during
// the run.
const leaseTTL = time.Second

// startChild starts a part on the servers, whose close kills it. env adds to its environment.
func (s *servers) startChild(part string, env ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "bench", "child", part)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+s.url, "NATS_URL="+s.broker.URL, "NATS_STREAM="+s.broker.Stream,
		"LEASE_TTL="+leaseTTL.String(), "LOG_LEVEL=warn", "HEARTBEAT_INTERVAL=0")
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = logTo(s.say)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", part, err)
	}
	c := &child{part: part, cmd: cmd, out: bufio.NewReader(stdout), wait: sync.OnceValue(cmd.Wait)}
	s.undo = append(s.undo, func() error { c.kill(); return nil })
	return c, nil
}

// startChildren starts several parts.
func (s *servers) startChildren(parts []string, env ...string) ([]*child, error) {
	all := make([]*child, len(parts))
	for i, part := range parts {
		var err error
		if all[i], err = s.startChild(part, env...); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// logTo is a writer that passes a child's log to say.
type logTo func(string, ...any)

func (w logTo) Write(b []byte) (int, error) {
	w("child: %s", b)
	return len(b), nil
}

// sample returns the process's peak memory in MiB and its processor time so far, or those of the
// last sample if it has ended.
func (c *child) sample() (peak float64, cpu time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended { // another process may have its id
		return c.peak, c.cpu
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	if err != nil {
		return c.peak, c.cpu
	}
	if _, rest, ok := strings.Cut(string(status), "VmHWM:"); ok {
		if kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64); err == nil {
			c.peak = max(c.peak, kb/1024)
		}
	}
	c.cpu = max(c.cpu, processorTime(c.cmd.Process.Pid))
	return c.peak, c.cpu
}

// processorTime returns the processor time of a process so far, or 0 if it cannot be read.
func processorTime(pid int) time.Duration {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	const user, system, tick = 11, 12, 10 * time.Millisecond // fields after the name; their unit is USER_HZ (proc_pid_stat(5))
	_, rest, _ := strings.Cut(string(stat), ") ")
	f := strings.Fields(rest)
	if len(f) <= system {
		return 0
	}
	u, uerr := strconv.ParseInt(f[user], 10, 64)
	s, serr := strconv.ParseInt(f[system], 10, 64)
	if uerr != nil || serr != nil {
		return 0
	}
	return time.Duration(u+s) * tick
}

// backends returns the processor time of PostgreSQL's backends so far, by the part that uses them.
// A backend that has ended is missing. It returns nil if PostgreSQL is not on this machine.
func (s *servers) backends(ctx context.Context) (map[string]time.Duration, error) {
	rows, _ := s.owner.Query(ctx, `SELECT pid, substr(application_name, 9) FROM pg_stat_activity
		WHERE application_name LIKE 'tidings %' AND datname = current_database()`)
	var all map[string]time.Duration
	var pid int
	var part string
	_, err := pgx.ForEachRow(rows, []any{&pid, &part}, func() error {
		if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err != nil || !strings.HasPrefix(string(name), "postgres") {
			return nil // a process of another machine
		}
		if all == nil {
			all = make(map[string]time.Duration)
		}
		all[part] += processorTime(pid)
		return nil
	})
	return all, err
}

// mark excludes the processor time so far from used.
func (c *child) mark() { _, c.before = c.sample() }

// used returns the processor time since mark.
func (c *child) used() time.Duration {
	_, cpu := c.sample()
	return cpu - c.before
}

// kill ends the process like a crash.
func (c *child) kill() {
	c.sample()
	_ = c.cmd.Process.Kill() // fails if the process has ended
	_ = c.await()            // the error is that of the kill
}

// await waits for the end of the process.
func (c *child) await() error {
	err := c.wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	return err
}

// stop ends processes cleanly, except for those that were killed. It returns the sum of their
// tallies, and the highest of their peaks in MiB.
func stop(children ...*child) (sum tally, peak *float64, err error) {
	peak = new(float64)
	for _, c := range children {
		high, _ := c.sample()
		*peak = max(*peak, round(high, 1))
		if c.ended {
			continue
		}
		if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			return sum, nil, err
		}
		var t tally
		err := json.NewDecoder(c.out).Decode(&t)
		if werr := c.await(); werr != nil {
			err = werr
		}
		if err != nil {
			return sum, nil, fmt.Errorf("%s under test: %w", c.part, err)
		}
		sum.CatchUps, sum.Conflicts = sum.CatchUps+t.CatchUps, sum.Conflicts+t.Conflicts
	}
	return sum, peak, nil
}
