//go:build brokers

package cli

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// rehearsal is a fleet on three brokers, with continuous writes through its API.
type rehearsal struct {
	*dev
	t     *testing.T
	c     *testkit.BrokerCluster
	pool  *pgxpool.Pool
	env   map[string]string // of commands that look at lost brokers: its NATS_TIMEOUT is short
	quiet sync.RWMutex      // stops the writer before its next write

	written atomic.Int64
}

func newRehearsal(t *testing.T) *rehearsal {
	t.Helper()
	c, db := testkit.NATSCluster(t, 3), testkit.Postgres(t)
	cfg := c.Config()
	r := &rehearsal{t: t, c: c, pool: db.Pool(t, postgres.RoleSystem),
		env: map[string]string{"DATABASE_URL": db.URL, "NATS_URL": cfg.URL, "NATS_REPLICAS": "3", "NATS_TIMEOUT": "1s"}}
	r.dev = newDev(t, "DATABASE_URL="+db.URL, "NATS_URL="+cfg.URL, "NATS_REPLICAS=3")
	r.start(t)
	c.AwaitReplicas(t, cfg.StreamName(0))
	var writer sync.WaitGroup
	stop := make(chan struct{})
	in := r.instance(t)
	writer.Go(func() { r.write(in, stop) })
	t.Cleanup(func() { close(stop); writer.Wait() })
	return r
}

// write lets forty pairs follow and unfollow, one write after the other.
func (r *rehearsal) write(in instance, stop <-chan struct{}) {
	for n := 0; ; n++ {
		select {
		case <-stop:
			return
		case <-time.After(5 * time.Millisecond):
		}
		r.quiet.RLock()
		method := []string{http.MethodPut, http.MethodDelete}[n/40%2]
		req, err := http.NewRequest(method, fmt.Sprintf("%s/v1/follows/%d/%d", in.API, 1+n%8, 101+n%5), nil)
		if err == nil {
			req.Header.Set("Authorization", "Bearer "+in.Token)
			var resp *http.Response
			if resp, err = http.DefaultClient.Do(req); err == nil {
				_ = resp.Body.Close()
				if resp.StatusCode >= 300 {
					err = fmt.Errorf("%s", resp.Status)
				}
			}
		}
		r.quiet.RUnlock()
		if err != nil {
			r.t.Errorf("a write got no answer: %v", err)
			return
		}
		r.written.Add(1)
	}
}

// patient returns the environment of commands that must succeed: a broker that has just started may
// need seconds for an answer.
func (r *rehearsal) patient() map[string]string {
	env := maps.Clone(r.env)
	env["NATS_TIMEOUT"] = "5s"
	return env
}

// lossWithin is the longest time until a loss or a return shows. It only ends a broken rehearsal:
// an election takes seconds, and longer on a busy machine.
const lossWithin = 3 * time.Minute

func (r *rehearsal) await(what string, within time.Duration, cond func() bool) {
	r.t.Helper()
	testkit.Eventually(r.t, what, func() (bool, error) { return cond(), nil })
}

func (r *rehearsal) count(sql string, args ...any) (n int64) {
	r.t.Helper()
	if err := r.pool.QueryRow(r.t.Context(), sql, args...).Scan(&n); err != nil {
		r.t.Fatal(err)
	}
	return n
}

// writes waits until n more writes have an answer.
func (r *rehearsal) writes(n int64) {
	r.t.Helper()
	upTo := r.written.Load() + n
	r.await("writes to be answered", lossWithin, func() bool { return r.written.Load() >= upTo })
}

