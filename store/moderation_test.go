package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/store"
)

func TestModeration(t *testing.T) {
	t.Parallel()
	f := open(t)
	c := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "words"})
	hidden := f.moderation(t, c.ID, 1, event.ModerationHidden, "spam")
	if !hidden.Changed || hidden.Child.State() != "HIDDEN" || hidden.Child.Version != 2 || hidden.Child.Path != c.Path {
		t.Errorf("hide: %+v", hidden)
	}
	if again := f.moderation(t, c.ID, 2, event.ModerationHidden, "another reason"); again.Err != nil || again.Changed ||
		!cmp.Equal(again.Child, hidden.Child) {
		t.Errorf("hide again: %+v", again)
	}
	var stale *store.StaleError
	if out := f.moderation(t, c.ID, 1, event.ModerationApproved, ""); !errors.As(out.Err, &stale) || stale.Current.Version != 2 {
		t.Errorf("a stale version: %+v", out)
	}
	if out := f.create(t, store.NewChild{Object: "1", AuthorID: "2", Body: "x", ReplyTo: c.ID}); !errors.Is(out.Err, store.ErrParentGone) {
		t.Errorf("a reply to a hidden comment: %+v", out)
	}
	back := f.moderation(t, c.ID, 2, event.ModerationApproved, "")
	if !back.Changed || !back.Child.Visible() || back.Child.Version != 3 || back.Child.Body != "words" {
		t.Errorf("approve: %+v", back)
	}
	f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "2", Body: "reply", ReplyTo: c.ID})
	if out := f.moderation(t, c.ID, store.AnyVersion, event.ModerationRemoved, "law"); !out.Changed || out.Child.State() != "REMOVED" {
		t.Errorf("remove: %+v", out)
	}
	if out := f.delete(t, c.ID, 4); !out.Changed || out.Child.State() != "DELETED" || out.Child.ModerationState != event.ModerationRemoved {
		t.Errorf("its author's deletion: %+v", out)
	}
	var wrong *store.StateError
	for _, state := range []string{event.ModerationApproved, event.ModerationHidden, event.ModerationRemoved} {
		if out := f.moderation(t, c.ID, 5, state, ""); !errors.As(out.Err, &wrong) || wrong.Current.State() != "DELETED" {
			t.Errorf("%s of a deleted comment: %+v", state, out)
		}
	}
	for name, m := range map[string]store.ChildModeration{
		"a state that moderators cannot set": {State: event.ModerationNone},
		"an unknown state":                   {State: "hidden"},
		"a reason too long":                  {State: event.ModerationHidden, Reason: strings.Repeat("é", 501)},
		"a reason with a line break":         {State: event.ModerationHidden, Reason: "a\nb"},
		"a reason that is not UTF-8":         {State: event.ModerationHidden, Reason: "\xff"},
	} {
		if out := f.moderation(t, c.ID, store.AnyVersion, m.State, m.Reason); !errors.Is(out.Err, store.ErrInvalid) {
			t.Errorf("%s: %+v", name, out)
		}
	}
	if out, err := f.ModerateChildren(t.Context(), tenant+1, commentKind,
		[]store.ChildModeration{{Meta: meta(), ID: c.ID, State: event.ModerationHidden}}); err != nil ||
		!errors.Is(out[0].Err, store.ErrNotFound) {
		t.Errorf("another tenant's moderator: %+v, %v", out, err)
	}

	f.set(t, store.ThreadSettings{Object: "2", Premoderated: true})
	waiting := f.mustCreate(t, store.NewChild{Object: "2", AuthorID: "1", Body: "let me in"})
	if out := f.moderation(t, waiting.ID, 1, event.ModerationApproved, ""); !out.Changed || !out.Child.Visible() {
		t.Errorf("approve a waiting comment: %+v", out)
	}
	if out := f.moderation(t, waiting.ID, 2, event.ModerationPending, "a rule reports it"); !out.Changed ||
		out.Child.State() != "PENDING" || out.Child.Body != "let me in" {
		t.Errorf("report a visible comment: %+v", out)
	}

	var got []string
	for _, e := range f.events(t) {
		if e.Type == event.Moderated {
			got = append(got, fmt.Sprint(e.AggregateID, " v", e.Payload["version"], " ", e.Payload["moderation_state"], " ",
				e.Payload["actor"], " ", e.Payload["reason"], " ", e.Payload["body"]))
		}
	}
	want := []string{
		"1 v2 HIDDEN tester spam ", "1 v3 APPROVED tester <nil> words", "1 v4 REMOVED tester law ", "2 v2 APPROVED tester <nil> let me in",
		"2 v3 PENDING tester a rule reports it let me in",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func version(v int64) *int64 { return &v }

func TestThreadSettings(t *testing.T) {
	t.Parallel()
	f := open(t)
	unset := event.Thread{PostID: "1"}
	if got, err := f.GetThread(t.Context(), tenant, commentKind, "1"); err != nil || got != unset {
		t.Errorf("never set: %+v, %v", got, err)
	}
	if out := f.set(t, store.ThreadSettings{Object: "1", IfVersion: version(0), Title: " "}); out.Err != nil ||
		out.Changed || out.Thread != unset {
		t.Errorf("the defaults: %+v", out)
	}
	first := f.set(t, store.ThreadSettings{Object: "1", IfVersion: version(0), Title: " Rules 👩‍👧 ", Premoderated: true})
	if !first.Changed || first.Thread.Version != 1 || first.Thread.Title != "Rules 👩‍👧" || !first.Thread.Premoderate ||
		first.Thread.Locked || first.Thread.UpdatedAt.IsZero() {
		t.Errorf("set: %+v", first)
	}
	if got, err := f.GetThread(t.Context(), tenant, commentKind, "1"); err != nil || !cmp.Equal(got, first.Thread) {
		t.Errorf("get: %+v, %v", got, err)
	}
	if out := f.set(t, store.ThreadSettings{Object: "1", IfVersion: version(1), Title: "Rules 👩‍👧",
		Premoderated: true}); out.Err != nil || out.Changed || !cmp.Equal(out.Thread, first.Thread) {
		t.Errorf("unchanged: %+v", out)
	}
	for _, v := range []int64{0, 2, -1} {
		var stale *store.StaleThreadError
		if out := f.set(t, store.ThreadSettings{Object: "1", IfVersion: version(v), Locked: true}); !errors.As(out.Err, &stale) ||
			!cmp.Equal(stale.Current, first.Thread) {
			t.Errorf("stale version %d: %+v", v, out)
		}
	}
	// A slice: one thread twice, one refused setting, and one thread of its own.
	out, err := f.SetThreads(t.Context(), tenant, commentKind, []store.ThreadSettings{
		{Meta: meta(), Object: "1", IfVersion: version(1), Locked: true}, {Meta: meta(), Object: "2"},
		{Meta: meta(), Object: "3", Title: "a\x00"},
		{Meta: meta(), Object: "1", IfVersion: version(2)}, {Meta: meta(), Object: "4", Locked: true}, {Object: "5"},
		{Meta: meta(), Object: ""},
		{Meta: meta(), Object: "6", Title: strings.Repeat("x", store.MaxTitleBytes+1)},
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, o := range out {
		got = append(got, fmt.Sprintf("%t v%d %t %q %t", o.Changed, o.Thread.Version, o.Thread.Locked, o.Thread.Title,
			errors.Is(o.Err, store.ErrInvalid)))
	}
	want := []string{`true v2 true "" false`, `false v0 false "" false`, `false v0 false "" true`, `true v3 false "" false`,
		`true v1 true "" false`, `false v0 false "" true`, `false v0 false "" true`, `false v0 false "" true`}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("a slice (-want +got):\n%s", diff)
	}
	if theirs, err := f.GetThread(t.Context(), tenant+1, commentKind, "1"); err != nil || theirs.Version != 0 {
		t.Errorf("another tenant's: %+v, %v", theirs, err)
	}

	got = nil
	for _, e := range f.events(t) {
		got = append(got, fmt.Sprint(e.Aggregate, " ", e.AggregateID, " ", e.Type, " v", e.Payload["version"], " ", e.Payload["locked"],
			" ", e.Payload["actor"]))
	}
	want = []string{"thread 1 updated v1 false tester", "thread 1 updated v2 true tester", "thread 4 updated v1 true tester",
		"thread 1 updated v3 false tester"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	rows, _ := f.system.Query(t.Context(), `SELECT concat_ws(' ', object->>'version', version_state, metadata->>'created_by') FROM threads
		WHERE post_id = '1' ORDER BY version_id`)
	kept, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if diff := cmp.Diff([]string{"1 ARCHIVED tester", "2 ARCHIVED tester", "3 LATEST tester"}, kept); err != nil || diff != "" {
		t.Errorf("history (-want +got): %v\n%s", err, diff)
	}
}

func TestALockedThreadTakesNoMoreCommentsAndItsCommentsStayTheirAuthors(t *testing.T) {
	t.Parallel()
	f := open(t)
	a := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "a", Key: "k"})
	f.set(t, store.ThreadSettings{Object: "1", Locked: true})
	if out := f.create(t, store.NewChild{Object: "1", AuthorID: "1", Body: "b", ReplyTo: a.ID}); !errors.Is(out.Err,
		store.ErrThreadLocked) {
		t.Errorf("a reply: %+v", out)
	}
	if out := f.create(t, store.NewChild{Object: "1", AuthorID: "1", Body: "a", Key: "k"}); !out.Replayed || out.Child.ID != a.ID {
		t.Errorf("a replay: %+v", out)
	}
	if out := f.edit(t, a.ID, 1, "b"); !out.Changed {
		t.Errorf("an edit: %+v", out)
	}
	if out := f.moderation(t, a.ID, 2, event.ModerationHidden, ""); !out.Changed {
		t.Errorf("a moderation: %+v", out)
	}
	if out := f.delete(t, a.ID, 3); !out.Changed {
		t.Errorf("a deletion: %+v", out)
	}
	f.set(t, store.ThreadSettings{Object: "1"})
	f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "c"})
}

