package natsserver

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Config configures a server in this process.
type Config struct {
	Dir      string       // the directory of the JetStream store; one per server
	Host     string       // listen address; "" for 127.0.0.1
	Port     int          // listen port; 0 for any free one
	LazySync bool         // sync to disk every two minutes instead of before each publish ack. For throw-away servers only
	MaxStore int64        // bytes on disk; 0 for three quarters of the free space
	Log      *slog.Logger // for the server's warnings and errors; nil for none
	Cluster  *Cluster     // its cluster; nil for a single server
	File     string       // path of a configuration file for all else, for example users and permissions; "" for none
	// the only user, who may do everything; nil to accept anybody, or the users of File
	User *url.Userinfo
}

// Cluster tells a server how to find the other members of its cluster.
type Cluster struct {
	Server    string   // its own name in the cluster
	Port      int      // for connections of the other members
	Advertise string   // host:port for connections of the other members; "" for the listen address
	Routes    []string // URLs of all members, or of those that do not connect to it
	Tags      []string // of this server, for the placement of streams
}

// Server is a NATS server with JetStream in this process.
type Server struct {
	s   *server.Server
	cfg Config
}

// startTimeout bounds the start: a server reads a store of millions of messages in seconds.
const startTimeout = time.Minute

// Start starts a server and returns once JetStream answers. The first member of a cluster has no
// quorum yet, so for a member it returns once clients can connect. It handles no signals; the
// caller calls Shutdown.
func Start(cfg Config) (*Server, error) {
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

// options returns the options of the server.
func (cfg Config) options() (opts *server.Options, err error) {
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
	opts.JetStreamMaxMemory = 256 << 20 // no stream is in memory, but ordered consumers keep a little there
	opts.JetStreamMaxStore = cfg.MaxStore
	opts.NoSigs = true
	opts.NoLog = cfg.Log == nil
	if cfg.User != nil { // of the account that servers without users have, so a store remains in use when its server gets one
		opts.Username = cfg.User.Username()
		opts.Password, _ = cfg.User.Password()
	}
	if c := cfg.Cluster; c != nil {
		opts.ServerName = c.Server
		opts.Cluster = server.ClusterOpts{Name: "tidings", Host: opts.Host, Port: c.Port, Advertise: c.Advertise, NoAdvertise: true}
		opts.Tags.Add(c.Tags...)
		opts.Routes = server.RoutesFromStr(strings.Join(c.Routes, ","))
	}
	return opts, nil
}

// Reload reads Config.File again. It disconnects users that were removed or have a new
// password.
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

// awaitReady waits for JetStream: a server that accepts connections may still read its store. A
// member of a cluster may wait for others, so its JetStream need not answer.
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

// URL returns the address for clients, with the user and the password of Config.
func (s *Server) URL() string {
	scheme, address, _ := strings.Cut(s.s.ClientURL(), "://")
	return (&url.URL{Scheme: scheme, User: s.cfg.User, Host: address}).String()
}

// InProcess returns an option of broker.Connect that connects through memory instead of the
// network. Connect then ignores the URL.
func (s *Server) InProcess() nats.Option { return nats.InProcessServer(s.s) }

// Shutdown stops the server and returns when its store is closed. A second call does nothing.
func (s *Server) Shutdown() {
	s.s.Shutdown()
	s.s.WaitForShutdown()
}

// serverLog passes the server's warnings and errors to slog, and the reason of a failed start to
// awaitReady.
type serverLog struct {
	log   *slog.Logger
	fatal chan<- string
}

func (l serverLog) Noticef(string, ...any) {}
func (l serverLog) Debugf(string, ...any)  {}
func (l serverLog) Tracef(string, ...any)  {}

// Warnf logs a warning of the server. After a kill the server rebuilds the index of a stream's
// files from the stored messages, and loses none. That is no warning for an operator. Neither is a
// password that is no hash: dev keeps its own beside the URL that has it.
func (l serverLog) Warnf(format string, args ...any) {
	detail := fmt.Sprintf(format, args...)
	switch {
	case l.log == nil:
	case strings.HasPrefix(detail, "Plaintext passwords detected"), strings.HasPrefix(detail, "Filestore [") &&
		(strings.HasSuffix(detail, ", will rebuild") || strings.HasSuffix(detail, ": prior state file")):
		l.log.Info("NATS server", "detail", detail)
	default:
		l.log.Warn("NATS server", "detail", detail)
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
