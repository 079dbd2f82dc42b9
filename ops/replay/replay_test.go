package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
)

// childEnv has the configuration of a replay in its own process: the test binary again.
const childEnv = "TIDINGS_TEST_REPLAY"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
		return
	}
	testkit.Main(m)
}

// childConfig has the addresses of a child's servers, and the step at which the child kills itself.
type childConfig struct {
	URL, Step string
	Broker    broker.Config
}

// child replays followercounts from the truth and ends.
func child() {
	var c childConfig
	if err := json.Unmarshal([]byte(os.Getenv(childEnv)), &c); err != nil {
		panic(err)
	}
	ctx, log := context.Background(), slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg := postgres.Config{MaxConns: 4, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute}
	truth, err := postgres.Open(ctx, c.URL, cfg, postgres.RoleSystem, "truth")
	if err != nil {
		panic(err)
	}
	nc, err := broker.Connect(c.Broker, "replay", log)
	if err != nil {
		panic(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		panic(err)
	}
	_, err = Run(ctx, Deps{URL: c.URL, Postgres: cfg, Truth: truth, JetStream: js, Broker: c.Broker, Log: log},
		followercounts.New(kinds.Builtin), Options{From: Truth, at: func(_ context.Context, step string) {
			if step == c.Step {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // the child does not come back to report an error
			}
		}})
	panic(fmt.Sprintf("the replay ended at no step %q: %v", c.Step, err))
}

func all() []projections.Projection {
	return []projections.Projection{followercounts.New(kinds.Builtin), threadcache.New(kinds.Builtin), history.New(kinds.Builtin)}
}

const tenant = 1

// rig is a whole system: a store, a relay and the live consumers.
type rig struct {
	t                  testing.TB
	url                string
	owner, system, api *pgxpool.Pool
	broker             broker.Config
	js                 jetstream.JetStream
	store              *store.Store
}

func newRig(t testing.TB) *rig {
	t.Helper()
	return newRigOn(t, testkit.NATS(t))
}

func newRigOn(t testing.TB, b *testkit.Broker) *rig {
	t.Helper()
	db := testkit.Postgres(t)
	r := &rig{t: t, url: db.URL, owner: db.Pool(t, postgres.RoleOwner), system: db.Pool(t, postgres.RoleSystem),
		api: db.Pool(t, postgres.RoleAPI), broker: b.Config()}
	r.js, r.store = system.Streams(t, b), store.New(r.api, func(int) {})
	system.Start(t, system.Relay(t, system.RelayConfig(), r.system, r.broker).Run)
	return r
}

// live starts the live consumer of a projection.
func (r *rig) live(p consumers.Projection) (c *consumers.Consumer, stop func()) {
	r.t.Helper()
	c = system.Consumer(r.t, system.ConsumerConfig(), consumers.Deps{Pool: r.system, JetStream: r.js}, r.broker, p)
	return c, system.Start(r.t, c.Run)
}

func (r *rig) deps() Deps {
	return Deps{URL: r.url, Postgres: postgres.Config{MaxConns: 4, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute},
		Truth: r.system, JetStream: r.js, Broker: r.broker, Log: testkit.Logger(r.t)}
}

func (r *rig) replay(p projections.Projection, o Options) Report {
	r.t.Helper()
	report, err := Run(r.t.Context(), r.deps(), p, o)
	if err != nil {
		r.t.Fatalf("replay %s from %s: %v", p.Name(), o.From, err)
	}
	return report
}

// The accounts and the post that only gain followers and comments, so the counts that readers see
// never decrease.
const (
	growingUser = 1000
	growingPost = 1000
)

var follows, memberships = kinds.Builtin().Edges["follow"], kinds.Builtin().Edges["membership"]

// write makes one random change with rng; n is different for each call.
func (r *rig) write(ctx context.Context, rng *rand.Rand, n int64, comments *[]string) error {
	meta := store.Meta{Actor: "test"}
	switch rng.IntN(10) {
	case 8:
		_, err := r.store.PutEdges(ctx, tenant, memberships, []store.EdgeWrite{{Meta: meta,
			From: event.IDOf(1 + rng.Int64N(20)), To: event.IDOf(1 + rng.Int64N(5)),
			Attributes: json.RawMessage([]string{`{"role":"member"}`, `{"role":"owner"}`}[rng.IntN(2)])}})
		return err
	case 9:
		_, err := r.store.RemoveEdges(ctx, tenant, memberships,
			[]store.EdgeWrite{{Meta: meta, From: event.IDOf(1 + rng.Int64N(20)), To: event.IDOf(1 + rng.Int64N(5))}})
		return err
	case 0:
		_, err := r.store.PutEdges(ctx, tenant, follows,
			[]store.EdgeWrite{{Meta: meta, From: event.IDOf(1_000_000 + n), To: event.IDOf(growingUser)}})
		return err
	case 1, 2:
		_, err := r.store.PutEdges(ctx, tenant, follows, []store.EdgeWrite{{Meta: meta,
			From: event.IDOf(1 + rng.Int64N(20)), To: event.IDOf(21 + rng.Int64N(20))}})
		return err
	case 3:
		_, err := r.store.RemoveEdges(ctx, tenant, follows,
			[]store.EdgeWrite{{Meta: meta, From: event.IDOf(1 + rng.Int64N(20)), To: event.IDOf(21 + rng.Int64N(20))}})
		return err
	case 4:
		_, err := r.store.CreateChildren(ctx, tenant, kinds.Builtin().Children["comment"],
			[]store.NewChild{{Meta: meta, Object: event.IDOf(growingPost), AuthorID: "5", Body: "stays"}})
		return err
	case 5:
		c := store.NewChild{Meta: meta, Object: "1", AuthorID: "7", Body: fmt.Sprintf("comment %d", n)}
		if len(*comments) > 0 && rng.IntN(2) == 0 {
			c.ReplyTo = (*comments)[rng.IntN(len(*comments))]
		}
		out, err := r.store.CreateChildren(ctx, tenant, kinds.Builtin().Children["comment"], []store.NewChild{c})
		if err == nil && out[0].Err == nil {
			*comments = append(*comments, out[0].Child.ID)
		}
		return err
	case 6:
		if len(*comments) == 0 {
			return nil
		}
		id := (*comments)[rng.IntN(len(*comments))]
		_, err := r.store.EditChildren(ctx, tenant, kinds.Builtin().Children["comment"],
			[]store.ChildEdit{{Meta: meta, ID: id, IfVersion: store.AnyVersion, Body: new(fmt.Sprintf("edit %d", n))}})
		return err
	default:
		if len(*comments) == 0 {
			return nil
		}
		id := (*comments)[rng.IntN(len(*comments))]
		if rng.IntN(2) == 0 {
			_, err := r.store.DeleteChildren(ctx, tenant, kinds.Builtin().Children["comment"],
				[]store.ChildDelete{{Meta: meta, ID: id, IfVersion: store.AnyVersion}})
			return err
		}
		_, err := r.store.SetThreads(ctx, tenant, kinds.Builtin().Children["comment"],
			[]store.ThreadSettings{{Meta: meta, Object: event.IDOf(1 + rng.Int64N(3)), Title: fmt.Sprintf("title %d", n)}})
		return err
	}
}

// writers write until the test ends or the test calls the returned function. The log has their
// seed.
func (r *rig) writers(n int) (stop func()) {
	seed, _ := testkit.Seed(r.t)
	var last atomic.Int64
	return system.Start(r.t, func(ctx context.Context) error {
		var wg sync.WaitGroup
		errs := make([]error, n)
		for i := range n {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(i)))
				var comments []string
				pace := time.NewTicker(5 * time.Millisecond)
				defer pace.Stop()
				for ; ctx.Err() == nil && errs[i] == nil; <-pace.C {
					if err := r.write(context.WithoutCancel(ctx), rng, last.Add(1), &comments); err != nil && !postgres.IsTransient(err) {
						errs[i] = err
					}
				}
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	})
}