func TestConcurrentSettingsOfOneVersionChangeItOnce(t *testing.T) {
	t.Parallel()
	f := open(t)
	const writers, rounds = 8, 5
	for v := range int64(rounds) {
		var changed atomic.Int64
		var wg sync.WaitGroup
		for i := range writers {
			wg.Go(func() {
				out, err := f.SetThreads(t.Context(), tenant, commentKind,
					[]store.ThreadSettings{{Meta: meta(), Object: "1", IfVersion: version(v), Title: fmt.Sprint(v, " by ", i)}})
				var stale *store.StaleThreadError
				switch {
				case err != nil:
					t.Error(err)
				case out[0].Changed:
					changed.Add(1)
				case !errors.As(out[0].Err, &stale) || stale.Current.Version != v+1:
					t.Errorf("got %+v, want a stale version", out[0])
				}
			})
		}
		wg.Wait()
		if changed.Load() != 1 {
			t.Errorf("%d writers changed version %d", v, changed.Load())
		}
	}
	f.checkVersions(t)
}

// checkVersions checks that the events of each entity are in the order of its version, which rises
// by one, and that the last version equals the truth's.
func (f fixture) checkVersions(t *testing.T) {
	t.Helper()
	rows, _ := f.system.Query(t.Context(), `
		WITH events AS (
		  SELECT coalesce(payload->>'comment_id', 'thread ' || (payload->>'post_id')) AS entity, (payload->>'version')::bigint AS version,
		         row_number() OVER (PARTITION BY tenant_id, coalesce(payload->>'comment_id', 'thread ' || (payload->>'post_id'))
		         ORDER BY id) AS place
		    FROM outbox_messages
		), truth AS (
		  SELECT comment_id::text AS entity, version FROM all_comments
		  UNION ALL SELECT 'thread ' || post_id, (object->>'version')::bigint FROM threads WHERE version_state = 'LATEST'
		)
		SELECT entity || ': version ' || version || ' at place ' || place FROM events WHERE version <> place
		UNION ALL
		SELECT entity || ': the last event is ' || coalesce(e.last::text, 'none') || ', the truth ' || coalesce(t.version::text, 'none')
		  FROM (SELECT entity, max(version) AS last FROM events GROUP BY entity) e FULL JOIN truth t USING (entity)
		 WHERE e.last IS DISTINCT FROM t.version`)
	wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range wrong {
		t.Errorf("%s", w)
	}
}

