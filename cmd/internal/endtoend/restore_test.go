package endtoend_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/tidings/cli"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/ops/restore"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

// site is an installation with truth and projections in two databases, and a subscriber's
// projection in a third one.
type site struct {
	t                              *testing.T
	truthDB, projectionsDB, others *testkit.DB
	nats                           *testkit.Broker
	truth, projections, outside    *pgxpool.Pool
	js                             jetstream.JetStream
	store                          *store.Store
	health                         subscribe.Health
	parts                          map[string]*part
}

// open connects to the servers. It starts nothing.
func (s *site) open(t *testing.T) {
	t.Helper()
	s.t, s.truth, s.projections = t, s.truthDB.Pool(t, postgres.RoleSystem), s.projectionsDB.Pool(t, postgres.RoleSystem)
	s.store, s.parts = store.New(s.truth, nil), map[string]*part{}
	u, err := url.Parse(s.others.URL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set("search_path", "mine")
	u.RawQuery = q.Encode()
	if s.outside, err = pgxpool.New(t.Context(), u.String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.outside.Close)
	if s.js, err = jetstream.New(s.nats.Connect(t)); err != nil {
		t.Fatal(err)
	}
}

// start runs a part until the test ends.
func (s *site) start(name string, fn func(context.Context) error) {
	s.t.Helper()
	p := run(name, fn)
	s.parts[name] = p
	s.t.Cleanup(func() {
		if err := p.stop(); err != nil {
			s.t.Errorf("%s: %v", name, err)
		}
	})
}

func (s *site) stop(name string) {
	s.t.Helper()
	if err := s.parts[name].stop(); err != nil {
		s.t.Fatalf("%s: %v", name, err)
	}
}

// run starts the relay and the consumers.
func (s *site) run() {
	s.t.Helper()
	s.start("relay", system.Relay(s.t, system.RelayConfig(), s.truth, s.nats.Config()).Run)
	for _, name := range consumerNames {
		pool := s.projectionsDB.Pool(s.t, postgres.RoleSystem)
		catalog := catalog.New(pool, catalog.Projections, testkit.Logger(s.t))
		s.start(name, system.Consumer(s.t, system.ConsumerConfig(), consumers.Deps{Pool: pool, Kinds: catalog, JetStream: s.js},
			s.nats.Config(), projection(name, catalog.Now)).Run)
	}
}

// runOutside starts the subscriber's projection. It restarts the projection until the relay has
// created a stream, as a supervisor would.
func (s *site) runOutside() {
	s.t.Helper()
	s.start("outside", func(ctx context.Context) error {
		for {
			err := s.project(ctx)
			if !errors.Is(err, subscribe.ErrNoStreams) {
				return err
			}
			(&line{t: s.t}).pass(50 * time.Millisecond)
		}
	})
}

// project keeps the follows in a table of the subscriber by their versions, as docs/subscribe.md
// says.
func (s *site) project(ctx context.Context) error {
	nc := s.js.Conn()
	return projector.Project(ctx, nc, s.outside, "outside", func(ctx context.Context, tx pgx.Tx, batch []event.Event) error {
		for i := range batch {
			e, err := batch[i].DecodeEdge(kinds.Builtin().Edges["follow"].Names())
			if err == nil {
				err = s.keep(ctx, tx, batch[i].TenantID, e)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}, subscribe.Only("follow"), subscribe.Takeover(leaseTTL), subscribe.Report(&s.health), subscribe.Log(testkit.Logger(s.t)))
}

func (s *site) keep(ctx context.Context, tx pgx.Tx, tenant int64, e event.Edge) error {
	_, err := tx.Exec(ctx, `INSERT INTO followed AS f VALUES ($1, $2, $3, $4, $5) ON CONFLICT (tenant, from_id, to_id) DO UPDATE
		SET version = excluded.version, active = excluded.active
		WHERE f.version < excluded.version`, tenant, e.From, e.To, e.Version, e.Active())
	return err
}

// beginAnew does what docs/subscribe.md says for a projection that has lost its position: empty the
// table, fill it from an export, and begin after the export.
func (s *site) beginAnew(ctx context.Context) error {
	positions, err := outbox.Positions(ctx, s.truth)
	if err != nil {
		return err
	}
	var at []projector.Position
	for _, p := range positions {
		at = append(at, projector.Position{Partition: p.Partition, Stream: p.Stream, Created: p.Created, Sequence: p.Seq})
	}
	if err := projector.Replay(ctx, s.outside, "outside", func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `DELETE FROM followed`)
		return err
	}); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, s.outside, func(tx pgx.Tx) error {
		for e, err := range store.ScanEdges(ctx, s.truth, kinds.Builtin().Edges["follow"], nil, 0) {
			if err == nil {
				err = s.keep(ctx, tx, e.TenantID, e.Object)
			}
			if err != nil {
				return err
			}
		}
		return projector.Begin(ctx, tx, "outside", at)
	})
}