// fill writes n changes.
func (r *rig) fill(n int64) {
	r.t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	var comments []string
	for i := range n {
		if err := r.write(r.t.Context(), rng, 10_000_000+i, &comments); err != nil {
			r.t.Fatal(err)
		}
	}
}

// seen has the counts that a reader has seen, which must never decrease.
type seen struct{ followers, page, comments, threaded int64 }

// readers read pages and counts until the test calls the returned function. They fail the test if
// anything decreases.
func (r *rig) readers() (stop func()) {
	var reads atomic.Int64
	end := system.Start(r.t, func(ctx context.Context) error {
		var last seen
		pace := time.NewTicker(2 * time.Millisecond)
		defer pace.Stop()
		for ; ctx.Err() == nil; <-pace.C {
			now, err := r.read(context.WithoutCancel(ctx))
			if err != nil {
				return err
			}
			if now.followers < last.followers || now.page < last.page || now.comments < last.comments || now.threaded < last.threaded {
				return fmt.Errorf("a reader saw %+v, then %+v", last, now)
			}
			last = now
			reads.Add(1)
		}
		return nil
	})
	return func() {
		end()
		if n := reads.Load(); n < 10 {
			r.t.Errorf("only %d reads", n)
		}
	}
}

func (r *rig) read(ctx context.Context) (now seen, err error) {
	err = postgres.InTenant(ctx, r.api, tenant, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		counts, err := followercounts.ReadCounts(ctx, tx, []string{follows.Name}, []event.ID{event.IDOf(growingUser)})
		if err != nil {
			return err
		}
		page, err := followercounts.Incoming(ctx, tx, follows, event.IDOf(growingUser), "", nil, 200)
		if err != nil {
			return err
		}
		comments, err := threadcache.Page(ctx, tx, event.AggregateComment, event.IDOf(growingPost), threadcache.Oldest, nil, 200)
		if err != nil {
			return err
		}
		threaded, err := threadcache.Threaded(ctx, tx, event.AggregateComment, event.IDOf(growingPost), "", "", 200)
		now = seen{counts[followercounts.Object{Kind: follows.Name, ID: event.IDOf(growingUser)}].Incoming, int64(len(page)),
			int64(len(comments)), int64(len(threaded))}
		return err
	})
	return now, err
}