func TestConcurrentChangesOfOneCommentMakeOneEventEach(t *testing.T) {
	t.Parallel()
	f := open(t)
	for range 5 {
		c := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "start"})
		var changes atomic.Int64
		var wg sync.WaitGroup
		for i := range 6 {
			for name, write := range map[string]func() ([]store.ChildOutcome, error){
				"edit": func() ([]store.ChildOutcome, error) {
					return f.EditChildren(t.Context(), tenant, commentKind,
						[]store.ChildEdit{{Meta: meta(), ID: c.ID, Body: new(fmt.Sprint("edit ", i))}})
				},
				"moderate": func() ([]store.ChildOutcome, error) {
					state := []string{event.ModerationApproved, event.ModerationHidden, event.ModerationRemoved}[i%3]
					return f.ModerateChildren(t.Context(), tenant, commentKind,
						[]store.ChildModeration{{Meta: meta(), ID: c.ID, State: state}})
				},
				"delete": func() ([]store.ChildOutcome, error) {
					if i < 5 {
						return nil, nil
					}
					return f.DeleteChildren(t.Context(), tenant, commentKind, []store.ChildDelete{{Meta: meta(), ID: c.ID}})
				},
			} {
				wg.Go(func() {
					out, err := write()
					var state *store.StateError
					for _, o := range out {
						if o.Changed {
							changes.Add(1)
						} else if o.Err != nil && !errors.As(o.Err, &state) {
							t.Errorf("%s: %v", name, o.Err)
						}
					}
					if err != nil {
						t.Errorf("%s: %v", name, err)
					}
				})
			}
		}
		wg.Wait()
		got, err := f.GetChild(t.Context(), tenant, commentKind, c.ID)
		if err != nil || got.Version != 1+changes.Load() || got.State() != "DELETED" {
			t.Errorf("after %d changes: %+v, %v", changes.Load(), got, err)
		}
	}
	f.checkVersions(t)
}

