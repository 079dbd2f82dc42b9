package broker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// ServerConfig says where and how to run a server in this process.
type ServerConfig struct {
	Dir      string       // of the JetStream store; a directory per server
	Host     string       // to listen on; 127.0.0.1 when empty
	Port     int          // to listen on; any free one when 0
	LazySync bool         // sync to disk every two minutes, not before each publish ack. For throw-away servers only.
	MaxStore int64        // bytes on disk; 0 for three quarters of what is free
	Log      *slog.Logger // for the server's warnings and errors; nil for none
	Cluster  *Cluster     // what it is a member of; nil when it is alone
	File     string       // path of a configuration file for all else: users and their permissions; none when empty
}

// Cluster says how a server finds the others of its cluster.
type Cluster struct {
	Server    string   // its own name among them
	Port      int      // for the others to connect to
	Advertise string   // host:port that the others are told to connect to; where it listens when empty
	Routes    []string // URLs of all, or of those that do not connect to it
	Tags      []string // of this server, by which streams are placed
}

// Server is a NATS server with JetStream in this process.
type Server struct {
	s   *server.Server
	cfg ServerConfig
}

// startTimeout bounds the start: a store of millions of messages is read in seconds.
const startTimeout = time.Minute

// StartServer runs a server and returns once JetStream answers, or, of a cluster's member, which may be the first, once clients can
// connect. It handles no signals; the caller calls Shutdown.
func StartServer(cfg ServerConfig) (*Server, error) {
	if cfg.Dir == "" {
		return nil, errors.New("start NATS: no directory for its store")
	}
	opts, err := cfg.options()
	if err != nil {
		return nil, fmt.Errorf("start NATS: %w", err)
	}
	s, err := server.NewServer(opts)
	if err != nil {
		return nil, fmt.Errorf("start NATS: %w", err)
	}
	fatal := make(chan string, 1)
	s.SetLoggerV2(serverLog{log: cfg.Log, fatal: fatal}, false, false, false)
	s.Start()
	if err := awaitReady(s, cfg.Cluster != nil, fatal); err != nil {
		s.Shutdown()
		s.WaitForShutdown()
		return nil, fmt.Errorf("start NATS on %s:%d with its store in %s: %w", opts.Host, opts.Port, cfg.Dir, err)
	}
	return &Server{s: s, cfg: cfg}, nil
}

// options are the server's.
func (cfg ServerConfig) options() (opts *server.Options, err error) {
	opts = &server.Options{}
	if cfg.File != "" {
		if opts, err = server.ProcessConfigFile(cfg.File); err != nil {
			return nil, err
		}
	}
	opts.ServerName = "tidings-" + rand.Text()
	opts.Host = cmp.Or(cfg.Host, "127.0.0.1")
	opts.Port = cmp.Or(cfg.Port, server.RANDOM_PORT)
	opts.JetStream = true
	opts.StoreDir = cfg.Dir
	opts.SyncAlways = !cfg.LazySync
	opts.JetStreamMaxMemory = 256 << 20 // streams in memory are none of ours; ordered consumers keep a little there
	opts.JetStreamMaxStore = cfg.MaxStore
	opts.NoSigs = true
	opts.NoLog = cfg.Log == nil
	if c := cfg.Cluster; c != nil {
		opts.ServerName = c.Server
		opts.Cluster = server.ClusterOpts{Name: "tidings", Host: opts.Host, Port: c.Port, Advertise: c.Advertise, NoAdvertise: true}
		opts.Tags.Add(c.Tags...)
		opts.Routes = server.RoutesFromStr(strings.Join(c.Routes, ","))
	}
	return opts, nil
}

// Reload reads ServerConfig.File again: who is no user any more, or has another password, is cut off.
func (s *Server) Reload() error {
	opts, err := s.cfg.options()
	if err != nil {
		return fmt.Errorf("reload NATS: %w", err)
	}
	opts.ServerName = s.s.Name()
	if err := s.s.ReloadOptions(opts); err != nil {
		return fmt.Errorf("reload NATS: %w", err)
	}
	return nil
}

// awaitReady waits for JetStream: a server that accepts connections may still be reading its store. A cluster's member may wait for others.
func awaitReady(s *server.Server, member bool, fatal <-chan string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if s.ReadyForConnections(time.Millisecond) && (member || s.Healthz(&server.HealthzOptions{}).Status == "ok") {
			return nil
		}
		select {
		case msg := <-fatal:
			return errors.New(msg)
		case <-ctx.Done():
			return fmt.Errorf("not healthy after %s: %s", startTimeout, s.Healthz(&server.HealthzOptions{}).Error)
		case <-tick.C:
		}
	}
}

// URL is where clients connect.
func (s *Server) URL() string { return s.s.ClientURL() }

// InProcess makes a connection go through memory instead of the network. The URL given to Connect is then not used.
func (s *Server) InProcess() nats.Option { return nats.InProcessServer(s.s) }

// Shutdown stops the server and returns when its store is closed. Doing it again does nothing.
func (s *Server) Shutdown() {
	s.s.Shutdown()
	s.s.WaitForShutdown()
}

// serverLog hands what the server finds worth a warning to slog, and the reason of a failed start to awaitReady.
type serverLog struct {
	log   *slog.Logger
	fatal chan<- string
}

func (l serverLog) Noticef(string, ...any) {}
func (l serverLog) Debugf(string, ...any)  {}
func (l serverLog) Tracef(string, ...any)  {}

func (l serverLog) Warnf(format string, args ...any) {
	if l.log != nil {
		l.log.Warn("NATS server", "detail", fmt.Sprintf(format, args...))
	}
}

func (l serverLog) Errorf(format string, args ...any) {
	if l.log != nil {
		l.log.Error("NATS server", "err", fmt.Sprintf(format, args...), "runbook", "NATSReportsAnError")
	}
}

func (l serverLog) Fatalf(format string, args ...any) {
	select {
	case l.fatal <- fmt.Sprintf(format, args...):
	default:
	}
}
