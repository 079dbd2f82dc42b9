package bench

import (
	"bytes"
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
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// apiPart is the API under test, wired as its binary is, without the ops port. The line that it prints first is where it listens.
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
	waker, pages := broker.NewWaker(nc), api.NewPages(a.cfg, a.reg)
	handler, err := api.New(a.cfg, api.Deps{
		Store: store.New(a.truth, waker.Wake), Tokens: a.tokens, DLQ: outbox.NewDLQ(a.truth, waker.Wake), Projections: a.projections, Fleet: fleet.Projections(kinds.Builtin), Pages: pages, Log: log, Reg: a.reg,
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

// reader asks the API under test, over loopback.
type reader struct {
	child  *child
	url    string
	token  string
	client *http.Client
}

// startReader starts the API with env on the servers, and returns who asks it, up to so many clients at once.
func startReader(ctx context.Context, s *servers, clients int, stderr io.Writer, env ...string) (*reader, error) {
	a, err := startAPI(ctx, s, 1, stderr, env...)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{MaxIdleConnsPerHost: clients}
	return &reader{child: a.child, url: "http://" + a.addr, token: a.tokens[0], client: &http.Client{Transport: transport, Timeout: time.Minute}}, nil
}

func (r *reader) close() {
	r.client.CloseIdleConnections()
	r.child.kill() // it has ended already if all went well
}

// stop ends the API and returns its peak memory in MiB.
func (r *reader) stop() (float64, error) {
	r.client.CloseIdleConnections()
	_, err := r.child.stop()
	return round(r.child.peak, 1), err
}

// ask sends one request, a POST when it has a body, and decodes the answer into v. took is until the last byte had arrived.
func (r *reader) ask(ctx context.Context, path string, body, v any) (took time.Duration, err error) {
	method, content := http.MethodGet, io.Reader(nil)
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return 0, err
		}
		method, content = http.MethodPost, bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, r.url+path, content)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+r.token)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	start := time.Now()
	resp, err := r.client.Do(req)
	if err != nil {
		return time.Since(start), err
	}
	answer, err := io.ReadAll(resp.Body)
	took = time.Since(start)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return took, err
	}
	if resp.StatusCode != http.StatusOK {
		return took, fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	if err := json.Unmarshal(answer, v); err != nil {
		return took, fmt.Errorf("%s %s: %w", method, path, err)
	}
	return took, nil
}