// tripCount counts the round trips of a connection: each is one Write. Reads do not count, because
// pgx begins one early, in the background, if a Write takes long.
type tripCount struct {
	net.Conn
	trips *atomic.Int64
}

func (c *tripCount) Write(b []byte) (int, error) {
	c.trips.Add(1)
	return c.Conn.Write(b)
}

// through returns a store with conns connections, each wrapped by wrap.
func through(t *testing.T, db *testkit.DB, conns int32, wrap func(net.Conn) net.Conn) *store.Store {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = conns
	cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false } // one after a pause is a round trip
	cfg.ConnConfig.RuntimeParams["role"] = string(postgres.RoleAPI)
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return wrap(conn), nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return store.New(pool, nil)
}

func TestRoundTripsOfSingleWrites(t *testing.T) {
	t.Parallel()
	var trips atomic.Int64
	s := through(t, testkit.Postgres(t), 1, func(conn net.Conn) net.Conn { return &tripCount{Conn: conn, trips: &trips} })
	var c event.Child
	for round := range int64(2) { // the first round prepares the statements
		for _, w := range []struct {
			name  string
			want  int64
			write func() error
		}{
			{"follow: write, append and commit", 3, func() error {
				_, err := s.PutEdges(t.Context(), tenant, follows, []store.EdgeWrite{{Meta: meta(), From: event.IDOf(1 + round), To: "9"}})
				return err
			}},
			{"create: take the key and write, append and commit", 3, func() error {
				out, err := s.CreateChildren(t.Context(), tenant, commentKind,
					[]store.NewChild{{Meta: meta(), Object: "1", AuthorID: "1", Body: "a", Key: fmt.Sprint(round)}})
				c = out[0].Child
				return err
			}},
			{"get: read and commit", 2, func() error {
				_, err := s.GetChild(t.Context(), tenant, commentKind, c.ID)
				return err
			}},
			{"edit", 3, func() error {
				_, err := s.EditChildren(t.Context(), tenant, commentKind,
					[]store.ChildEdit{{Meta: meta(), ID: c.ID, IfVersion: 1, Body: new("b")}})
				return err
			}},
			{"delete", 3, func() error {
				_, err := s.DeleteChildren(t.Context(), tenant, commentKind, []store.ChildDelete{{Meta: meta(), ID: c.ID, IfVersion: 2}})
				return err
			}},
		} {
			trips.Store(0)
			if err := w.write(); err != nil {
				t.Fatal(err)
			}
			if got := trips.Load(); round > 0 && got != w.want {
				t.Errorf("%s: %d round trips, want %d", w.name, got, w.want)
			}
		}
	}
}