// settle waits until the named consumers have applied every written event.
func (r *rig) settle(names ...string) {
	r.t.Helper()
	ctx := context.Background()
	testkit.Eventually(r.t, "everything is applied", func() (bool, error) {
		var pending int
		if err := r.system.QueryRow(ctx, `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`).Scan(&pending); err != nil ||
			pending > 0 {
			return false, err
		}
		if len(names) == 0 {
			return true, nil
		}
		lags, err := consumers.Lag(ctx, r.system, r.js, r.broker, names...)
		for _, l := range lags {
			if l.Messages > 0 {
				return false, err
			}
		}
		return err == nil, err
	})
}

// verify fails the test unless the projection equals the truth.
func (r *rig) verify(name string) {
	r.t.Helper()
	p := all()[slices.IndexFunc(all(), func(p projections.Projection) bool { return p.Name() == name })]
	n, err := p.Verify(r.t.Context(), r.system, r.system, func(d projections.Difference) { r.t.Error(d) })
	if err != nil || n == 0 {
		r.t.Errorf("verified %d of %s: %v", n, name, err)
	}
}

// leftovers returns the schemas of replays.
func (r *rig) leftovers() []string {
	r.t.Helper()
	rows, _ := r.owner.Query(context.Background(), schemasSQL, schemaPrefix)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		r.t.Fatal(err)
	}
	return names
}

