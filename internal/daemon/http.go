package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// shutdownTimeout is how long requests in flight may take after ctx has ended; then their connections are closed.
const shutdownTimeout = 30 * time.Second // above what one request of the API may take

// maxConnections bounds the connections of a port, and so their memory: some 50 KiB each. Those beyond it wait in the kernel.
const maxConnections = 4096

// Serve answers HTTP on l with h until ctx ends, then lets the requests in flight finish, and closes l. It returns nil on a
// clean stop.
func Serve(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger) error {
	return serve(ctx, l, h, log, maxConnections)
}

func serve(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger, connections int) error {
	limited := &limitedListener{Listener: l, slots: make(chan struct{}, connections), closed: make(chan struct{})}
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		WriteTimeout:      60 * time.Second, // a profile or a large page, to a slow reader
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ConnState:         limited.follow,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		// OPTIONS * is the handler's too.
		DisableGeneralOptionsHandler: true,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(limited) }()
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
