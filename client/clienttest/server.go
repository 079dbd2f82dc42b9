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
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/cmd/tidings/cli"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
)

// variable names the server's directory in the environment of a process that is to be the server.
const variable = "TIDINGS_CLIENTTEST"

// prefix begins the names of such directories.
const prefix = "tidings-clienttest-"

// init turns a process that has the variable into the server, before its tests begin. So no package
// needs a TestMain.
func init() {
	dir := os.Getenv(variable)
	if dir == "" {
		return
	}
	if !strings.HasPrefix(filepath.Base(dir), prefix) { // serve's directory is removed at the end
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

// server is all of Tidings in this process, with a PostgreSQL.
type server struct {
	dir    string
	env    map[string]string
	pool   *pgxpool.Pool
	url    string
	nats   string
	token  string // of the tenant of tidings dev
	tenant int64  // the newest tenant; tidings dev has the first
	made   int    // databases of subscribers
}

// serve starts all servers, answers requests until in ends, and stops the servers.
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
		"DATABASE_URL": pg.URL("postgres"), "API_ADDR": "127.0.0.1:0", "OPS_ADDR": "127.0.0.1:0", "API_RATE_READ": "off",
		"API_RATE_WRITE": "off", "API_RATE_AUTHOR": "off", "LOG_LEVEL": "error", "HEARTBEAT_INTERVAL": "0",
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
			return nil // the tests have ended
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

// greeting reports when tidings dev has printed that it runs.
type greeting struct {
	said  chan struct{}
	known bool
}

func (g *greeting) Write(b []byte) (int, error) {
	if !g.known && bytes.HasPrefix(b, []byte("Tidings is running")) { // it names the database before
		g.known = true
		close(g.said)
	}
	return len(b), nil
}

// tidings runs a command in this process, and returns its exit code.
func (s *server) tidings(ctx context.Context, in io.Reader, out io.Writer, args ...string) int {
	return cli.Execute(ctx, args, cli.Process{Stdin: in, Stdout: out, Stderr: os.Stderr, Env: envconfig.MapLookuper(s.env)})
}

// open reads the addresses of the servers that tidings dev runs.
func (s *server) open(ctx context.Context) error {
	b, err := os.ReadFile(filepath.Join(s.dir, "dev", "dev.json"))
	if err != nil {
		return err
	}
	var in struct {
		API, Token string
		NATS       string `json:"nats_url"`
	}
	if err := json.Unmarshal(b, &in); err != nil {
		return err
	}
	s.url, s.nats, s.token = in.API, in.NATS, in.Token
	cfg := postgres.Config{MaxConns: 2, ConnectTimeout: 10 * time.Second, StatementTimeout: time.Minute}
	if s.pool, err = postgres.Open(ctx, s.env["DATABASE_URL"], cfg, postgres.RoleSystem, "clienttest"); err != nil {
		return err
	}
	if err := s.awaitStreams(ctx); err != nil {
		s.pool.Close()
		return err
	}
	return nil
}

// awaitStreams waits until the relay has created the streams, without which no subscriber starts.
func (s *server) awaitStreams(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	c, err := client.New(s.url, client.WithToken(s.token))
	if err != nil {
		return err
	}
	defer c.Close()
	for {
		export := c.Follows.Export()
		for _, err := range export.All(ctx) {
			if err != nil {
				return err
			}
		}
		if !slices.ContainsFunc(export.Head().Streams, func(p client.ExportPosition) bool { return p.Stream == "" }) {
			return nil
		}
		if err := sleep(ctx); err != nil {
			return fmt.Errorf("there are no streams of events: %w", err)
		}
	}
}

// sleep waits for the time between two checks.
func sleep(ctx context.Context) error {
	t := time.NewTimer(50 * time.Millisecond)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *server) do(ctx context.Context, r request) (response, error) {
	switch r.Do {
	case "tenant":
		s.tenant++
		return response{URL: s.url, NATS: s.nats, Tenant: s.tenant}, nil
	case "token":
		if len(r.Roles) == 0 {
			r.Roles = tokens.Roles()
		}
		name := fmt.Sprintf("clienttest-%d", time.Now().UnixNano())
		token, err := tokens.Create(ctx, s.pool, r.Tenant, name, r.Roles, time.Time{})
		return response{Token: token}, err
	case "kinds":
		return response{}, s.applyKinds(ctx, r.YAML)
	case "database":
		return s.database(ctx)
	}
	return response{}, nil // ready
}

// database creates an empty database.
func (s *server) database(ctx context.Context) (response, error) {
	at, err := url.Parse(s.env["DATABASE_URL"])
	if err != nil {
		return response{}, err
	}
	conn, err := pgx.Connect(ctx, at.String())
	if err != nil {
		return response{}, err
	}
	s.made++
	name := fmt.Sprintf("subscriber_%d", s.made)
	_, err = conn.Exec(ctx, "CREATE DATABASE "+name)
	at.Path = "/" + name
	return response{URL: at.String()}, errors.Join(err, conn.Close(ctx))
}

// applyKinds puts kinds in force and waits until the API serves them.
func (s *server) applyKinds(ctx context.Context, yaml string) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	var said bytes.Buffer
	p := cli.Process{Stdin: strings.NewReader(yaml), Stdout: io.Discard, Stderr: &said, Env: envconfig.MapLookuper(s.env)}
	if code := cli.Execute(ctx, []string{"kinds", "apply", "-", "--actor", "clienttest"}, p); code != 0 {
		return fmt.Errorf("tidings kinds apply: %s", strings.TrimSpace(said.String()))
	}
	catalog := catalog.New(s.pool, catalog.Truth, slog.New(slog.DiscardHandler))
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
		if err := sleep(ctx); err != nil {
			return fmt.Errorf("the API does not serve the new kinds: %w", err)
		}
	}
}

// nudge requests an unknown path, which makes the API read the kinds again.
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

// namesOf returns the names of all kinds, sorted.
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