// loseCommit is a connection that, once armed, ends when the answer to a COMMIT arrives. The server
// has committed, but the client does not know.
type loseCommit struct {
	net.Conn
	armed *atomic.Bool
}

func (c *loseCommit) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if bytes.Contains(b[:n], []byte("COMMIT\x00")) && c.armed.CompareAndSwap(true, false) {
		return 0, errors.Join(io.ErrUnexpectedEOF, c.Conn.Close())
	}
	return n, err
}

func TestAWriteWhoseCommitGotNoAnswerIsFoundOutAndSafeToRepeat(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	f := on(t, db)
	var armed atomic.Bool
	s := through(t, db, 1, func(conn net.Conn) net.Conn { return &loseCommit{Conn: conn, armed: &armed} })
	c := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "a"})

	var stale *store.StaleError
	moderate := func() ([]store.ChildOutcome, error) {
		return s.ModerateChildren(t.Context(), tenant, commentKind,
			[]store.ChildModeration{{Meta: meta(), ID: c.ID, IfVersion: 1, State: event.ModerationHidden}})
	}
	armed.Store(true)
	if out, err := moderate(); err != nil || !out[0].Changed || armed.Load() {
		t.Errorf("moderate: %+v, %v: want the committed state", out, err)
	}
	if out, err := moderate(); err != nil || !errors.As(out[0].Err, &stale) || stale.Current.State() != "HIDDEN" {
		t.Errorf("moderate again: %+v, %v: want the version of the first write", out, err)
	}
	var staleThread *store.StaleThreadError
	set := func() ([]store.ThreadOutcome, error) {
		return s.SetThreads(t.Context(), tenant, commentKind,
			[]store.ThreadSettings{{Meta: meta(), Object: "1", IfVersion: version(0), Locked: true}})
	}
	armed.Store(true)
	if out, err := set(); err != nil || !out[0].Changed || armed.Load() {
		t.Errorf("set: %+v, %v: want the committed state", out, err)
	}
	if out, err := set(); err != nil || !errors.As(out[0].Err, &staleThread) || !staleThread.Current.Locked {
		t.Errorf("set again: %+v, %v: want the version of the first write", out, err)
	}
	f.checkVersions(t)
	if n := len(f.events(t)); n != 3 {
		t.Errorf("%d events, want 3", n)
	}
}

