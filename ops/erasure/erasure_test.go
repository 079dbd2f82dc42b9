package erasure

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	"github.com/tidings/tidings/ops/replay"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, sql := range map[string]string{"begin": beginSQL, "save": saveSQL} {
		t.Run(name, func(t *testing.T) { testkit.Prepare(t, pool, sql) })
	}
}

var commentKind = kinds.Builtin().Children["comment"]

const tenant = 1

// world is the whole path of an event. The truth and the projections have databases of their own.
type world struct {
	t                  *testing.T
	truthDB, projDB    *testkit.DB
	truth, projections *pgxpool.Pool
	nats               *testkit.Broker
	js                 jetstream.JetStream
	store              *store.Store
	coldDir            string
	cold               *coldstore.Store
	fleet              []projections.Projection
	author             event.ID
	secret             string // in each text of the author, and nowhere else
}

func noFence(context.Context, pgx.Tx) error { return nil }

func newWorld(t *testing.T) *world {
	w := &world{t: t, truthDB: testkit.Postgres(t), projDB: testkit.Postgres(t), nats: testkit.NATS(t), coldDir: t.TempDir(),
		fleet: both(), author: "7", secret: rand.Text()}
	w.truth, w.projections = w.truthDB.Pool(t, postgres.RoleSystem), w.projDB.Pool(t, postgres.RoleSystem)
	w.cold = coldstore.New(w.truth, "file://"+w.coldDir, noFence, nil, nil)
	t.Cleanup(func() {
		if err := w.cold.Close(); err != nil {
			t.Error(err)
		}
	})
	w.store = store.New(w.truthDB.Pool(t, postgres.RoleAPI), nil)
	w.js = system.Streams(t, w.nats)
	return w
}

