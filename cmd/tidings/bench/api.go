package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// apiPart is the API under test, wired like its binary, but without the ops port. It prints its
// address as the first line.
type apiPart struct {
	cfg                        api.Config
	broker                     broker.Config
	truth, tokens, projections *pgxpool.Pool
	reg                        *prometheus.Registry
	out                        io.Writer
}

// Run serves until ctx ends.
func (a apiPart) Run(ctx context.Context) error {
	log := slog.Default()
	nc, err := broker.Connect(a.broker, partAPI, log)
	if err != nil {
		return err
	}
	defer nc.Close()
	waker, pages := broker.NewWaker(nc, a.broker), api.NewPages(a.cfg, a.reg)
	handler, err := api.New(a.cfg, api.Deps{
		Store: store.New(a.truth, waker.Wake), Tokens: a.tokens, DLQ: outbox.NewDLQ(a.truth, waker.Wake), Projections: a.projections,
		Fleet: fleet.Projections(kinds.Builtin), Pages: pages, Log: log, Reg: a.reg,
	})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", a.cfg.Addr)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(a.out, l.Addr()); err != nil {
		return errors.Join(err, l.Close())
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return waker.Run(ctx) })
	g.Go(func() error { return handler.Run(ctx) })
	g.Go(func() error { return broker.Listen(ctx, nc, a.broker, event.AggregateFollow, pages, log) })
	g.Go(func() error { return daemon.Serve(ctx, l, handler, a.cfg.AddressConnections, log) })
	return g.Wait()
}

// reader sends requests to the API under test, over loopback.
type reader struct {
	child  *child
	client *client.Client
}

// startReader starts the API with env on the servers, and returns a reader for up to the given
// number of parallel clients.
func startReader(ctx context.Context, s *servers, clients int, stderr io.Writer, env ...string) (*reader, error) {
	a, err := startAPI(ctx, s, 1, stderr, env...)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{MaxIdleConnsPerHost: clients}
	c, err := client.New("http://"+a.addr, client.WithToken(a.tokens[0]), client.WithHTTPClient(&http.Client{Transport: transport}),
		client.WithAttemptTimeout(time.Minute), client.WithRetry(client.Retry{})) // without retries, because the result counts refusals
	if err != nil {
		a.child.kill()
		return nil, err
	}
	return &reader{child: a.child, client: c}, nil
}

func (r *reader) close() {
	r.client.Close()
	r.child.kill() // in a successful run it has ended already
}

// stop ends the API and returns its peak memory in MiB.
func (r *reader) stop() (float64, error) {
	r.client.Close()
	_, err := r.child.stop()
	return round(r.child.peak, 1), err
}

// ask sends one request, a POST if it has a body, and decodes the answer into v. took is the time
// until the last byte arrived.
func (r *reader) ask(ctx context.Context, path string, body, v any) (took time.Duration, err error) {
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
	}
	var answer []byte
	start := time.Now()
	err = r.client.Call(ctx, method, path, body, &answer)
	took = time.Since(start)
	if err != nil {
		return took, err
	}
	if err := json.Unmarshal(answer, v); err != nil {
		return took, fmt.Errorf("%s %s: %w", method, path, err)
	}
	return took, nil
}