// describe lists everything that belongs to the tables except their rows.
func (r *rig) describe(tables []string) (lines []string) {
	r.t.Helper()
	rows, _ := r.owner.Query(context.Background(), `
		SELECT relname || ' ' || relkind::text || ' acl ' || coalesce(relacl::text,
		'') || ' rls ' || relrowsecurity::text || ' options ' || coalesce(reloptions::text, '')
		       || ' owner ' || relowner::regrole::text FROM pg_class WHERE relname = ANY ($1) AND relnamespace = 'public'::regnamespace
		UNION ALL SELECT attrelid::regclass::text || ' column ' || attnum || attname || ' ' || format_type(atttypid,
		atttypmod) || attnotnull::text || attcollation::regcollation::text
		  FROM pg_attribute WHERE attnum > 0 AND attrelid::regclass::text = ANY ($1)
		UNION ALL SELECT tablename || ' index ' || indexdef FROM pg_indexes WHERE tablename = ANY ($1) AND schemaname = 'public'
		UNION ALL SELECT tablename || ' policy ' || policyname || roles::text || cmd || coalesce(qual, '') || coalesce(with_check, '')
		FROM pg_policies WHERE tablename = ANY ($1) AND schemaname = 'public'
		UNION ALL SELECT conrelid::regclass::text || ' constraint ' || conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint
		WHERE conrelid::regclass::text = ANY ($1)
		ORDER BY 1`, tables)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		r.t.Fatal(err)
	}
	return lines
}

func TestReplaysWhileWritesGoOnEndInTheTruth(t *testing.T) {
	r := newRig(t)
	var names []string
	for _, p := range all() {
		r.live(p)
		names = append(names, p.Name())
	}
	r.fill(200)
	r.settle(names...)
	if _, err := r.owner.Exec(t.Context(), `GRANT SELECT ON edge_lists TO PUBLIC`); err != nil { // a grant of an operator
		t.Fatal(err)
	}
	stopWriters, stopReaders := r.writers(2), r.readers()
	for _, p := range all() {
		for _, from := range []Source{Auto, Truth} {
			if p.Name() == threadcache.Name && from == Auto {
				continue // the same as for followercounts
			}
			before := r.describe(p.Tables())
			report := r.replay(p, Options{From: from})
			if !report.Switched || report.Events == 0 || from == Auto && report.From != Stream || report.DeadLetters > 0 {
				t.Errorf("%+v", report)
			}
			if diff := cmp.Diff(before, r.describe(p.Tables())); diff != "" {
				t.Errorf("%s: definitions of the tables (-before +after):\n%s", p.Name(), diff)
			}
			t.Logf("%+v", report)
		}
	}
	stopWriters()
	r.settle(names...)
	stopReaders()
	for _, name := range names {
		r.verify(name)
	}
	if left := r.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestAReplayPassesMessagesThatNoRelayWrote(t *testing.T) {
	r := newRig(t)
	p := followercounts.New(kinds.Builtin)
	r.live(p)
	stray := func() {
		t.Helper()
		if _, err := r.js.Publish(t.Context(), r.broker.Prefix+".0.x", []byte("hello")); err != nil {
			t.Fatal(err)
		}
	}
	r.fill(200)
	r.settle(p.Name()) // the relay has found the empty stream
	stray()
	for _, from := range []Source{Stream, Truth} {
		if report := r.replay(p, Options{From: from}); !report.Switched || report.From != from {
			t.Errorf("from %s: %+v", from, report)
		}
		r.fill(50)
		stray()
		r.settle(p.Name())
		r.verify(p.Name())
	}
}

func TestASecondReplayOfAConsumerIsRefused(t *testing.T) {
	r := newRig(t)
	p := followercounts.New(kinds.Builtin)
	r.live(p)
	r.fill(20)
	r.replay(p, Options{From: Auto, at: func(ctx context.Context, step string) {
		if step != "filled" {
			return
		}
		if _, err := Run(ctx, r.deps(), p, Options{From: Auto}); !errors.Is(err, ErrRunning) {
			t.Errorf("the second one: %v", err)
		}
		if _, err := Run(ctx, r.deps(), threadcache.New(kinds.Builtin), Options{From: Auto}); err != nil {
			t.Errorf("one of another consumer: %v", err)
		}
	}})
}

func TestAReplayLetsAStoppedConsumerGoOn(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, r *rig)
		from   Source
	}{
		{"its offsets are another stream's", func(t *testing.T, r *rig) {
			if _, err := r.owner.Exec(t.Context(), `UPDATE consumer_offsets
				SET stream_created = '2020-01-01', last_processed_id = last_processed_id + 1000000`); err != nil {
				t.Fatal(err)
			}
		}, Stream},
		{"events expired before it read them", func(t *testing.T, r *rig) {
			stream, err := r.js.Stream(t.Context(), r.broker.StreamName(0))
			if err != nil {
				t.Fatal(err)
			}
			testkit.Expire(t, stream, stream.CachedInfo().State.LastSeq-3)
		}, Truth},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			var stops []func()
			for _, p := range all() {
				_, stop := r.live(p)
				stops = append(stops, stop)
			}
			r.fill(50)
			r.settle(followercounts.Name, threadcache.Name, history.Name)
			for _, stop := range stops {
				stop()
			}
			r.fill(100)
			r.settle()
			c.damage(t, r)
			for _, p := range all() {
				live, _ := r.live(p)
				testkit.Eventually(t, p.Name()+" to stop", func() (bool, error) {
					err := live.Ready(t.Context())
					return err != nil && strings.Contains(err.Error(), "run `tidings replay --consumer "+p.Name()+"`"), nil
				})
				if report := r.replay(p, Options{From: Auto}); report.From != c.from {
					t.Errorf("%s: from %s: %s", p.Name(), report.From, report.Because)
				}
				testkit.Eventually(t, p.Name()+" to continue", func() (bool, error) {
					err := live.Ready(t.Context())
					return err == nil, err
				})
			}
			r.fill(50)
			r.settle(followercounts.Name, threadcache.Name, history.Name)
			for _, p := range all() {
				r.verify(p.Name())
			}
		})
	}
}

