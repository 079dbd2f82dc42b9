package daemon

import (
	"context"
	"errors"
	"fmt"
	stdlog "log"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"
)

// shutdownTimeout is how long requests in progress may take after ctx has ended. Then the server
// closes their connections. It is longer than any request of the API may take.
const shutdownTimeout = 30 * time.Second

// Limits of a request's arrival and of its answer, after which the server ends the connection.
// Within them a client has to keep the pace (paced).
const (
	readTimeout  = 30 * time.Second
	writeTimeout = time.Minute // enough for a profile or a large page and a slow reader
)

// Serve serves HTTP on l with h until ctx ends. Then it lets the requests in progress finish, and
// closes l. One address may have at most perAddress connections. Serve returns nil on a clean stop.
func Serve(ctx context.Context, l net.Listener, h http.Handler, perAddress int, log *slog.Logger) error {
	return serve(ctx, newConnections(l, maxConnections, perAddress, log), h, log)
}

func serve(ctx context.Context, l *connections, h http.Handler, log *slog.Logger) error {
	srv := &http.Server{
		Handler:           framed(enforcePace(h)),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ConnState:         l.follow,
		ConnContext:       withConn,
		BaseContext:       func(net.Listener) context.Context { return context.WithoutCancel(ctx) }, // has the tracer (tracing.From)
		ErrorLog:          stdlog.New(serverErrors{log}, "", 0),
		// The handler also answers OPTIONS *.
		DisableGeneralOptionsHandler: true,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve HTTP on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	err := srv.Shutdown(sctx)
	if errors.Is(err, context.DeadlineExceeded) {
		log.Warn("requests did not finish within the drain time: closing their connections",
			"addr", l.Addr().String(), "waited", shutdownTimeout)
		err = srv.Close()
	}
	if serr := <-served; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	if err != nil {
		return fmt.Errorf("stop HTTP on %s: %w", l.Addr(), err)
	}
	return nil
}

// serverErrors logs each line of the HTTP server as the attribute of one constant message.
type serverErrors struct{ log *slog.Logger }

func (s serverErrors) Write(line []byte) (int, error) {
	s.log.Warn("HTTP server", "detail", strings.TrimSpace(string(line)))
	return len(line), nil
}

// Listen opens a port for Serve, with TLS if certFile is not empty.
func Listen(addr, certFile, keyFile string, log *slog.Logger) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for HTTP: %w", err)
	}
	if certFile != "" {
		encrypted, err := Encrypt(l, certFile, keyFile, log)
		if err != nil {
			return nil, errors.Join(err, l.Close())
		}
		l = encrypted
	}
	log.Info("listening", "addr", l.Addr().String(), "tls", certFile != "")
	return l, nil
}
