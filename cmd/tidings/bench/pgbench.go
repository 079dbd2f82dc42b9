package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/pglocal"
)

// pgbenchScript has the two statements of a follow as a script of pgbench, as a client with its own
// SQL would run them.
const pgbenchScript = `\set follower random(1, 1000000000000)
\set followee random(1, 1000)
BEGIN;
INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, :follower, :followee + 1000000000000)
  ON CONFLICT (tenant_id, follower_id, followee_id) DO UPDATE SET status = 'ACTIVE', version = follows.version + 1
  WHERE follows.status <> 'ACTIVE';
INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
  VALUES (1, 'follow', :followee + 1000000000000, 'created', '` + goPayload + `');
COMMIT;
`

// The same statements for the baseline that runs if there is no pgbench.
const (
	goFollowSQL = `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, $2)
  ON CONFLICT (tenant_id, follower_id, followee_id) DO UPDATE SET status = 'ACTIVE', version = follows.version + 1
  WHERE follows.status <> 'ACTIVE'`
	goOutboxSQL = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'follow', $1, 'created', $2::jsonb)`
	goPayload = `{"follower_id":"123456789012","followee_id":"1000000000500","status":"ACTIVE","version":1,` +
		`"created_at":"2026-01-01T00:00:00.000000Z","positioned_at":"2026-01-01T00:00:00.000000Z",` +
		`"updated_at":"2026-01-01T00:00:00.000000Z","actor":"bench"}`
)

var pgbenchCount = regexp.MustCompile(`number of transactions actually processed: (\d+)`)

// baseline runs the two statements with as many connections as the API has clients, as the owner of
// the tables and with prepared statements. It uses pgbench if that is beside the server's binaries
// or on the PATH, else pgx in this process.
func baseline(ctx context.Context, s *servers, clients int, d time.Duration) (name string, transactions int,
	took time.Duration, err error) {
	command := pgbench()
	if command == nil {
		n, took, err := goBaseline(ctx, s, clients, d)
		return "pgx", n, took, err
	}
	script, err := os.CreateTemp("", "tidings-bench-*.sql")
	if err != nil {
		return "", 0, 0, err
	}
	defer func() { err = errors.Join(err, os.Remove(script.Name())) }()
	_, err = script.WriteString(pgbenchScript)
	if err = errors.Join(err, script.Close()); err != nil {
		return "", 0, 0, err
	}
	cmd := command(ctx, "--no-vacuum", "--protocol=prepared", "--client="+strconv.Itoa(clients),
		"--jobs="+strconv.Itoa(min(2, clients)), "--time="+strconv.Itoa(max(1, int(d.Seconds()))), "--file="+script.Name(), s.url)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	start := time.Now()
	out, err := cmd.Output()
	took = time.Since(start)
	if err != nil {
		return "", 0, 0, fmt.Errorf("pgbench: %w: %s", err, &stderr)
	}
	m := pgbenchCount.FindSubmatch(out)
	if m == nil {
		return "", 0, 0, fmt.Errorf("pgbench printed no number of transactions: %q", out)
	}
	n, err := strconv.Atoi(string(m[1]))
	return "pgbench", n, took, err
}

// pgbench returns how to run pgbench, or nil if this machine has none that starts. A pgbench that
// `make postgres` fetched needs the libraries that came with it.
func pgbench() func(ctx context.Context, args ...string) *exec.Cmd {
	starts := func(run func(ctx context.Context, args ...string) *exec.Cmd) bool {
		return run(context.Background(), "--version").Run() == nil
	}
	if b, err := pglocal.Find(0); err == nil {
		beside := func(ctx context.Context, args ...string) *exec.Cmd { return b.Command(ctx, "pgbench", args...) }
		if starts(beside) {
			return beside
		}
	}
	onPath := func(ctx context.Context, args ...string) *exec.Cmd {
		return exec.CommandContext(ctx, "pgbench", args...)
	}
	if starts(onPath) {
		return onPath
	}
	return nil
}

func goBaseline(ctx context.Context, s *servers, clients int, d time.Duration) (n int, took time.Duration, err error) {
	conns := make([]*pgx.Conn, clients)
	for i := range conns {
		if conns[i], err = s.connect(ctx); err != nil {
			return 0, 0, err
		}
	}
	start := time.Now()
	n, err = workload{workers: clients, duration: d}.run(ctx, func(client, _ int, _ time.Time) error {
		followee := event.IDOf(1_000_000_000_000 + 1 + rand.Int64N(1000))
		return pgx.BeginFunc(ctx, conns[client], func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, goFollowSQL, event.IDOf(1+rand.Int64N(1_000_000_000_000)), followee); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, goOutboxSQL, followee, goPayload)
			return err
		})
	})
	return n, time.Since(start), err
}