// published waits until the relay has published all rows that are committed now, and returns the
// time that this took.
func (r *rehearsal) published() time.Duration {
	r.t.Helper()
	began, upTo := time.Now(), r.count(`SELECT coalesce(max(id), 0) FROM outbox_messages`)
	r.await("every row to be published", lossWithin, func() bool {
		return r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND id <= $1`, upTo) == 0
	})
	return time.Since(began).Round(10 * time.Millisecond)
}

// says waits until a command prints all of these texts.
func (r *rehearsal) says(command []string, want ...string) {
	r.t.Helper()
	var out string
	defer func() {
		if r.t.Failed() {
			r.t.Logf("%v says:\n%s", command, out)
		}
	}()
	r.await(fmt.Sprintf("%v to say %q", command, want), lossWithin, func() bool {
		_, stdout, stderr := run(r.t, r.env, "", command...)
		out = stdout + stderr
		return !slices.ContainsFunc(want, func(s string) bool { return !strings.Contains(out, s) })
	})
}

// metrics waits until dev's metrics contain all of these lines.
func (r *rehearsal) metrics(want ...string) {
	r.t.Helper()
	var out string
	defer func() {
		if r.t.Failed() {
			r.t.Logf("the metrics:\n%s", out)
		}
	}()
	r.await(fmt.Sprintf("the metrics %q", want), lossWithin, func() bool {
		resp, err := http.Get(r.instance(r.t).Ops + "/metrics")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		all, err := io.ReadAll(resp.Body)
		out = string(all)
		return err == nil && !slices.ContainsFunc(want, func(s string) bool { return !strings.Contains(out, s+"\n") })
	})
}

// lose kills brokers, calls meanwhile, and restarts them.
func (r *rehearsal) lose(what string, gone []*testkit.Broker, meanwhile func()) {
	r.t.Helper()
	began := time.Now()
	for _, b := range gone {
		b.Kill(r.t)
	}
	meanwhile()
	lost := time.Since(began).Round(time.Second)
	back := time.Now()
	for _, b := range gone {
		b.Restart(r.t)
	}
	r.published()
	resumed := time.Since(back)
	r.c.AwaitReplicas(r.t, r.c.Config().StreamName(0))
	r.t.Logf("%s for %s: everything was published %s after the restart began, and all replicas were current after %s",
		what, lost, resumed.Round(100*time.Millisecond), time.Since(back).Round(100*time.Millisecond))
	r.check(what)
}

// check compares the projections with the truth, and the streams with the outbox, while the writer
// pauses.
func (r *rehearsal) check(what string) {
	r.t.Helper()
	r.quiet.Lock()
	defer r.quiet.Unlock()
	if code, stdout, stderr := run(r.t, r.patient(), "", "verify", "--wait", lossWithin.String(), "--limit", "3"); code != exitOK {
		r.t.Errorf("%s: verify: exit code %d\n%s%s", what, code, stdout, stderr)
	}
	rows, _ := r.pool.Query(r.t.Context(), `SELECT event_id::text, aggregate_type || '/' || aggregate_id
		FROM (TABLE outbox_messages UNION ALL TABLE outbox_messages_archive) m ORDER BY id`)
	committed, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e [2]string, err error) { return e, row.Scan(&e[0], &e[1]) })
	if err != nil {
		r.t.Fatal(err)
	}
	of, want, got := map[string]string{}, map[string][]string{}, map[string][]string{}
	for _, e := range committed {
		of[e[0]] = e[1]
		want[e[1]] = append(want[e[1]], e[0])
	}
	js, err := jetstream.New(r.c.Connect(r.t))
	if err != nil {
		r.t.Fatal(err)
	}
	var streams []broker.Stream
	testkit.Eventually(r.t, "the streams to be listed", func() (bool, error) { // a broker may just have restarted
		var err error
		streams, err = broker.Streams(r.t.Context(), js, r.c.Config())
		return err == nil, err
	})
	for _, s := range streams {
		if _, err := broker.Scan(r.t.Context(), js, r.c.Config(), s.Number, broker.Scanning{}, func(m *broker.Stored) error {
			if id := m.Header.Get(event.HeaderID); m.Header.Get(event.HeaderClosed) == "" {
				got[of[id]] = append(got[of[id]], id)
			}
			return nil
		}); err != nil {
			r.t.Fatal(err)
		}
	}
	for aggregate := range got {
		if want[aggregate] == nil {
			r.t.Errorf("%s: %d events on the streams have no row", what, len(got[aggregate]))
		}
	}
	for aggregate := range want {
		if !slices.Equal(got[aggregate], want[aggregate]) {
			r.t.Errorf("%s: %s has %d events on the streams and %d committed ones, or their order differs", what, aggregate,
				len(got[aggregate]), len(want[aggregate]))
		}
	}
	r.t.Logf("%s: %d events, each on a stream once and in the order of its entity", what, len(committed))
}

// TestLosingOneTwoAndThreeBrokers rehearses docs/runbook/LosingBrokers.md.
func TestLosingOneTwoAndThreeBrokers(t *testing.T) {
	r := newRehearsal(t)
	stream := r.c.Config().StreamName(0)
	_, others := r.c.Leader(t, stream)
	r.lose("one broker lost that leads nothing", others[:1], func() {
		r.writes(50)
		t.Logf("rows were published within %s", r.published())
		r.says([]string{"doctor", "--json"}, `"replica-behind"`)
		r.says([]string{"status"}, "2 of 3")
	})
	leader, _ := r.c.Leader(t, stream)
	r.lose("the leader lost", []*testkit.Broker{leader}, func() {
		r.writes(50)
		t.Logf("rows were published within %s", r.published())
	})
	leader, others = r.c.Leader(t, stream)
	r.lose("two brokers lost", []*testkit.Broker{leader, others[0]}, func() {
		r.says([]string{"status"}, "NO LEADER", "Partition 0 waits for a leader")
		r.says([]string{"doctor", "--json"}, `"no-leader"`)
		r.metrics(`tidings_relay_partitions_waiting{part="relay"} 1`,
			`tidings_consumer_partitions_waiting{consumer="followercounts",part="followercounts"} 1`)
		const marked = `SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`
		before := r.count(marked)
		r.writes(50)
		if after := r.count(marked); after != before {
			t.Errorf("%d rows were marked as published without a majority", after-before)
		}
		if code, stdout, stderr := run(t, r.patient(), "", "repair", "stream", "--yes"); code == exitOK ||
			!strings.Contains(stderr, "leader") {
			t.Errorf("repair without a majority: exit code %d\n%s%s", code, stdout, stderr)
		}
	})
	r.lose("three brokers lost", r.c.Nodes, func() {
		r.says([]string{"status"}, "NATS is unavailable")
		r.says([]string{"doctor", "--json"}, `"unavailable"`)
		r.writes(50)
	})
	r.loseDisks()
}

// loseDisks loses every broker's disk while some published events are in the archive. A repair
// publishes all of them again.
func (r *rehearsal) loseDisks() {
	r.t.Helper()
	if _, err := r.pool.Exec(r.t.Context(), `SELECT outbox_range_cut(50000001)`); err != nil {
		r.t.Fatal(err)
	}
	r.await("the relay to pass the range", lossWithin,
		func() bool { return r.count(`SELECT min(floor_id) FROM outbox_partitions`) >= 50000000 })
	if _, err := r.pool.Exec(r.t.Context(), `SELECT outbox_range_archive(1, 0)`); err != nil {
		r.t.Fatal(err)
	}
	if r.count(`SELECT count(*) FROM outbox_messages_archive`) == 0 {
		r.t.Fatal("nothing was archived")
	}
	r.published()
	for _, b := range r.c.Nodes {
		b.Kill(r.t)
	}
	for _, b := range r.c.Nodes {
		if err := os.RemoveAll(filepath.Join(b.Dir(), "jetstream")); err != nil {
			r.t.Fatal(err)
		}
	}
	began := time.Now()
	for _, b := range r.c.Nodes {
		b.Restart(r.t)
	}
	r.says([]string{"status"}, "REFUSED", "tidings repair stream")
	r.metrics(`tidings_outbox_partitions_stuck{part="relay"} 1`)
	r.says([]string{"doctor", "--json"}, `"refused-stream"`)
	r.t.Logf("all disks lost: the relay says so after %s", time.Since(began).Round(time.Second))
	began = time.Now()
	if code, stdout, stderr := run(r.t, r.patient(), "", "repair", "stream", "--yes"); code != exitOK ||
		!strings.Contains(stdout, "its stream is gone") {
		r.t.Fatalf("repair: exit code %d\n%s%s", code, stdout, stderr)
	}
	r.t.Logf("all disks lost: the repair took %s", time.Since(began).Round(100*time.Millisecond))
	r.t.Logf("all disks lost: everything was published again %s later", r.published())
	r.c.AwaitReplicas(r.t, r.c.Config().StreamName(1))
	r.check("all disks lost")
}
