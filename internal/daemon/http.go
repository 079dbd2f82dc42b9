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

// shutdownTimeout is how long requests in flight may take after ctx has ended; then their connections are closed.
const shutdownTimeout = 30 * time.Second // above what one request of the API may take

// Serve answers HTTP on l with h until ctx ends, then lets the requests in flight finish, and closes l. One address has at most perAddress
// connections. It returns nil on a clean stop.
func Serve(ctx context.Context, l net.Listener, h http.Handler, perAddress int, log *slog.Logger) error {
	return serve(ctx, newConnections(l, maxConnections, perAddress, log), h, log)
}

func serve(ctx context.Context, l *connections, h http.Handler, log *slog.Logger) error {
	srv := &http.Server{
		Handler:           framed(h),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		WriteTimeout:      60 * time.Second, // a profile or a large page, to a slow reader
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ConnState:         l.follow,
		ConnContext:       withConn,
		BaseContext:       func(net.Listener) context.Context { return context.WithoutCancel(ctx) }, // what spans go by (tracing.From)
		ErrorLog:          stdlog.New(serverErrors{log}, "", 0),
		// OPTIONS * is the handler's too.
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
		log.Warn("requests still ran after the drain time, closing their connections", "addr", l.Addr().String(), "waited", shutdownTimeout)
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

// serverErrors has the HTTP server's own lines as attributes of one message.
type serverErrors struct{ log *slog.Logger }

func (s serverErrors) Write(line []byte) (int, error) {
	s.log.Warn("HTTP server", "detail", strings.TrimSpace(string(line)))
	return len(line), nil
}

// Listen opens a port for Serve, encrypted when certFile is not empty.
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
