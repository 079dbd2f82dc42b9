//go:build faults

package cli

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

// newFleet returns a host with a process for each binary.
func newFleet(t *testing.T, env []string) *host {
	t.Helper()
	binaries := []string{"api", "relay", "followercounts", "threadcache", "archiver"}
	h := &host{api: testkit.FreeAddr(t)}
	for range binaries {
		h.ops = append(h.ops, testkit.FreeAddr(t))
	}
	h.start = func() (all []*testkit.Process) {
		for i, binary := range binaries {
			cmd := exec.Command(os.Args[0])
			cmd.Args = []string{binary}
			cmd.Env = append(env, childVariable+"=service", "API_ADDR="+h.api, "OPS_ADDR="+h.ops[i])
			all = append(all, testkit.Spawn(t, binary, cmd))
		}
		return all
	}
	h.processes = h.start()
	return h
}

// kill kills all processes of the host at once, and starts others.
func (h *host) kill(t *testing.T, _ *pgxpool.Pool) {
	t.Helper()
	var all sync.WaitGroup
	for _, p := range h.processes {
		all.Go(p.Kill)
	}
	all.Wait()
	h.processes = h.start()
	h.ready(t)
}

// replace stops all processes of the host, as a rolling restart does, and starts others.
func (h *host) replace(t *testing.T, _ *pgxpool.Pool) {
	t.Helper()
	for _, p := range h.processes {
		p.Signal(syscall.SIGTERM)
		if code := p.AwaitEnd(); code != exitOK {
			t.Errorf("exit code %d after SIGTERM", code)
		}
	}
	h.processes = h.start()
	h.ready(t)
}

// freeze freezes the host's process until others have all its leases, and thaws it.
func (h *host) freeze(t *testing.T, system *pgxpool.Pool) {
	t.Helper()
	p := h.processes[0]
	p.Signal(syscall.SIGSTOP)
	testkit.Eventually(t, "others to take the frozen process's leases", func() (bool, error) {
		var mine, others bool
		err := system.QueryRow(t.Context(), heldSQL, fmt.Sprint(p.PID())).Scan(&mine, &others)
		return !mine && others, err
	})
	p.Signal(syscall.SIGCONT)
	h.ready(t)
}

// TestTwoHostsSurviveKills kills two hosts in turn while callers write, freezes them past their
// leases, and restarts them. Every answered write is in the counts, no event is lost or published
// twice, and the events of an edge are in order.
func TestTwoHostsSurviveKills(t *testing.T) {
	serves := func(t *testing.T, env []string) *host { return newServe(t, env) }
	for name, c := range map[string]struct {
		start   func(t *testing.T, env []string) *host
		disturb func(h *host, t *testing.T, system *pgxpool.Pool)
	}{
		"fleets killed":    {newFleet, (*host).kill},
		"serves killed":    {serves, (*host).kill},
		"serves frozen":    {serves, (*host).freeze},
		"serves restarted": {serves, (*host).replace},
	} {
		t.Run(name, func(t *testing.T) {
			db, nats := testkit.Postgres(t), testkit.NATS(t)
			system := db.Pool(t, postgres.RoleSystem)
			token, err := tokens.Create(t.Context(), system, 1, "tester", tokens.Roles(), time.Time{})
			if err != nil {
				t.Fatal(err)
			}
			env := serversOf(db, nats)
			hosts := []*host{c.start(t, env), c.start(t, env)}
			for _, h := range hosts {
				h.ready(t)
			}

			const writers, users, faults = 4, 20, 4
			follows := make([]map[string]bool, writers) // by edge: whether it is there after the last write
			var stop atomic.Bool
			var writes, retries atomic.Int64
			var load sync.WaitGroup
			for w := range writers {
				follows[w] = map[string]bool{}
				load.Go(func() {
					rng := rand.New(rand.NewPCG(1, uint64(w)))
					for !stop.Load() && !t.Failed() {
						edge := fmt.Sprintf("/v1/follows/%d/%d", 1000+w, rng.IntN(users))
						method := map[bool]string{true: "DELETE", false: "PUT"}[follows[w][edge]]
						testkit.Eventually(t, method+" "+edge, func() (bool, error) {
							status, err := hosts[rng.IntN(len(hosts))].ask(t, method, edge, token, nil)
							if err == nil && status < 300 {
								return true, nil
							}
							retries.Add(1)
							return false, fmt.Errorf("%d, %w", status, err)
						})
						follows[w][edge] = method == "PUT"
						writes.Add(1)
					}
				})
			}
			for n := range faults {
				before := writes.Load()
				testkit.Eventually(t, "more writes", func() (bool, error) { return t.Failed() || writes.Load() > before+200, nil })
				c.disturb(hosts[n%len(hosts)], t, system)
			}
			stop.Store(true)
			load.Wait()
			t.Logf("%d writes, %d attempts without an answer", writes.Load(), retries.Load())

			vars := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": nats.URL, "NATS_STREAM": nats.Config().Stream,
				"NATS_SUBJECT_PREFIX": nats.Config().Prefix, "NATS_LIVE_PREFIX": nats.Config().LivePrefix}
			if code, stdout, stderr := run(t, vars, "", "verify", "--wait", arriveWithin.String()); code != exitOK {
				t.Errorf("verify: exit code %d\n%s%s", code, stdout, stderr)
			}
			for w := range writers {
				want := 0
				for _, there := range follows[w] {
					if there {
						want++
					}
				}
				for _, h := range hosts {
					var got struct{ Following json.Number }
					status, err := h.ask(t, http.MethodGet, fmt.Sprintf("/v1/users/%d/counts", 1000+w), token, &got)
					if err != nil || status != http.StatusOK || got.Following.String() != fmt.Sprint(want) {
						t.Errorf("writer %d follows %s, want %d: %d, %v", w, got.Following, want, status, err)
					}
				}
			}
			checkVersions(t, nats, db)
		})
	}
}

// checkVersions checks that the stream has each event of the outbox once, and the versions of each
// edge in order.
func checkVersions(t *testing.T, nats *testkit.Broker, db *testkit.DB) {
	t.Helper()
	js, err := jetstream.New(nats.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	versions, events := map[string]int64{}, 0
	if _, err := broker.Scan(t.Context(), js, nats.Config(), 0, broker.Scanning{}, func(m *broker.Stored) error {
		var f struct {
			FollowerID string      `json:"follower_id"`
			FolloweeID string      `json:"followee_id"`
			Version    json.Number `json:"version"`
		}
		if err := json.Unmarshal(m.Data, &f); err != nil || !event.Ours(m.Header) {
			return fmt.Errorf("message %d: %w", m.Seq, err)
		}
		events++
		edge := f.FollowerID + "/" + f.FolloweeID
		if versions[edge]++; f.Version.String() != fmt.Sprint(versions[edge]) {
			t.Errorf("version %s of %s at %d, want %d", f.Version, edge, m.Seq, versions[edge])
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	var rows int
	if err := db.Pool(t, postgres.RoleSystem).QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages`).Scan(&rows); err != nil ||
		rows != events || rows == 0 {
		t.Errorf("%d rows in the outbox and %d events on the stream, %v", rows, events, err)
	}
}