// TestAStreamThatGrewAgainEndsInTheTruth cuts the power of NATS and PostgreSQL: the stream loses
// its end, and the relay its marks. The relay then gives the lost sequences to other events. The
// consumer stops, and a replay rebuilds its tables.
func TestAStreamThatGrewAgainEndsInTheTruth(t *testing.T) {
	b := testkit.NATSProcess(t)
	r := newRigOn(t, b)
	p := followercounts.New(kinds.Builtin)
	live, _ := r.live(p)
	follow := func(from, to int) {
		t.Helper()
		for id := from; id < to; id++ {
			w := store.EdgeWrite{Meta: store.Meta{Actor: "test"}, From: event.IDOf(id), To: event.IDOf(10_000 + id)}
			if _, err := r.store.PutEdges(t.Context(), tenant, follows, []store.EdgeWrite{w}); err != nil {
				t.Fatal(err)
			}
		}
	}
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := r.owner.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	follow(1, 11)
	r.settle(p.Name())
	disk := b.Copy(t)
	follow(11, 21)
	r.settle(p.Name())
	b.Kill(t)
	if err := errors.Join(os.RemoveAll(b.Dir()), os.CopyFS(b.Dir(), os.DirFS(disk))); err != nil {
		t.Fatal(err)
	}
	exec(`UPDATE outbox_partitions SET tail_seq = 10, floor_id = 0`)
	exec(`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL,
		available_at = inserted_at + interval '1 hour' WHERE stream_seq > 10`)
	b.Restart(t)
	follow(21, 41) // these get the sequences from 11 on
	testkit.Eventually(t, p.Name()+" to stop", func() (bool, error) {
		err := live.Ready(t.Context())
		return err != nil && strings.Contains(err.Error(), "message 20 of stream "+r.broker.StreamName(0)+" was stored at") &&
			strings.Contains(err.Error(), "run `tidings replay --consumer "+p.Name()+"`"), nil
	})
	exec(`UPDATE outbox_messages SET available_at = inserted_at + interval '1 microsecond' WHERE processed_at IS NULL`)
	r.settle()
	r.replay(p, Options{From: Auto})
	follow(41, 51)
	r.settle(p.Name())
	r.verify(p.Name())
	if err := live.Ready(t.Context()); err != nil {
		t.Errorf("ready: %v", err)
	}
}