// TestAnySeriesOfWritesEqualsTheModel compares the outcomes of random writes on few comments and
// threads with a model in plain Go.
func TestAnySeriesOfWritesEqualsTheModel(t *testing.T) {
	t.Parallel()
	f := open(t)
	post := int64(0)
	rapid.Check(t, func(r *rapid.T) {
		post++
		type model struct {
			id, body, author, moderation string
			version                      int64
		}
		var comments []*model
		var thread store.ThreadSettings
		var threadVersion int64
		ctx := context.Background()
		r.Repeat(map[string]func(*rapid.T){
			"create": func(r *rapid.T) {
				in := store.NewChild{Meta: meta(), Object: event.IDOf(post), AuthorID: "1", Body: "a"}
				var want error
				if n := len(comments); n > 0 && rapid.Bool().Draw(r, "reply") {
					p := comments[rapid.IntRange(0, n-1).Draw(r, "parent")]
					in.ReplyTo = p.id
					if !event.Visible(p.author, p.moderation) {
						want = store.ErrParentGone
					}
				}
				if thread.Locked {
					want = store.ErrThreadLocked
				}
				out, err := f.CreateChildren(ctx, tenant, commentKind, []store.NewChild{in})
				if err != nil || !errors.Is(out[0].Err, want) {
					r.Fatalf("create: %+v, %v: want %v", out, err, want)
				}
				if want == nil {
					m := &model{out[0].Child.ID, "a", event.AuthorActive, event.ModerationNone, 1}
					if thread.Premoderated {
						m.moderation = event.ModerationPending
					}
					comments = append(comments, m)
				}
			},
			"change": func(r *rapid.T) {
				if len(comments) == 0 {
					r.Skip("no comment")
				}
				m := comments[rapid.IntRange(0, len(comments)-1).Draw(r, "comment")]
				next := *m
				at := m.version - int64(rapid.IntRange(0, 3).Draw(r, "stale")/3)
				var out []store.ChildOutcome
				var err error
				allowed := m.author == event.AuthorActive
				switch what := rapid.SampledFrom([]string{"edit", "delete", event.ModerationApproved, event.ModerationHidden,
					event.ModerationRemoved}).Draw(r, "what"); what {
				case "edit":
					allowed = allowed && m.moderation != event.ModerationHidden && m.moderation != event.ModerationRemoved
					next.body = rapid.SampledFrom([]string{"a", "b"}).Draw(r, "body")
					out, err = f.EditChildren(ctx, tenant, commentKind,
						[]store.ChildEdit{{Meta: meta(), ID: m.id, IfVersion: at, Body: new(next.body)}})
				case "delete":
					next.author = event.AuthorDeleted
					out, err = f.DeleteChildren(ctx, tenant, commentKind, []store.ChildDelete{{Meta: meta(), ID: m.id, IfVersion: at}})
				default:
					next.moderation = what
					out, err = f.ModerateChildren(ctx, tenant, commentKind,
						[]store.ChildModeration{{Meta: meta(), ID: m.id, IfVersion: at, State: what}})
				}
				if err != nil {
					r.Fatal(err)
				}
				var stale *store.StaleError
				var state *store.StateError
				changed := next != *m
				switch {
				case at != 0 && at != m.version:
					if !errors.As(out[0].Err, &stale) {
						r.Fatalf("got %+v, want a stale version", out[0])
					}
					return
				case !allowed:
					if !errors.As(out[0].Err, &state) {
						r.Fatalf("got %+v, want a wrong state", out[0])
					}
					return
				case changed:
					next.version++
					*m = next
				}
				c := out[0].Child
				if got := (model{c.ID, c.Body, c.AuthorState, c.ModerationState, c.Version}); out[0].Err != nil ||
					out[0].Changed != changed || got != *m {
					r.Fatalf("got %+v, want %+v, changed %t", out[0], *m, changed)
				}
			},
			"set": func(r *rapid.T) {
				next := store.ThreadSettings{Meta: meta(), Object: event.IDOf(post), Locked: rapid.IntRange(0, 3).Draw(r, "lock") == 0,
					Premoderated: rapid.Bool().Draw(r, "premoderate")}
				changed := next.Locked != thread.Locked || next.Premoderated != thread.Premoderated
				next.IfVersion = version(threadVersion)
				out, err := f.SetThreads(ctx, tenant, commentKind, []store.ThreadSettings{next})
				if changed {
					threadVersion++
				}
				thread = next
				if err != nil || out[0].Err != nil || out[0].Changed != changed || out[0].Thread.Version != threadVersion {
					r.Fatalf("set: %+v, %v: want version %d, changed %t", out, err, threadVersion, changed)
				}
			},
		})
	})
	f.checkVersions(t)
}
