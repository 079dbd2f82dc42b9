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
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// runAPI serves the API until ctx ends. It is wired like its binary, but without the ops port. It
// prints its address as the first line.
func (cfg childConfig) runAPI(ctx context.Context, projections *pgxpool.Pool, reg *prometheus.Registry, out io.Writer) error {
	log := slog.Default()
	truth, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleAPI, partAPI)
	if err != nil {
		return err
	}
	defer truth.Close()
	cfg.Postgres.MaxConns = api.TokenConns
	tokenPool, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleAPI, partAPI)
	if err != nil {
		return err
	}
	defer tokenPool.Close()
	nc, err := broker.Connect(cfg.Broker, partAPI, log)
	if err != nil {
		return err
	}
	defer nc.Close()
	waker, pages := broker.NewWaker(nc, cfg.Broker), api.NewPages(cfg.API, reg)
	handler, err := api.New(cfg.API, api.Deps{
		Store: store.New(truth, waker.Wake), Tokens: tokenPool, DLQ: outbox.NewDLQ(truth, waker.Wake), Projections: projections,
		Fleet: fleet.Projections(kinds.Builtin), Pages: pages, Log: log, Reg: reg,
	})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", cfg.API.Addr)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, l.Addr()); err != nil {
		return errors.Join(err, l.Close())
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return waker.Run(ctx) })
	g.Go(func() error { return handler.Run(ctx) })
	g.Go(func() error { return broker.Listen(ctx, nc, cfg.Broker, pages, log) })
	g.Go(func() error { return daemon.Serve(ctx, l, handler, cfg.API.AddressConnections, log) })
	return g.Wait()
}

// apiUnderTest is the API as a child process, with a token for each tenant, from tenant 1 on.
type apiUnderTest struct {
	*child
	addr   string
	tokens []string
}

// startAPI starts the API with env on the servers, and the stream that it listens to.
func (s *servers) startAPI(ctx context.Context, tenants int, env ...string) (*apiUnderTest, error) {
	return s.startServer(ctx, partAPI, tenants, env...)
}

// startServer starts the API, or the part that stands in for it.
func (s *servers) startServer(ctx context.Context, part string, tenants int, env ...string) (*apiUnderTest, error) {
	if err := s.declare(ctx, 1); err != nil {
		return nil, err
	}
	a := &apiUnderTest{}
	for t := range tenants {
		token := tokens.New()
		if err := tokens.Ensure(ctx, s.pool, int64(t+tenant), "bench", token, []string{tokens.RoleRead, tokens.RoleWrite}); err != nil {
			return nil, err
		}
		a.tokens = append(a.tokens, token)
	}
	env = append([]string{"API_ADDR=127.0.0.1:0", "API_CURSOR_KEY=" + strings.Repeat("ab", 32),
		"API_RATE_READ=off", "API_RATE_WRITE=off", "API_RATE_AUTHOR=off"}, env...)
	var err error
	if a.child, err = s.startChild(part, env...); err != nil {
		return nil, err
	}
	addr, err := a.out.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("read the address of %s: %w", part, err)
	}
	a.addr = strings.TrimSpace(addr)
	return a, nil
}

// reader sends requests to the API under test, over loopback.
type reader struct {
	*apiUnderTest
	client *client.Client
}

// startReader starts the API with env on the servers, and returns a reader for up to the given
// number of parallel clients.
func (s *servers) startReader(ctx context.Context, clients int, env ...string) (*reader, error) {
	a, err := s.startAPI(ctx, 1, env...)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{MaxIdleConnsPerHost: clients}
	c, err := client.New("http://"+a.addr, client.WithToken(a.tokens[0]), client.WithHTTPClient(&http.Client{Transport: transport}),
		client.WithAttemptTimeout(time.Minute), client.WithRetry(client.Retry{})) // without retries, because the result counts refusals
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error { c.Close(); return nil })
	return &reader{a, c}, nil
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
