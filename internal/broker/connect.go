package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/socket"
)

// dialer opens quiet connections.
type dialer struct{ net.Dialer }

func (d dialer) Dial(network, address string) (net.Conn, error) {
	conn, err := d.Dialer.Dial(network, address)
	if err != nil {
		return nil, err
	}
	return socket.Quiet(conn), nil
}

// Connect returns a connection named name that retries forever in the background, even if no server
// is available at the start. It buffers nothing while it is down: a publish then fails at once, and
// the caller knows that it was not sent. It logs changes of its state, and errors that reach no
// caller. An example is a missing permission, which otherwise looks like a timeout.
//
// A server may refuse credentials only for a while, so Connect retries them too. It reads a
// credentials file again for each attempt. Some errors of the protocol still close the connection:
// see Watch. opts override the defaults. The caller closes the connection.
func Connect(cfg Config, name string, log *slog.Logger, opts ...nats.Option) (*nats.Conn, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	log = log.With("component", "broker")
	all := []nats.Option{
		nats.Name("tidings " + name),
		nats.Timeout(cfg.Timeout),
		nats.SetCustomDialer(dialer{net.Dialer{Timeout: cfg.Timeout}}),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort(), // otherwise two refusals by one server close the connection
		nats.ReconnectWait(200 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 500*time.Millisecond),
		nats.ReconnectBufSize(-1),
		nats.PingInterval(cfg.Ping), // detects a frozen server or a dead link after two pings
		nats.MaxPingsOutstanding(2),
		nats.ConnectHandler(func(nc *nats.Conn) { log.Info("connected to NATS", Where(nc)...) }),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("reconnected to NATS", Where(nc)...) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("lost NATS; reconnecting", "err", err)
			}
		}),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			log.Warn("no connection to NATS; retrying", "err", err)
		}),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			log.Error("NATS reports an error", "subject", subject, "err", err, "runbook", "NATSReportsAnError")
		}),
	}
	if cfg.InboxPrefix != "" {
		all = append(all, nats.CustomInboxPrefix(cfg.InboxPrefix))
	}
	if cfg.Credentials != "" {
		all = append(all, nats.UserCredentials(cfg.Credentials))
	}
	if cfg.TLSCA != "" {
		all = append(all, nats.RootCAs(cfg.TLSCA))
	}
	if cfg.TLSCert != "" {
		all = append(all, nats.ClientCert(cfg.TLSCert, cfg.TLSKey))
	}
	nc, err := nats.Connect(cfg.servers(), append(all, opts...)...)
	var malformed *url.Error
	if errors.As(err, &malformed) { // err contains the URL, and a malformed URL does not show which part is the password
		return nil, errors.New("connect to NATS: NATS_URL is not a list of URLs; a character of its password may need an escape")
	}
	if err != nil {
		return nil, fmt.Errorf("connect to NATS (%s): %w", cfg.hosts(), err)
	}
	return nc, nil
}

// Open is Connect with JetStream over the connection.
func Open(cfg Config, name string, log *slog.Logger, opts ...nats.Option) (*nats.Conn, jetstream.JetStream, error) {
	nc, err := Connect(cfg, name, log, opts...)
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, nil, fmt.Errorf("use JetStream: %w", err)
	}
	return nc, js, nil
}

// hosts names the servers, without users and passwords.
func (c Config) hosts() string {
	var all []string
	for one := range strings.SplitSeq(c.servers(), ",") {
		if u, err := url.Parse(one); err == nil && u.Host != "" {
			all = append(all, u.Host)
		}
	}
	return strings.Join(all, ", ")
}

// ErrClosed reports that the client has closed the connection forever. Only a new connection helps:
// end the process.
var ErrClosed = errors.New("broker: the connection to NATS is closed")

// Watch waits until the client closes the connection forever, and returns ErrClosed with the
// reason. It returns nil if ctx ends first.
func Watch(ctx context.Context, nc *nats.Conn) error {
	closed := nc.StatusChanged(nats.CLOSED)
	defer nc.RemoveStatusListener(closed)
	if !nc.IsClosed() { // a closed connection sends no status
		select {
		case <-ctx.Done():
			return nil
		case <-closed:
		}
	}
	if err := nc.LastError(); err != nil {
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return ErrClosed
}

// Where returns log attributes that name the connected server, or none if the connection is lost.
func Where(nc *nats.Conn) []any {
	if url := nc.ConnectedUrlRedacted(); url != "" {
		return []any{"url", url}
	}
	return nil
}