func TestDeadLettersAreThoseOfTheNewTables(t *testing.T) {
	r := newRig(t)
	p := followercounts.New(kinds.Builtin)
	r.live(p)
	if _, err := r.owner.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'follow', 77, 'created', '{"version": "no"}')`); err != nil {
		t.Fatal(err)
	}
	r.fill(20)
	r.settle(p.Name())
	for from, want := range map[Source]int64{Stream: 1, Truth: 0} {
		if got := r.replay(p, Options{From: from}); got.DeadLetters != want {
			t.Errorf("from %s: %d dead letters, want %d", from, got.DeadLetters, want)
		}
		var n int64
		if err := r.system.QueryRow(t.Context(), `SELECT count(*) FROM consumer_dead_letters WHERE consumer_name = $1`,
			p.Name()).Scan(&n); err != nil || n != want {
			t.Errorf("from %s: %d dead letters in the table, %v, want %d", from, n, err, want)
		}
	}
}

func TestWhereAReplayReadsFrom(t *testing.T) {
	has, lacks := streamsState{all: make([]broker.Stream, 2)}, streamsState{missing: "a stream begins at 5"}
	for _, c := range []struct {
		name    string
		streams streamsState
		want    Source
		from    Source
	}{
		{"the streams, which have every event", has, Auto, Stream},
		{"the truth, as events are missing", lacks, Auto, Truth},
		{"the truth on request", has, Truth, Truth},
		{"an error on a request for streams that lack events", lacks, Stream, ""},
		{"an error on a request for anything else", has, "memory", ""},
	} {
		if got, why, err := c.streams.choose(c.want); got != c.from || (err != nil) != (c.from == "") {
			t.Errorf("%s: from %q (%s), %v; want %q", c.name, got, why, err, c.from)
		}
	}
}

func TestWhetherStreamsHaveEveryEvent(t *testing.T) {
	b := testkit.NATS(t)
	cfg := b.Config()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	declare := func(p broker.Partition) {
		t.Helper()
		if _, err := broker.Declare(t.Context(), js, cfg, p, testkit.Logger(t)); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when, want string) {
		t.Helper()
		s, err := readStreams(t.Context(), js, cfg, nil)
		got := s.missing
		if err != nil {
			got = err.Error()
		}
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	check("without any stream", "no stream of "+cfg.Stream+" exists")
	declare(broker.Partition{LastSlot: event.Slots - 1})
	check("with a stream that never had an event", "")
	for range 6 {
		if _, err := js.Publish(t.Context(), cfg.Prefix+".0.t1.post.created", nil); err != nil {
			t.Fatal(err)
		}
	}
	check("with a stream that has every event", "")
	declare(broker.Partition{Number: 1, LastSlot: 15, After: []int{0}})
	declare(broker.Partition{Number: 2, FirstSlot: 16, LastSlot: event.Slots - 1, After: []int{0}})
	check("after a resize", "")
	stream, err := js.Stream(t.Context(), cfg.StreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	if err := broker.RecordErased(t.Context(), js, cfg, stream.CachedInfo().Config.Name, []uint64{1, 2}); err != nil {
		t.Fatal(err)
	}
	for seq := range uint64(2) {
		if err := stream.DeleteMsg(t.Context(), seq+1); err != nil {
			t.Fatal(err)
		}
	}
	check("with a stream whose first events were erased", "")
	if err := stream.DeleteMsg(t.Context(), 3); err != nil {
		t.Fatal(err)
	}
	check("with a stream whose first events have expired", "EVENTS-0 begins at 4")
	if err := js.DeleteStream(t.Context(), cfg.StreamName(0)); err != nil {
		t.Fatal(err)
	}
	check("without the predecessor", "EVENTS-0, the predecessor of EVENTS-1, is gone")
	declare(broker.Partition{LastSlot: event.Slots - 1})
	if err := broker.MarkRepaired(t.Context(), js, cfg, 2); err != nil {
		t.Fatal(err)
	}
	check("after a repair", "EVENTS-0 was lost, and EVENTS-2 replaces it")
	for _, n := range []int{0, 2} {
		if err := js.DeleteStream(t.Context(), cfg.StreamName(n)); err != nil {
			t.Fatal(err)
		}
	}
	check("while slots have no stream", "only 16 of 32 slots have a stream")
}

func (r *rig) resize(to int) {
	r.t.Helper()
	if _, err := outbox.Resize(r.t.Context(), r.system, to); err != nil {
		r.t.Fatal(err)
	}
}

// TestAReplayKeepsTheOrderOfDeadLettersAcrossAResize: a retry goes by their ids. The stream after
// the resize begins with sequence 1 again.
func TestAReplayKeepsTheOrderOfDeadLettersAcrossAResize(t *testing.T) {
	r := newRig(t)
	p := followercounts.New(kinds.Builtin)
	r.live(p)
	r.fill(20)
	park := func(eventType string) {
		t.Helper()
		if _, err := r.owner.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (1, 'follow', 77, $1, '{"version": "no"}')`, eventType); err != nil {
			t.Fatal(err)
		}
		r.settle(p.Name())
	}
	letters := func() (all string) {
		t.Helper()
		if err := r.system.QueryRow(t.Context(), `SELECT string_agg(event_type || ' of ' || partition_key, ', ' ORDER BY id)
			FROM consumer_dead_letters`).Scan(&all); err != nil {
			t.Fatal(err)
		}
		return all
	}
	park("created")
	r.resize(2)
	park("removed")
	park("updated")
	want := letters()
	if !strings.Contains(want, "created of EVENTS-0, removed of EVENTS-") || strings.Count(want, "EVENTS-0") != 1 {
		t.Fatalf("the dead letters are %s: want those of two streams", want)
	}
	if report := r.replay(p, Options{From: Stream}); report.DeadLetters != 3 {
		t.Errorf("%d dead letters, want 3", report.DeadLetters)
	}
	if got := letters(); got != want {
		t.Errorf("after the replay the dead letters are %s, want %s", got, want)
	}
}

