package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go/jetstream"
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
			if args[0] == partAPI {
				role = postgres.RoleAPI
			}
			pool, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, role, args[0])
			if err != nil {
				return err
			}
			defer pool.Close()
			var part interface{ Run(context.Context) error }
			switch args[0] {
			case partRelay:
				relay.UseOneProcessor()
				part, err = relay.New(cfg.Relay, pool, cfg.Broker, slog.Default(), reg)
			case partAPI:
				truth, terr := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, role, args[0])
				if terr != nil {
					return terr
				}
				defer truth.Close()
				cfg.Postgres.MaxConns = api.TokenConns
				tokens, terr := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, role, args[0])
				if terr != nil {
					return terr
				}
				defer tokens.Close()
				part = apiPart{cfg: cfg.API, broker: cfg.Broker, truth: truth, tokens: tokens, projections: pool,
					reg: reg, out: cmd.OutOrStdout()}
			case partArchive:
				archive, aerr := outbox.NewArchive(cfg.Archive, archiveTerms, pool, slog.Default(), reg)
				if aerr != nil {
					return aerr
				}
				part = archivePart{archive, pool}
			case partFollowerCounts, partArchiver:
				nc, cerr := broker.Connect(cfg.Broker, args[0], slog.Default())
				if cerr != nil {
					return cerr
				}
				defer nc.Close()
				js, jerr := jetstream.New(nc)
				if jerr != nil {
					return jerr
				}
				part, err = consumers.New(cfg.Consumers, consumers.Deps{Pool: pool, JetStream: js,
					Streams:  consumers.Streams{Name: cfg.Broker.Stream, Prefix: cfg.Broker.Prefix, Timeout: cfg.Broker.Timeout},
					Registry: reg, Log: slog.Default()}, projectionOf(args[0]))
			default:
				err = fmt.Errorf("no part %q", args[0])
			}
			if err != nil {
				return err
			}
			if err := part.Run(ctx); err != nil {
				return err
			}
			t := tally{CatchUps: read(reg, "tidings_relay_catch_ups_total"), Conflicts: read(reg, "tidings_relay_conflicts_total")}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(t)
		},
	}
}

// projectionOf returns the projection of a consumer.
func projectionOf(part string) consumers.Projection {
	if part == partArchiver {
		return history.New(kinds.Builtin)
	}
	return followercounts.New(kinds.Builtin)
}

func read(reg *prometheus.Registry, name string) (n int) {
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
	cmd  *exec.Cmd
	out  *bufio.Reader
	peak float64       // MiB, sampled
	cpu  time.Duration // processor time, sampled
	mu   sync.Mutex
	wait func() error
}

// startChild starts a part on the servers. ttl is its lease time, and env adds to its environment.
func startChild(s *servers, part string, ttl time.Duration, stderr io.Writer, env ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "bench", "child", part)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+s.url, "NATS_URL="+s.broker.URL, "NATS_STREAM="+s.broker.Stream,
		"LEASE_TTL="+ttl.String(), "LOG_LEVEL=warn", "HEARTBEAT_INTERVAL=0")
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", part, err)
	}
	return &child{cmd: cmd, out: bufio.NewReader(stdout), wait: sync.OnceValue(cmd.Wait)}, nil
}

// sample records the process's peak memory and its processor time so far.
func (c *child) sample() {
	dir := fmt.Sprintf("/proc/%d/", c.cmd.Process.Pid)
	status, err := os.ReadFile(dir + "status")
	if err != nil {
		return // the process has ended, so keep the last sample
	}
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, rest, ok := strings.Cut(string(status), "VmHWM:"); ok {
		if kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64); err == nil {
			c.peak = max(c.peak, kb/1024)
		}
	}
	const user, system, tick = 11, 12, 10 * time.Millisecond // fields after the name; their unit is USER_HZ (proc_pid_stat(5))
	_, rest, _ := strings.Cut(string(stat), ") ")
	if f := strings.Fields(rest); len(f) > system {
		u, uerr := strconv.ParseInt(f[user], 10, 64)
		s, serr := strconv.ParseInt(f[system], 10, 64)
		if uerr == nil && serr == nil {
			c.cpu = max(c.cpu, time.Duration(u+s)*tick)
		}
	}
}

// kill ends the process like a crash.
func (c *child) kill() {
	c.sample()
	_ = c.cmd.Process.Kill() // fails if the process has ended
	_ = c.wait()             // the error is that of the kill
}

// stop ends the process cleanly and returns its tally.
func (c *child) stop() (t tally, err error) {
	c.sample()
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return t, err
	}
	err = json.NewDecoder(c.out).Decode(&t)
	if werr := c.wait(); werr != nil {
		return t, fmt.Errorf("%s under test: %w", c.cmd.Args[len(c.cmd.Args)-1], werr)
	}
	return t, err
}