// tidings runs a command as an operator would.
func (s *site) tidings(args ...string) (code int, stdout, stderr string) {
	return s.tidingsUntil("at no time", args...)
}

// until is an output that cancels the command when it contains a text.
type until struct {
	bytes.Buffer
	what string
	stop context.CancelFunc
}

func (u *until) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(u.what)) {
		u.stop()
	}
	return u.Buffer.Write(b)
}

// tidingsUntil runs a command and interrupts it when its output contains a text.
func (s *site) tidingsUntil(what string, args ...string) (code int, stdout, stderr string) {
	ctx, stop := context.WithCancel(s.t.Context())
	defer stop()
	var out bytes.Buffer
	errs := until{what: what, stop: stop}
	cfg := s.nats.Config()
	code = cli.Execute(ctx, args, cli.Process{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
		Env: envconfig.MapLookuper(map[string]string{
			"DATABASE_URL": s.truthDB.URL, "PROJECTIONS_DATABASE_URL": s.projectionsDB.URL, "NATS_URL": cfg.URL})})
	return code, out.String(), errs.String()
}

// state is the state of one entity of the truth.
type state struct {
	Version int64
	Content string
	Erased  bool // it belongs to the erased user
}

// states returns all entities of a truth.
func states(t *testing.T, q *pgxpool.Pool) map[string]state {
	t.Helper()
	all := make(map[string]state)
	rows, _ := q.Query(t.Context(), `
		SELECT concat_ws('/', tenant_id, kind, from_id, to_id), version, concat_ws('/', status, attributes),
		from_id = '2' OR kind = 'follow' AND to_id = '2' FROM edges UNION ALL
		SELECT concat_ws('/', tenant_id, kind, child_id), version, concat_ws('/', object_id, parent_id, path, slug, author_id, author_state,
		moderation_state, attributes, body), author_id = '2' FROM children UNION ALL
		SELECT concat_ws('/', tenant_id, 'thread', kind, post_id), (object ->> 'version')::bigint, object ->> 'title', false FROM threads
		WHERE version_state = 'LATEST'`)
	var key string
	var one state
	if _, err := pgx.ForEachRow(rows, []any{&key, &one.Version, &one.Content, &one.Erased},
		func() error { all[key] = one; return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

// follows returns the follows that a query reads, with their versions.
func (s *site) follows(q *pgxpool.Pool, sql string) map[string]int64 {
	s.t.Helper()
	all := make(map[string]int64)
	rows, _ := q.Query(s.t.Context(), sql)
	var key string
	var version int64
	if _, err := pgx.ForEachRow(rows, []any{&key, &version}, func() error { all[key] = version; return nil }); err != nil {
		s.t.Fatal(err)
	}
	return all
}

// arrived waits until every write is applied everywhere, including the subscriber's projection.
func (s *site) arrived() {
	s.t.Helper()
	testkit.Eventually(s.t, "everything to be applied", func() (bool, error) {
		if done, err := s.applied(); err != nil || !done {
			return false, err
		}
		lag, err := projector.Lag(s.t.Context(), s.js.Conn(), s.outside, "outside")
		return err == nil && lag.Messages == 0, err
	})
}

// applied reports whether every write is published, and applied by Tidings' own consumers.
func (s *site) applied() (bool, error) {
	var waiting bool
	if err := s.truth.QueryRow(s.t.Context(),
		`SELECT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&waiting); err != nil || waiting {
		return false, err
	}
	lags, err := consumers.Lag(s.t.Context(), s.projections, s.js, s.nats.Config(), consumerNames...)
	for _, lag := range lags {
		if lag.Messages > 0 {
			return false, err
		}
	}
	return err == nil, err
}

// hand writes like users and moderators: it changes some entities again and again.
type hand struct {
	s    *store.Store
	rng  *rand.Rand
	made []string // ids of comments
	ours []string // ids of reviews: an author has one of a product, and may write another one after deleting it
	n    int
}

const tenant = 1

func (h *hand) write(ctx context.Context) (err error) {
	h.n++
	set, meta := kinds.Builtin(), store.Meta{Actor: "tester"}
	comment, edge := set.Children["comment"], store.EdgeWrite{Meta: meta, From: event.IDOf(1 + h.rng.Int64N(6)),
		To: event.IDOf(11 + h.rng.Int64N(6))}
	var out []store.ChildOutcome
	some := ""
	if len(h.made) > 0 {
		some = h.made[h.rng.IntN(len(h.made))]
	}
	like := store.EdgeWrite{Meta: meta, From: edge.From, To: event.ID(some)}
	switch n := h.rng.IntN(15); {
	case n >= 12 && some != "":
		if n == 12 {
			_, err = h.s.RemoveEdges(ctx, tenant, set.Edges["like_comment"], []store.EdgeWrite{like})
		} else { // refused if the comment is hidden or deleted
			_, err = h.s.PutEdges(ctx, tenant, set.Edges["like_comment"], []store.EdgeWrite{like})
		}
	case n >= 10 && n < 12:
		return h.review(ctx, n == 10)
	case n < 2:
		_, err = h.s.PutEdges(ctx, tenant, set.Edges["follow"], []store.EdgeWrite{edge})
	case n < 4:
		_, err = h.s.RemoveEdges(ctx, tenant, set.Edges["follow"], []store.EdgeWrite{edge})
	case n < 5:
		edge.Attributes = json.RawMessage(`{"role":"owner"}`)
		_, err = h.s.PutEdges(ctx, tenant, set.Edges["membership"], []store.EdgeWrite{edge})
	case n < 7 || some == "":
		out, err = h.s.CreateChildren(ctx, tenant, comment,
			[]store.NewChild{{Meta: meta, Object: event.IDOf(1 + h.rng.Int64N(3)),
				AuthorID: event.IDOf(1 + h.rng.Int64N(6)), Body: fmt.Sprintf("text %d", h.n)}})
	case n < 8:
		body := fmt.Sprintf("edited %d", h.n)
		_, err = h.s.EditChildren(ctx, tenant, comment, []store.ChildEdit{{Meta: meta, ID: some, IfVersion: store.AnyVersion, Body: &body}})
	case n < 9:
		state := []string{event.ModerationHidden, event.ModerationApproved}[h.rng.IntN(2)]
		_, err = h.s.ModerateChildren(ctx, tenant, comment,
			[]store.ChildModeration{{Meta: meta, ID: some, IfVersion: store.AnyVersion, State: state, Reason: "why"}})
	default:
		if h.rng.IntN(2) == 0 {
			_, err = h.s.DeleteChildren(ctx, tenant, comment, []store.ChildDelete{{Meta: meta, ID: some, IfVersion: store.AnyVersion}})
			break
		}
		_, err = h.s.SetThreads(ctx, tenant, comment, []store.ThreadSettings{{Meta: meta, Object: event.IDOf(1 + h.rng.Int64N(3)),
			Title: fmt.Sprintf("title %d", h.n)}})
	}
	for _, o := range out {
		if o.Err == nil {
			h.made = append(h.made, o.Child.ID)
		}
	}
	return err
}

// review writes a review, or deletes or edits one.
func (h *hand) review(ctx context.Context, create bool) error {
	k, meta := kinds.Builtin().Children["review"], store.Meta{Actor: "tester"}
	if create || len(h.ours) == 0 {
		out, err := h.s.CreateChildren(ctx, tenant, k, []store.NewChild{{Meta: meta, Object: event.IDOf(1 + h.rng.Int64N(8)),
			AuthorID: event.IDOf(1 + h.rng.Int64N(6)), Body: fmt.Sprintf("review %d", h.n), Attributes: json.RawMessage(`{"rating":4}`)}})
		if err == nil && out[0].Err == nil {
			h.ours = append(h.ours, out[0].Child.ID)
		}
		return err
	}
	id := h.ours[h.rng.IntN(len(h.ours))]
	if h.rng.IntN(3) > 0 {
		_, err := h.s.DeleteChildren(ctx, tenant, k, []store.ChildDelete{{Meta: meta, ID: id, IfVersion: store.AnyVersion}})
		return err
	}
	body := fmt.Sprintf("edited %d", h.n)
	_, err := h.s.EditChildren(ctx, tenant, k, []store.ChildEdit{{Meta: meta, ID: id, IfVersion: store.AnyVersion, Body: &body}})
	return err
}

// backups are copies of everything at three moments: two under load, the last one at rest.
type backups struct {
	at                  [3]time.Time
	truths, projections [3]*testkit.DB
	states              [3]map[string]state // of the truth
	streams             [3]string
	outside             *testkit.DB // taken at rest; the test never restores it
}

// makeBackups writes while it copies. It erases a user after the second moment.
func makeBackups(t *testing.T) *backups {
	t.Helper()
	s := &site{truthDB: testkit.Postgres(t), projectionsDB: testkit.Postgres(t), others: testkit.Postgres(t), nats: testkit.NATSProcess(t)}
	owner := s.others.Pool(t, postgres.RoleOwner)
	if _, err := owner.Exec(t.Context(), `CREATE SCHEMA mine; CREATE TABLE mine.followed (tenant bigint, from_id text, to_id text,
		version bigint, active boolean, PRIMARY KEY (tenant, from_id, to_id))`); err != nil {
		t.Fatal(err)
	}
	s.open(t)
	if err := projector.Migrate(t.Context(), s.outside); err != nil {
		t.Fatal(err)
	}
	s.run()
	s.runOutside()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	var written atomic.Int64
	for n := range uint64(3) {
		h := &hand{s: s.store, rng: rand.New(rand.NewPCG(7, n))}
		wg.Go(func() {
			for ctx.Err() == nil {
				if h.write(ctx) == nil { // the database is unavailable while it is copied
					written.Add(1)
				}
			}
		})
	}
	more := func() {
		t.Helper()
		at := written.Load()
		testkit.Eventually(t, "more writes", func() (bool, error) { return written.Load() > at+150, nil })
	}
	b := &backups{}
	for i, order := range []string{"tsp", "pst", "stp"} {
		more()
		if i == 2 {
			cancel()
			wg.Wait()
			if code, _, stderr := s.tidings("erase", "--tenant", "1", "--author", "2", "--reason", "request 1", "--yes"); code != 0 {
				t.Fatalf("erase: exit code %d\n%s", code, stderr)
			}
			s.arrived()
		}
		b.at[i] = time.Now()
		for _, what := range order {
			switch what {
			case 't':
				b.truths[i] = s.truthDB.Copy(t)
			case 's':
				b.streams[i] = s.nats.Copy(t)
			case 'p':
				b.projections[i] = s.projectionsDB.Copy(t)
			}
		}
	}
	for _, p := range s.parts {
		p.cancel()
	}
	b.outside = s.others.Copy(t)
	for i, db := range b.truths {
		pool := db.Pool(t, postgres.RoleSystem)
		b.states[i] = states(t, pool)
		pool.Close()
	}
	return b
}

// mix is a restore of truth, streams and projections from three moments; -1 is a loss without a
// backup.
type mix struct {
	name                  string
	truth, stream, others int
	recovered             int  // every write up to this moment is recovered
	unsettled             bool // except settings of threads: no history has them
	early                 int  // number of writes between the restore and the command
	late                  bool // the subscriber's projection starts when the streams are longer than when it stopped
	interrupted           []string
}

func TestARestoreEndsInOneTruth(t *testing.T) {
	restoreEach(t, mix{name: "the truth alone", stream: 2, others: 2, recovered: 2},
		mix{name: "the stream alone", truth: 2, others: 2, recovered: 2})
}

// restoreEach never restores the subscriber's projection, so that is ahead of everything restored.
func restoreEach(t *testing.T, mixes ...mix) {
	b := makeBackups(t)
	for _, c := range mixes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := &site{truthDB: b.truths[c.truth].Copy(t), projectionsDB: b.projections[c.others].Copy(t), others: b.outside.Copy(t)}
			if c.stream < 0 {
				s.nats = testkit.NATSProcess(t)
			} else {
				s.nats = testkit.NATSProcessOf(t, b.streams[c.stream])
			}
			s.open(t)
			s.writeSome(c.early)
			ahead := s.outsideAhead()
			s.run()
			if !c.late {
				s.runOutside()
			}
			oldest := b.at[c.truth]
			for _, i := range []int{c.stream, c.others} {
				if i >= 0 && b.at[i].Before(oldest) {
					oldest = b.at[i]
				}
			}
			since := oldest.Add(-time.Second).UTC().Format(time.RFC3339)
			for _, step := range c.interrupted {
				if code, _, stderr := s.tidingsUntil(step, "restore", "--since", since, "--wait", "3m", "--yes"); code == 0 {
					t.Errorf("interrupted at %q: exit code 0\n%s", step, stderr)
				}
			}
			code, stdout, stderr := s.tidings("restore", "--since", since, "--wait", "3m", "--yes", "--json")
			var report restore.Report
			if err := json.Unmarshal([]byte(stdout), &report); err != nil || code != 0 || !report.Verified.OK {
				t.Fatalf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
			}
			t.Logf("overtaken %d, from histories %d, renewed %v, replayed %v, erased %d", report.Overtaken, report.History, report.Renewed,
				report.Replayed, len(report.Erased))
			if (report.Overtaken > 0) != (c.early > 0) {
				t.Errorf("%d entities overtaken after %d writes", report.Overtaken, c.early)
			}
			s.checkRecovered(b.states[c.recovered], !c.unsettled)
			s.checkEnds()
			if c.late {
				if ahead < 100 {
					t.Errorf("the subscriber's projection is %d messages ahead of the streams", ahead)
				}
				s.writeMore(ahead)
				s.runOutside()
			}
			if c.stream != 2 { // the subscriber's projection is ahead of the streams
				s.checkOutsideStops()
			}
			s.goOn(c.early == 0)
		})
	}
}

func (s *site) writeReview(author, product event.ID) (id string) {
	s.t.Helper()
	out, err := s.store.CreateChildren(s.t.Context(), tenant, kinds.Builtin().Children["review"], []store.NewChild{{
		Meta: store.Meta{Actor: "tester"}, Object: product, AuthorID: author, Body: "text", Attributes: json.RawMessage(`{"rating":4}`)}})
	if err != nil || out[0].Err != nil {
		s.t.Fatal(err, out)
	}
	return out[0].Child.ID
}

func (s *site) deleteReview(id string) {
	s.t.Helper()
	if _, err := s.store.DeleteChildren(s.t.Context(), tenant, kinds.Builtin().Children["review"],
		[]store.ChildDelete{{Meta: store.Meta{Actor: "tester"}, ID: id, IfVersion: store.AnyVersion}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) editReview(id string) {
	s.t.Helper()
	if _, err := s.store.EditChildren(s.t.Context(), tenant, kinds.Builtin().Children["review"],
		[]store.ChildEdit{{Meta: store.Meta{Actor: "tester"}, ID: id, IfVersion: store.AnyVersion, Body: new("edited")}}); err != nil {
		s.t.Fatal(err)
	}
}

// reviewEvents returns the last version of each review on the streams.
func (s *site) reviewEvents() map[string]int64 {
	s.t.Helper()
	streams, err := broker.Streams(s.t.Context(), s.js, s.nats.Config())
	if err != nil {
		s.t.Fatal(err)
	}
	last := make(map[string]int64)
	for _, stream := range streams {
		if _, err := broker.Scan(s.t.Context(), s.js, s.nats.Config(), stream.Number, broker.Scanning{}, func(m *broker.Stored) error {
			if !strings.Contains(m.Subject, ".review.") {
				return nil
			}
			var p struct {
				Review  string `json:"review_id"`
				Version int64  `json:"version"`
			}
			err := json.Unmarshal(m.Data, &p)
			last[p.Review] = p.Version
			return err
		}); err != nil {
			s.t.Fatal(err)
		}
	}
	return last
}

// checkRecovered requires that this truth has the entities of another one in the same state or a
// later one, except those of the erased user.
func (s *site) checkRecovered(then map[string]state, settings bool) {
	s.t.Helper()
	got := states(s.t, s.truth)
	for key, want := range then {
		if now := got[key]; !want.Erased && (settings || !strings.Contains(key, "/thread/")) &&
			(now.Version < want.Version || now.Version == want.Version && now.Content != want.Content) {
			s.t.Errorf("%s is %+v, it was %+v", key, now, want)
		}
	}
}

// checkEnds requires that edges to erased comments are removed or will be.
func (s *site) checkEnds() {
	s.t.Helper()
	var likes, kept int
	if err := s.truth.QueryRow(s.t.Context(), `
		SELECT count(*), count(*) FILTER (WHERE NOT EXISTS (SELECT FROM edge_removals r WHERE r.tenant_id = e.tenant_id
		       AND r.object = 'comment' AND r.object_id = e.to_id AND r.finished_at IS NULL))
		  FROM edges_like_comment e JOIN children_comment c ON c.tenant_id = e.tenant_id AND c.child_id = e.to_id::uuid
		 WHERE e.status = 'ACTIVE' AND c.author_state = 'ERASED'`).Scan(&likes, &kept); err != nil || kept > 0 {
		s.t.Errorf("%d of %d likes of erased comments stay: %v", kept, likes, err)
	}
	s.t.Logf("%d likes of erased comments will be removed", likes)
}

// outsideAhead returns the number of messages that the subscriber's projection has read and its
// stream does not have. A missing stream counts as empty.
func (s *site) outsideAhead() (ahead int64) {
	s.t.Helper()
	streams, err := broker.Streams(s.t.Context(), s.js, s.nats.Config())
	if err != nil {
		s.t.Fatal(err)
	}
	last := make(map[string]int64)
	for _, stream := range streams {
		last[stream.Name] = int64(stream.Last)
	}
	rows, _ := s.outside.Query(s.t.Context(), `SELECT partition_key, last_processed_id FROM consumer_offsets`)
	var name string
	var read int64
	if _, err := pgx.ForEachRow(rows, []any{&name, &read}, func() error { ahead = max(ahead, read-last[name]); return nil }); err != nil {
		s.t.Fatal(err)
	}
	return ahead
}

// writeMore writes until more than n events are published.
func (s *site) writeMore(n int64) {
	s.t.Helper()
	const events = `SELECT coalesce(max(id), 0), count(*) FILTER (WHERE processed_at IS NULL) FROM outbox_messages`
	read := func() (last, pending int64) {
		if err := s.truth.QueryRow(s.t.Context(), events).Scan(&last, &pending); err != nil {
			s.t.Fatal(err)
		}
		return last, pending
	}
	first, _ := read()
	testkit.Eventually(s.t, "more events to be published", func() (bool, error) {
		last, pending := read()
		if last <= first+n {
			s.writeSome(100)
		}
		return last > first+n && pending == 0, nil
	})
}

// checkOutsideStops requires that the subscriber's projection stops, because it has read messages
// that the streams no longer have. Then it stops the projection and begins it again.
func (s *site) checkOutsideStops() {
	s.t.Helper()
	testkit.Eventually(s.t, "the subscriber's projection to report that it is ahead", func() (bool, error) {
		err := s.health.Ready(s.t.Context())
		return err != nil && strings.Contains(err.Error(), "begin the projection again"), nil
	})
	s.stop("outside")
	if err := s.beginAnew(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	s.runOutside()
}

func (s *site) writeSome(n int) {
	s.t.Helper()
	h := &hand{s: s.store, rng: rand.New(rand.NewPCG(9, 9))}
	for range n {
		if err := h.write(s.t.Context()); err != nil {
			s.t.Fatal(err)
		}
	}
}

// goOn writes more, and requires that everything is equal in the end, including the subscriber's
// projection.
func (s *site) goOn(ordered bool) {
	s.t.Helper()
	s.writeSome(100)
	s.arrived()
	code, stdout, stderr := s.tidings("verify", "--json", "--wait", "3m")
	var v verify.Report
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != 0 {
		s.t.Errorf("verify after more writes: exit code %d, %v %v\n%s", code, err, v.Why, stderr)
	}
	want := s.follows(s.truth, `SELECT concat_ws('/', tenant_id, follower_id, followee_id, status = 'ACTIVE'), version FROM follows
		WHERE '2' NOT IN (follower_id, followee_id)`)
	got := s.follows(s.outside, `SELECT concat_ws('/', tenant, from_id, to_id, active), version FROM followed
		WHERE '2' NOT IN (from_id, to_id)`)
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Errorf("the subscriber's follows (-want +got):\n%s", diff)
	}
	s.checkStreams(ordered)
}

// checkStreams reads all streams in order: each event is there once. If ordered (no writes between
// the restore and the command), no version of an entity follows a later one. Otherwise lost
// messages come again at the end, under new ids.
func (s *site) checkStreams(ordered bool) {
	s.t.Helper()
	streams, err := broker.Streams(s.t.Context(), s.js, s.nats.Config())
	if err != nil {
		s.t.Fatal(err)
	}
	latest, ids := make(map[string]int64), make(map[string]bool)
	for _, stream := range streams {
		if _, err := broker.Scan(s.t.Context(), s.js, s.nats.Config(), stream.Number, broker.Scanning{}, func(m *broker.Stored) error {
			id := m.Header.Get(event.HeaderID)
			if ids[id] {
				s.t.Errorf("%s is on the streams twice", id)
			}
			if id != "" {
				ids[id] = true
			}
			var p struct {
				Version int64  `json:"version"`
				Comment string `json:"comment_id"`
				Review  string `json:"review_id"`
				From    string `json:"follower_id"`
				To      string `json:"followee_id"`
			}
			if event.Closes(m.Subject, m.Header) || !strings.Contains(m.Subject, ".follow.") && !strings.Contains(m.Subject, ".comment.") &&
				!strings.Contains(m.Subject, ".review.") {
				return nil
			}
			if err := json.Unmarshal(m.Data, &p); err != nil {
				return err
			}
			of := p.Comment + p.Review + p.From + "/" + p.To
			if ordered && p.Version <= latest[of] {
				s.t.Errorf("version %d of %s follows version %d", p.Version, of, latest[of])
			}
			latest[of] = p.Version
			return nil
		}); err != nil {
			s.t.Fatal(err)
		}
	}
}