func TestAReplaySwitchesAlsoAfterAClosingMessageHasExpired(t *testing.T) {
	r := newRig(t)
	p := followercounts.New(kinds.Builtin)
	r.live(p)
	r.fill(50)
	r.resize(2)
	r.fill(50)
	r.settle(p.Name())
	s, err := r.js.Stream(t.Context(), r.broker.StreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Expire(t, s, 0) // as NATS_MAX_AGE does later
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if report, err := Run(ctx, r.deps(), p, Options{From: Auto}); err != nil || !report.Switched || report.From != Truth {
		t.Fatalf("%+v, %v; want a switch to tables from the truth", report, err)
	}
	r.fill(20)
	r.settle(p.Name())
	r.verify(p.Name())
}

// TestAReplayOfTheArchiverWaitsForTheLiveOne keeps a batch of the live archiver open: the two
// record in the same tables.
func TestAReplayOfTheArchiverWaitsForTheLiveOne(t *testing.T) {
	r := newRig(t)
	p := history.New(kinds.Builtin)
	r.fill(20)
	live, err := r.system.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = live.Rollback(context.WithoutCancel(t.Context())) }() // no effect after the one below
	for e, err := range p.Truth(t.Context(), r.system) {
		if err == nil {
			err = p.Apply(t.Context(), live, []event.Event{e})
		}
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	replayed := make(chan error, 1)
	go func() {
		_, err := Run(t.Context(), r.deps(), p, Options{From: Truth})
		replayed <- err
	}()
	testkit.Eventually(t, "the replay to wait for the batch", func() (waits bool, err error) {
		err = r.system.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND locktype = 'advisory'
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`).Scan(&waits)
		return waits, err
	})
	if err := live.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-replayed; err != nil {
		t.Error(err)
	}
}

// TestAReplayDoesNotSwitchWhenAStreamIsRepairedMeanwhile: a replay reads descriptions of the
// streams from before the repair.
func TestAReplayDoesNotSwitchWhenAStreamIsRepairedMeanwhile(t *testing.T) {
	r := newRig(t)
	p := followercounts.New(kinds.Builtin)
	r.live(p)
	r.fill(50)
	r.settle(p.Name())
	_, err := Run(t.Context(), r.deps(), p, Options{From: Stream, Stall: time.Second, at: func(ctx context.Context, step string) {
		if step != "caught up" {
			return
		}
		if err := r.js.DeleteStream(ctx, r.broker.StreamName(0)); err != nil {
			t.Error(err)
		}
		r.repair()
	}})
	if err == nil || !strings.Contains(err.Error(), "run it again") && !strings.Contains(err.Error(), "do not catch up") {
		t.Errorf("got %v", err)
	}
	r.settle(p.Name())
	if report := r.replay(p, Options{From: Auto}); report.From != Truth || !report.Switched {
		t.Errorf("after the repair: %+v", report)
	}
	r.fill(20)
	r.settle(p.Name())
	r.verify(p.Name())
}

// repair does the work of `tidings repair stream`.
func (r *rig) repair() {
	r.t.Helper()
	report, err := relay.Repair(context.Background(), r.system, r.broker, testkit.Logger(r.t), relay.RepairOptions{})
	if err != nil || !report.Repaired {
		r.t.Errorf("repair: %+v, %v", report, err)
	}
	for _, part := range report.Partitions {
		for _, s := range part.Successors {
			if err := consumers.Rebase(context.Background(), r.system, part.Stream, part.Left, s); err != nil {
				r.t.Error(err)
			}
		}
	}
}

// A switch would not replace a table that no projection names. A projection's Truth must yield
// every entity of its events.
func TestProjectionsNameAllTheirTablesAndTellOfAllTheirAggregates(t *testing.T) {
	r := newRig(t)
	r.fill(60)
	var named []string
	for _, p := range all() {
		named = append(named, p.Tables()...)
		told := map[string]bool{}
		for e, err := range p.Truth(t.Context(), r.system) {
			if err != nil {
				t.Fatal(err)
			}
			told[e.AggregateType] = true
		}
		for _, a := range []string{event.AggregateFollow, event.AggregateComment, event.AggregateThread} {
			if p.Wants(a) && !told[a] {
				t.Errorf("%s wants %s, but its Truth yields no event of it", p.Name(), a)
			}
		}
	}
	slices.Sort(named)
	// A schema of their own has only the projections' tables.
	if _, err := r.owner.Exec(t.Context(), `CREATE SCHEMA alone`); err != nil {
		t.Fatal(err)
	}
	if _, err := migrations.UpIn(t.Context(), r.url, migrations.Projections, "alone", testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	rows, _ := r.owner.Query(t.Context(), `
		SELECT c.relname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant_id'
		 WHERE c.relkind = 'r' AND c.relnamespace = 'alone'::regnamespace
		 AND NOT c.relname::text ~ '^consumer_|_history$|_purged$|_kinds$|^tenant_cells$'
		 ORDER BY 1`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(tables, named); diff != "" {
		t.Errorf("the projections' tables (-there +named):\n%s", diff)
	}
}

func TestALookUpThatIsNotAnsweredInTimeIsAReasonToTryAgain(t *testing.T) {
	r := newRig(t)
	s := &replay{deps: r.deps(), p: followercounts.New(kinds.Builtin), name: followercounts.Name}
	if err := s.lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.unlock(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	s.deps.Broker.Timeout = time.Nanosecond
	if done, err := s.trySwitch(t.Context(), &Report{}); done || err != nil || s.why == "" {
		t.Errorf("a request that timed out: switched %t, %v, reason %q; want no switch, no error and a reason", done, err, s.why)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := s.trySwitch(ended, &Report{}); err == nil {
		t.Error("no error although ctx has ended")
	}
}