func (w *world) exec(pool *pgxpool.Pool, sql string, args ...any) int64 {
	w.t.Helper()
	tag, err := pool.Exec(w.t.Context(), sql, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	return tag.RowsAffected()
}

func (w *world) relay() (stop func()) {
	return system.Start(w.t, system.Relay(w.t, system.RelayConfig(), w.truth, w.nats.Config()).Run)
}

func both() []projections.Projection {
	return []projections.Projection{threadcache.New(kinds.Builtin), history.New(kinds.Builtin)}
}

// consume runs the consumers of comments on one database of projections.
func (w *world) consume(pool *pgxpool.Pool) (stop func()) {
	var stops []func()
	for _, p := range w.fleet {
		c := system.Consumer(w.t, system.ConsumerConfig(), consumers.Deps{Pool: pool, JetStream: w.js}, w.nats.Config(), p)
		stops = append(stops, system.Start(w.t, c.Run))
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// settle waits until every event is published and applied.
func (w *world) settle(pool *pgxpool.Pool) {
	w.t.Helper()
	system.AwaitPublished(w.t, w.truth)
	var names []string
	for _, p := range w.fleet {
		names = append(names, p.Name())
	}
	system.AwaitApplied(w.t, pool, w.js, w.nats.Config(), names...)
}

// child writes a child of another kind.
func (w *world) child(kind string, object event.ID, body, attributes string) event.Child {
	w.t.Helper()
	c := store.NewChild{Meta: store.Meta{Actor: "ann"}, Object: object, AuthorID: w.author, Key: "key", Body: body}
	if attributes != "" {
		c.Attributes = []byte(attributes)
	}
	out, err := w.store.CreateChildren(w.t.Context(), tenant, kinds.Builtin().Children[kind], []store.NewChild{c})
	if err != nil || out[0].Err != nil {
		w.t.Fatal(err, out)
	}
	return out[0].Child
}

func (w *world) comment(tenant int64, author, post event.ID, parent, key, body string) event.Child {
	w.t.Helper()
	out, err := w.store.CreateChildren(w.t.Context(), tenant, commentKind,
		[]store.NewChild{{Meta: store.Meta{Actor: "ann"}, Object: post, AuthorID: author, ReplyTo: parent, Key: key, Body: body}})
	if err != nil || out[0].Err != nil {
		w.t.Fatal(err, out)
	}
	return out[0].Child
}

func (w *world) edit(c event.Child, body string) {
	w.t.Helper()
	out, err := w.store.EditChildren(w.t.Context(), tenant, commentKind,
		[]store.ChildEdit{{Meta: store.Meta{Actor: "ann"}, ID: c.ID, Body: new(body)}})
	if err != nil || out[0].Err != nil {
		w.t.Fatal(err, out)
	}
}

// holding returns the tables of a database that hold the text in any row, as text or as bytes. It
// lists the tables from the database's catalog, so it searches new tables too.
func holding(t *testing.T, db *testkit.DB, text string) (found []string) {
	t.Helper()
	pool := db.Pool(t, postgres.RoleOwner)
	rows, _ := pool.Query(t.Context(), `
		SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		 WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') ORDER BY 1`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(tables) < 20 {
		t.Fatal(tables, err)
	}
	for _, table := range tables {
		var holds bool
		if err := pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM `+table+
			` AS r WHERE r::text LIKE '%' || $1 || '%' OR r::text LIKE '%' || $2 || '%')`,
			text, hex.EncodeToString([]byte(text))).Scan(&holds); err != nil {
			t.Fatal(table, err)
		}
		if holds {
			found = append(found, strings.TrimPrefix(table, "public."))
		}
	}
	return found
}

// filesHolding returns the stream's files that contain the text.
func (w *world) filesHolding(text string) (found []string) {
	w.t.Helper()
	if w.nats.Dir() == "" {
		w.t.Log("the files of the stream are on another machine")
		return nil
	}
	return filesHolding(w.t, w.nats.Dir(), text)
}

// filesHolding returns the files below a directory that contain the text, compressed or not.
func filesHolding(t *testing.T, dir, text string) (found []string) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if err == nil && strings.HasSuffix(path, ".gz") {
			var r io.Reader
			if r, err = gzip.NewReader(bytes.NewReader(b)); err == nil {
				b, err = io.ReadAll(r)
			}
		}
		if bytes.Contains(b, []byte(text)) {
			found = append(found, filepath.Base(path))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

// gone fails the test if the author's text is anywhere.
func (w *world) gone(when string) {
	w.t.Helper()
	if found := slices.Concat(holding(w.t, w.truthDB, w.secret), holding(w.t, w.projDB, w.secret), w.filesHolding(w.secret),
		filesHolding(w.t, w.coldDir, w.secret)); len(found) > 0 {
		w.t.Errorf("%s the text is in %v", when, found)
	}
}

// equal compares the projections with the truth, and the stream with the outbox.
func (w *world) equal(when string, pool *pgxpool.Pool) {
	w.t.Helper()
	for _, p := range w.fleet {
		if _, err := p.Verify(w.t.Context(), w.truth, pool, func(d projections.Difference) { w.t.Errorf("%s: %s", when, d) }); err != nil {
			w.t.Error(err)
		}
	}
	streams, err := broker.Streams(w.t.Context(), w.js, w.nats.Config())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, s := range streams {
		messages := s.Messages
		if final, err := broker.Closed(w.t.Context(), w.js, w.nats.Config(), s); err != nil {
			w.t.Fatal(err)
		} else if final > 0 {
			messages--
		}
		rows, distinct, err := outbox.CountPublished(w.t.Context(), w.truth, s.Number, s.First)
		if err != nil || rows != distinct || uint64(rows) != messages {
			w.t.Errorf("%s stream %s has %d messages, but %d rows have %d sequences, %v", when, s.Name, messages, rows, distinct, err)
		}
	}
}

// newest returns the stream of the newest partition.
func (w *world) newest() string {
	w.t.Helper()
	streams, err := broker.Streams(w.t.Context(), w.js, w.nats.Config())
	if err != nil || len(streams) == 0 {
		w.t.Fatal(streams, err)
	}
	return streams[len(streams)-1].Name
}

// redactCold is the command's Deps.Cold.
func (w *world) redactCold(ctx context.Context, c ColdRequest) (ColdReport, error) {
	var failed error
	redact := func(row *coldstore.Row) bool {
		payload, off, err := c.Redact(row.AggregateType, row.EventType, row.Payload)
		if failed = errors.Join(failed, err); payload == nil {
			return false
		}
		if row.Payload = payload; off {
			row.StreamSeq = nil
		}
		return true
	}
	do := w.cold.Redact
	if c.DryRun {
		do = w.cold.PreviewRedaction
	}
	r, err := do(ctx, c.TenantID, c.Person, redact)
	return ColdReport{r.Rows, r.Remains, r.Unread}, errors.Join(err, failed)
}

func (w *world) deps() Deps {
	return Deps{Truth: w.truth, Projections: w.projections, Kinds: kinds.Builtin(), Fleet: w.fleet, JetStream: w.js,
		Broker: w.nats.Config(), Cold: w.redactCold, Fence: noFence}
}

func (w *world) erase(o Options) (Report, error) {
	o.TenantID, o.AuthorID, o.Actor = tenant, w.author, "officer"
	return Run(w.t.Context(), w.deps(), o)
}

// user is the author as an actor.
func (w *world) user() string { return "user:" + string(w.author) }

var errKilled = errors.New("killed")

// acts makes the author act on others' entities: moderate a comment, set a thread, and request a
// removal of others' edges.
func (w *world) acts(other event.Child) {
	w.t.Helper()
	ctx, by := w.t.Context(), store.Meta{Actor: w.user()}
	moderated, err := w.store.ModerateChildren(ctx, tenant, commentKind,
		[]store.ChildModeration{{Meta: by, ID: other.ID, State: event.ModerationApproved}})
	if err != nil || moderated[0].Err != nil {
		w.t.Fatal(moderated, err)
	}
	set, err := w.store.SetThreads(ctx, tenant, commentKind, []store.ThreadSettings{{Meta: by, Object: "10", Title: "title"}})
	if err != nil || set[0].Err != nil {
		w.t.Fatal(set, err)
	}
	w.putBy("follow", by.Actor, [2]event.ID{"20", "21"})
	w.putBy("follow", by.Actor+"7", [2]event.ID{"20", "22"})
	w.exec(w.truth, `INSERT INTO edge_removals (tenant_id, object, object_id, kinds, direction, actor, finished_at)
		VALUES (1, 'user', 30, '{follow}', 'both', $1, now())`, by.Actor)
}

// An unreadable file delays only erasures of people whose data it may hold. For these, everything
// else is erased.
func TestADamagedFileIsNamedAndEverythingElseIsErased(t *testing.T) {
	w := newWorld(t)
	w.relay()
	w.consume(w.projections)
	w.comment(tenant, w.author, "10", "", "", w.secret)
	w.settle(w.projections)
	w.archive("outbox_messages_archive", "m.aggregate_id = '10'")
	e, err := w.cold.Export(t.Context(), outbox.Range{From: 1, To: 50_000_001, FirstAt: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(w.coldDir, time.Now().UTC().Format("2006-01"), e.ID)
	file := filepath.Join(dir, "00001.ndjson.gz")
	sound, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append([]byte("damaged "), sound...), 0o600); err != nil {
		t.Fatal(err)
	}
	another := Options{TenantID: tenant, AuthorID: "99", Actor: "officer", Wait: time.Minute} // an author without children
	report, err := Run(t.Context(), w.deps(), another)
	if err != nil || !report.Done {
		t.Errorf("another person: %+v, %v", report, err)
	}
	report, err = w.erase(Options{Wait: time.Minute})
	if !errors.Is(err, ErrUnfinished) || report.Done || report.FinishedAt != nil || len(report.Unread) != 1 ||
		!strings.Contains(report.Unread[0], e.ID+"/00001.ndjson.gz: ") || !strings.Contains(err.Error(), report.Unread[0]) {
		t.Errorf("the author: %+v, %v", report, err)
	}
	if found := slices.Concat(holding(t, w.truthDB, w.secret), holding(t, w.projDB, w.secret), w.filesHolding(w.secret)); len(found) > 0 {
		t.Errorf("the text is in %v", found)
	}
	if err := os.WriteFile(file, sound, 0o600); err != nil { // restored from a copy
		t.Fatal(err)
	}
	if report, err = w.erase(Options{Wait: time.Minute}); err != nil || !report.Done || len(report.Unread) > 0 ||
		report.Counts[Cold] == 0 {
		t.Errorf("with the restored file: %+v, %v", report, err)
	}
	w.gone("after the file was put back")
}

func TestNothingOfAnErasedAuthorIsLeftAnywhere(t *testing.T) {
	w := newWorld(t)
	w.author = "7b0c2f52-5f0e-4d3a-9a51-6c1d7a3e9f10"
	ctx := t.Context()
	secret := func(what string) string { return what + " " + w.secret }
	stopRelay := w.relay()
	stopConsumers := w.consume(w.projections)

	// The first messages of the stream are the author's.
	root := w.comment(tenant, w.author, "10", "", "key", secret("first"))
	w.edit(root, secret("second"))
	other := w.comment(tenant, "8", "10", root.ID, "", "another author's reply")
	deleted := w.comment(tenant, w.author, "10", other.ID, "", secret("deleted"))
	if out, err := w.store.DeleteChildren(ctx, tenant, commentKind,
		[]store.ChildDelete{{Meta: store.Meta{Actor: "ann"}, ID: deleted.ID}}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	hidden := w.comment(tenant, w.author, "11", "", "", secret("hidden"))
	if out, err := w.store.ModerateChildren(ctx, tenant, commentKind,
		[]store.ChildModeration{{Meta: store.Meta{Actor: "mod"}, ID: hidden.ID, State: event.ModerationHidden,
			Reason: secret("it says")}}); err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	w.acts(other)
	w.child("review", "10", secret("review"), `{"rating":4}`)
	w.child("message", "10", secret("message"), "")
	elsewhere := w.comment(2, w.author, "10", "", "", "the same number in another tenant")
	w.settle(w.projections)
	// A poison event of a post. The later events of the post are parked.
	parked := w.comment(tenant, w.author, "50", "", "", secret("parked"))
	w.exec(w.truth, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload)
		VALUES (1, 'comment', 50, 'edited', 9, jsonb_build_object('comment_id', $1::text, 'post_id', '50', 'author_id', $3::text, 'text',
		$2::text, 'version', 1))`, parked.ID, secret("poison"), w.author)
	w.edit(parked, secret("parked too"))
	w.settle(w.projections)
	// Archived rows, and rows of a dropped range that a hold keeps.
	w.archive("outbox_messages_archive", "m.aggregate_id = '11'", "m.event_type = 'deleted'", "m.aggregate_type = 'follow'")
	w.archive("outbox_messages_kept", "m.id = 1")
	month, archived := time.Now().UTC(), outbox.Range{From: 1, To: 50_000_001, FirstAt: time.Now()}
	month = time.Date(month.Year(), month.Month(), 1, 0, 0, 0, 0, time.UTC)
	if e, err := w.cold.Export(ctx, archived); err != nil || e.Rows == 0 || len(filesHolding(t, w.coldDir, w.secret)) == 0 {
		t.Fatalf("%+v, %v", e, err)
	}
	// Messages in the DLQ, and messages that wait for a relay.
	stopRelay()
	w.comment(tenant, w.author, "12", "", "", secret("dead"))
	w.exec(w.truth, `WITH gone AS (DELETE FROM outbox_messages WHERE aggregate_id = '12' RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, trace_id, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, trace_id,
		event_id, inserted_at, slot FROM gone`)
	w.comment(tenant, w.author, "13", "", "", secret("pending"))
	alone := w.comment(tenant, "8", "13", "", "", "another author's, pending")
	// A shelved thread.
	w.exec(w.truth, `WITH gone AS (DELETE FROM children_comment WHERE object_id = '11' RETURNING *) INSERT INTO children_archive_comment
		SELECT * FROM gone`)
	w.exec(w.truth, `INSERT INTO archived_threads (tenant_id, kind, object_id, archive_id, state, children)
		VALUES (1, 'comment', 11, 1, 'ARCHIVED', 1)`)

	// Every one of these tables has the text, so the erasure must reach each.
	if diff := cmp.Diff([]string{"children_archive_comment", "children_comment", "children_message", "children_review", "outbox_messages_1",
		"outbox_messages_archived", "outbox_messages_dlq", "outbox_messages_kept"}, holding(t, w.truthDB, w.secret)); diff != "" {
		t.Fatalf("before, in the truth (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"child_lists", "comment_history", "consumer_dead_letters", "message_history", "review_history"},
		holding(t, w.projDB, w.secret)); diff != "" {
		t.Fatalf("before, in the projections (-want +got):\n%s", diff)
	}
	if w.nats.Dir() != "" && len(w.filesHolding(w.secret)) == 0 {
		t.Fatal("before, no file of the stream has the text")
	}
	dry, err := w.erase(Options{DryRun: true})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]int{Children: 8, Acts: 2, Keys: 3, Outbox: 10, DLQ: 1, Archive: 5, DeadLetters: 4, history.Name: 10,
		threadcache.Name: 4, Stream: 11, Cold: 4}, dry.Counts); diff != "" {
		t.Errorf("a dry run (-want +got):\n%s", diff)
	}

	// It is killed once at each step and resumes. While nothing is published it waits and reports
	// for what.
	died := map[string]bool{}
	dying := func(wait time.Duration) (report Report, err error) {
		t.Helper()
		for err = errKilled; errors.Is(err, errKilled); {
			report, err = w.erase(Options{Wait: wait, at: func(step string) error {
				if died[step] {
					return nil
				}
				died[step] = true
				return errKilled
			}})
		}
		return report, err
	}
	report, err := dying(0)
	if !errors.Is(err, ErrUnfinished) || len(report.Waiting) != 1 || !strings.Contains(report.Waiting[0], "the relay") {
		t.Fatalf("without a relay: %+v, %v", report, err)
	}
	if _, err := outbox.Resize(ctx, w.truth, 2); err != nil { // the erasures arrive on other streams than the erased messages
		t.Fatal(err)
	}
	stopConsumers()
	w.relay()
	system.AwaitPublished(w.t, w.truth) // otherwise the erasure would wait for the relay
	report, err = w.erase(Options{Wait: time.Second})
	if !errors.Is(err, ErrUnfinished) || len(report.Waiting) != 2 || !strings.HasPrefix(report.Waiting[0], "archiver: ") ||
		!strings.HasPrefix(report.Waiting[1], "threadcache: ") {
		t.Fatalf("without consumers: %+v, %v", report, err)
	}
	stopConsumers = w.consume(w.projections)
	if report, err = dying(time.Minute); err != nil || !report.Done {
		t.Fatal(report, err)
	}
	if len(died) != 20 {
		t.Errorf("it died at %d steps: %v", len(died), died)
	}
	if report.RequestedBy != "officer" || report.FinishedAt == nil || report.Runs < len(died) {
		t.Errorf("the report is %+v", report)
	}
	t.Logf("killed at %v: %+v", died, report)
	w.gone("after the erasure")
	// The author's acts are gone too. Only the stream names their actor, for as long as it keeps
	// the messages.
	if found := slices.Concat(holding(t, w.truthDB, w.user()+`"`), holding(t, w.truthDB, w.user()+","), holding(t, w.projDB, w.user()+`"`),
		filesHolding(t, w.coldDir, w.user()+`"`)); len(found) > 0 {
		t.Errorf("after the erasure the acts of the author are in %v", found)
	}
	if len(holding(t, w.projDB, w.user()+"7")) == 0 || len(filesHolding(t, w.coldDir, w.user()+"7")) == 0 {
		t.Error("the acts of another person are gone")
	}

	// Other texts are unchanged.
	for _, c := range []event.Child{other, alone} {
		if got, err := w.store.GetChild(ctx, tenant, commentKind, c.ID); err != nil || got.Body != c.Body {
			t.Errorf("%+v, %v", got, err)
		}
	}
	if got, err := w.store.GetChild(ctx, 2, commentKind, elsewhere.ID); err != nil || got.Body != elsewhere.Body {
		t.Errorf("%+v, %v", got, err)
	}
	if found := append(holding(t, w.projDB, other.Body), holding(t, w.projDB, elsewhere.Body)...); !slices.Equal(found,
		[]string{"child_lists", "comment_history", "child_lists", "comment_history"}) {
		t.Errorf("texts of others are in %v", found)
	}
	// A retry with a used key makes no comment.
	out, err := w.store.CreateChildren(ctx, tenant, commentKind,
		[]store.NewChild{{Meta: store.Meta{Actor: "ann"}, Object: "10", AuthorID: w.author, Key: "key", Body: secret("first")}})
	if err != nil || !errors.Is(out[0].Err, store.ErrKeyReused) {
		t.Errorf("the create with the used key: %+v, %v", out, err)
	}
	// Messages in the DLQ are redacted, and can be retried.
	if done, err := outbox.NewDLQ(w.truth, nil).Retry(ctx, outbox.DLQRequest{Limit: 10, Actor: "op"}); err != nil || len(done) != 1 {
		t.Fatal(done, err)
	}
	w.settle(w.projections)
	letters := consumers.NewDeadLetters(w.projections, w.fleet...)
	heads, err := postgres.Collect(letters.List(ctx, consumers.DeadLetterFilter{First: true}, 10))
	if err != nil || len(heads) != 2 {
		t.Fatal(heads, err)
	}
	for _, l := range heads {
		res, err := letters.Discard(ctx, consumers.DeadLetterRequest{ID: l.ID, Actor: "op"})
		if err == nil {
			res, err = letters.Retry(ctx, consumers.DeadLetterRequest{ID: res.Next, Actor: "op"})
		}
		if err != nil || res.Left > 0 {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	w.gone("after retries")
	w.equal("after retries", w.projections)
	if n := w.exec(w.projections, `UPDATE child_lists SET version = version WHERE author_state = 'ERASED' AND NOT visible`); n != 8 {
		t.Errorf("%d comments are erased tombstones, want 8", n)
	}

	// A new consumer reads past the erased messages, from the stream's first message, and so does a
	// replay.
	fresh := testkit.Postgres(t)
	freshPool := fresh.Pool(t, postgres.RoleSystem)
	stopFresh := w.consume(freshPool)
	w.settle(freshPool)
	stopFresh()
	w.equal("to a new consumer", freshPool)
	for _, from := range []replay.Source{replay.Stream, replay.Truth} {
		r, err := replay.Run(ctx, replay.Deps{URL: w.projDB.URL,
			Postgres: postgres.Config{MaxConns: 4, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute},
			Truth:    w.truth, JetStream: w.js, Broker: w.nats.Config(), Log: testkit.Logger(t)}, threadcache.New(kinds.Builtin),
			replay.Options{From: from})
		if err != nil || !r.Switched || r.DeadLetters > 0 {
			t.Fatalf("replay from the %s: %+v, %v", from, r, err)
		}
		w.equal(fmt.Sprintf("after a replay from the %s", from), w.projections)
	}

	// The files agree with the database, and restored ranges are redacted.
	if ok, why, err := w.cold.Check(ctx, archived); err != nil || !ok {
		t.Errorf("the range may be dropped: %t, %s, %v", ok, why, err)
	}
	dropped := w.exec(w.truth, `DELETE FROM outbox_messages_archive WHERE aggregate_type <> 'follow'`)
	if r, err := w.cold.Restore(ctx, month, "", func(context.Context) error { return nil }); err != nil || r.Restored != dropped {
		t.Fatalf("%+v, %v", r, err)
	}
	w.gone("after a restore")
	w.equal("after a restore", w.projections)

	// A new comment of the author remains theirs, and its erasure finds nothing older.
	if n := w.comment(tenant, w.author, "10", "", "", secret("new")); n.Body == "" {
		t.Error("a new comment has no body")
	}
	w.settle(w.projections)
	if got := len(holding(t, w.projDB, w.secret)); got != 2 {
		t.Errorf("the new text is in %d tables, want 2", got)
	}
	again, err := w.erase(Options{Wait: time.Minute})
	if err != nil || !again.Done {
		t.Fatal(again, err)
	}
	if diff := cmp.Diff(map[string]int{Children: 1, Outbox: 1, history.Name: 1, Stream: 1}, again.Counts); diff != "" {
		t.Errorf("the second erasure (-want +got):\n%s", diff)
	}
	w.gone("after the second erasure")

	// A message arrived after its comment's erasure nevertheless. The comment is erased again,
	// because a deleted message is never the last of its partition.
	w.exec(w.truth, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT 1, 'comment', 10, 'edited', payload || jsonb_build_object('body', $1::text, 'erased', false) FROM outbox_messages_kept
		WHERE id = 1`, secret("late"))
	w.settle(w.projections)
	late, err := w.erase(Options{Wait: time.Minute})
	if err != nil || !late.Done {
		t.Fatal(late, err)
	}
	if diff := cmp.Diff(map[string]int{Children: 1, Outbox: 1, Stream: 1}, late.Counts); diff != "" {
		t.Errorf("the third erasure (-want +got):\n%s", diff)
	}
	w.settle(w.projections)
	w.gone("after the third erasure")
	w.equal("after the third erasure", w.projections)

	// A repair of a lost stream does not bring back erased content.
	lost := w.newest()
	if err := w.js.DeleteStream(ctx, lost); err != nil {
		t.Fatal(err)
	}
	repaired, err := relay.Repair(ctx, w.truth, w.nats.Config(), testkit.Logger(t), relay.RepairOptions{})
	if err != nil || !repaired.Repaired {
		t.Fatal(repaired, err)
	}
	for _, p := range repaired.Partitions {
		for _, s := range p.Successors {
			if err := consumers.Rebase(ctx, w.projections, p.Stream, p.Left, s); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.settle(w.projections)
	w.gone("on the new stream")
	w.equal("on the new stream", w.projections)
	stopConsumers()
}
