package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"time"

	"github.com/nats-io/nats.go"
)

// Connect returns a connection that calls itself name and is never given up: it retries in the background, from the start if no
// server is there yet. Nothing is buffered while it is down, so a publish then fails at once and the caller knows that it was
// not sent. Changes of its state, and errors that reach no caller (such as missing permissions, which otherwise look like
// timeouts), are logged. Credentials that the server refuses may be right again later, so they are tried again too; a credentials file
// is read anew each time. Some errors of the protocol close the connection even so: see Watch. opts come last and win. The caller closes it.
func Connect(cfg Config, name string, log *slog.Logger, opts ...nats.Option) (*nats.Conn, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	log = log.With("component", "broker")
	all := []nats.Option{
		nats.Name("tidings " + name),
		nats.Timeout(cfg.Timeout),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort(), // else two refusals by one server close it for good
		nats.ReconnectWait(200 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 500*time.Millisecond),
		nats.ReconnectBufSize(-1),
		nats.PingInterval(cfg.Ping), // a frozen server or a dead link is noticed after two of them
		nats.MaxPingsOutstanding(2),
		nats.ConnectHandler(func(nc *nats.Conn) { log.Info("connected to NATS", Where(nc)...) }),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("reconnected to NATS", Where(nc)...) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("lost NATS, reconnecting", "err", err)
			}
		}),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			log.Warn("no connection to NATS, trying again", "err", err)
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
	if errors.As(err, &malformed) { // its text has the URL, in which nobody can say which part is the password
		return nil, errors.New("connect to NATS: NATS_URL is no list of URLs; a character of its password may need an escape")
	}
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	return nc, nil
}

// ErrClosed reports a connection that its client has given up for good. Only a new one helps: end the process.
var ErrClosed = errors.New("broker: the connection to NATS is closed for good")

// Watch returns ErrClosed, with the reason, when the connection is closed for good, and nil when ctx ends before.
func Watch(ctx context.Context, nc *nats.Conn) error {
	closed := nc.StatusChanged(nats.CLOSED)
	defer nc.RemoveStatusListener(closed)
	if !nc.IsClosed() { // else nobody says so any more
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

// Where are attributes of a log line: the server that the connection is to. There are none when it is lost meanwhile.
func Where(nc *nats.Conn) []any {
	if url := nc.ConnectedUrlRedacted(); url != "" {
		return []any{"url", url}
	}
	return nil
}
