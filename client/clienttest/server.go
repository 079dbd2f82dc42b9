package clienttest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/cmd/tidings/cli"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/tokens"
)

// variable names the directory of the server, in the environment of a process that is one.
const variable = "TIDINGS_CLIENTTEST"

// prefix is how the names of such directories begin.
const prefix = "tidings-clienttest-"

// init makes a process that is to be the server that, before its tests begin: so no package needs a TestMain.
func init() {
	dir := os.Getenv(variable)
	if dir == "" {
		return
	}
	if !strings.HasPrefix(filepath.Base(dir), prefix) { // which is removed in the end
		fmt.Fprintln(os.Stderr, variable+" is not a directory that clienttest made:", dir)
		os.Exit(1)
	}
	err := serve(dir, os.Stdin, os.Stdout)
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// server is all of Tidings in this process, and a PostgreSQL.
type server struct {
	dir    string
	env    map[string]string
	pool   *pgxpool.Pool
	url    string
	token  string // of dev's tenant
	tenant int64  // the last that was made; dev has the first
}

// serve starts everything, answers requests until in ends, and stops everything.
func serve(dir string, in io.Reader, out io.Writer) (err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s := &server{dir: dir, tenant: 1}
	requests := bufio.NewReader(in)
	answers := json.NewEncoder(out)
	starting, stop := context.WithTimeout(ctx, startWithin)
	defer stop()
	pg, err := pglocal.Start(starting, pglocal.Config{Dir: filepath.Join(dir, "postgres"), Unsafe: true, Settings: map[string]string{
		"wal_level": "minimal", "max_wal_senders": "0", "shared_buffers": "64MB", "max_connections": "200", "synchronous_commit": "off",
	}})
	if err != nil {
		return answers.Encode(response{Error: err.Error()})
	}
	defer func() { err = errors.Join(err, pg.Abort()) }()
	s.env = map[string]string{
		"DATABASE_URL": pg.URL("postgres"), "API_ADDR": "127.0.0.1:0", "OPS_ADDR": "127.0.0.1:0", "API_RATE_READ": "off", "API_RATE_WRITE": "off", "API_RATE_AUTHOR": "off", "LOG_LEVEL": "error",
		"HEARTBEAT_INTERVAL": "0",
	}
	ended := make(chan error, 1)
	greeted := &greeting{said: make(chan struct{})}
	go func() {
		if code := s.tidings(ctx, nil, greeted, "dev", "--data", filepath.Join(dir, "dev")); code != 0 && ctx.Err() == nil {
			ended <- fmt.Errorf("tidings dev ended with exit code %d", code)
		}
		close(ended)
	}()
	defer func() { cancel(); <-ended }()
	select {
	case <-greeted.said:
	case err := <-ended:
		return answers.Encode(response{Error: err.Error()})
	case <-starting.Done():
		return answers.Encode(response{Error: "tidings dev does not start"})
	}
	if err := s.open(ctx); err != nil {
		return answers.Encode(response{Error: err.Error()})
	}
	defer s.pool.Close()
	for {
		line, err := requests.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil // the tests are over
		}
		var r request
		if err == nil {
			err = json.Unmarshal(line, &r)
		}
		if err != nil {
			return err
		}
		answer, err := s.do(ctx, r)
		if err != nil {
			answer.Error = err.Error()
		}
		if err := answers.Encode(answer); err != nil {
			return err
		}
	}
}

// greeting tells that dev has said that it runs.
type greeting struct {
	said  chan struct{}
	known bool
}

func (g *greeting) Write(b []byte) (int, error) {
	if !g.known {
		g.known = true
		close(g.said)
	}
	return len(b), nil
}

// tidings runs a command in this process, and returns its exit code.
func (s *server) tidings(ctx context.Context, in io.Reader, out io.Writer, args ...string) int {
	return cli.Execute(ctx, args, cli.Process{Stdin: in, Stdout: out, Stderr: os.Stderr, Env: envconfig.MapLookuper(s.env)})
}

// open reads how to reach what dev runs.
func (s *server) open(ctx context.Context) error {
	b, err := os.ReadFile(filepath.Join(s.dir, "dev", "dev.json"))
	if err != nil {
		return err
	}
	var in struct{ API, Token string }
	if err := json.Unmarshal(b, &in); err != nil {
		return err
	}
	s.url, s.token = in.API, in.Token
	cfg := postgres.Config{MaxConns: 2, ConnectTimeout: 10 * time.Second, StatementTimeout: time.Minute}
	s.pool, err = postgres.Open(ctx, s.env["DATABASE_URL"], cfg, postgres.RoleSystem, "clienttest")
	return err
}

func (s *server) do(ctx context.Context, r request) (response, error) {
	switch r.Do {
	case "tenant":
		s.tenant++
		return response{URL: s.url, Tenant: s.tenant}, nil
	case "token":
		if len(r.Roles) == 0 {
			r.Roles = tokens.Roles()
		}
		name := fmt.Sprintf("clienttest-%d", time.Now().UnixNano())
		token, err := tokens.Create(ctx, s.pool, r.Tenant, name, r.Roles, time.Time{})
		return response{Token: token}, err
	case "kinds":
		return response{}, s.applyKinds(ctx, r.YAML)
	}
	return response{}, nil // ready
}

// applyKinds puts kinds in force and waits until the API has taken them up.
func (s *server) applyKinds(ctx context.Context, yaml string) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	var said bytes.Buffer
	p := cli.Process{Stdin: strings.NewReader(yaml), Stdout: io.Discard, Stderr: &said, Env: envconfig.MapLookuper(s.env)}
	if code := cli.Execute(ctx, []string{"kinds", "apply", "-", "--actor", "clienttest"}, p); code != 0 {
		return fmt.Errorf("tidings kinds apply: %s", strings.TrimSpace(said.String()))
	}
	catalog := kinds.NewCatalog(s.pool, kinds.Truth, slog.New(slog.DiscardHandler))
	if err := catalog.Load(ctx); err != nil {
		return err
	}
	want := namesOf(catalog.Now())
	c, err := client.New(s.url, client.WithToken(s.token))
	if err != nil {
		return err
	}
	defer c.Close()
	for {
		list, err := c.Kinds(ctx)
		if err != nil {
			return err
		}
		var have []string
		for _, k := range list.Edges {
			have = append(have, k.Name)
		}
		for _, k := range list.Children {
			have = append(have, k.Name)
		}
		if slices.Sort(have); slices.Equal(have, want) {
			return nil
		}
		if err := s.nudge(ctx); err != nil {
			return err
		}
		t := time.NewTimer(50 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			return fmt.Errorf("the API does not take the kinds up: %w", ctx.Err())
		}
	}
}

// nudge asks for an unknown path, which makes the API read the kinds again.
func (s *server) nudge(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"/v1/none", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// namesOf are the names of all kinds, sorted.
func namesOf(s *kinds.Set) (all []string) {
	for _, k := range s.AllEdges() {
		all = append(all, k.Name)
	}
	for _, k := range s.AllChildren() {
		all = append(all, k.Name)
	}
	slices.Sort(all)
	return all
}
