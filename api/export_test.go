package api_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// exported is the answer of an export.
type exported struct {
	head   api.ExportHead
	states []api.ExportState
	end    api.ExportEnd
}

func (f fixture) export(t *testing.T, plural, query string) (x exported) {
	t.Helper()
	a := f.want(t, 200, "GET", "/v1/"+plural+":export"+query, "")
	if ct := a.Header.Get("Content-Type"); ct != "application/x-ndjson" || !strings.HasSuffix(a.body, "\n") {
		t.Fatalf("%s: %q", ct, a.body)
	}
	lines := strings.Split(strings.TrimSuffix(a.body, "\n"), "\n")
	var head struct{ Export *api.ExportHead }
	if err := json.Unmarshal([]byte(lines[0]), &head); err != nil || head.Export == nil || len(lines) < 2 {
		t.Fatalf("%v in %q", err, a.body)
	}
	x.head = *head.Export
	for _, line := range lines[1 : len(lines)-1] {
		var s api.ExportState
		if err := json.Unmarshal([]byte(line), &s); err != nil || s.After == "" || s.Type == "" || s.Subject == "" {
			t.Fatalf("%v in %q", err, line)
		}
		x.states = append(x.states, s)
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &x.end); err != nil || x.end.End == "" {
		t.Fatalf("%v in %q", err, lines[len(lines)-1])
	}
	return x
}

// boundSQL records that a relay has bound the stream of partition 0 and published everything up to
// seq.
const boundSQL = `UPDATE outbox_partitions SET stream = 'EVENTS-0', created = '2026-05-01T12:30:00.123456Z', tail_seq = $1
	WHERE partition = 0`

// lastEventsSQL returns the last event of each entity.
const lastEventsSQL = `SELECT DISTINCT ON (entity) aggregate_type, payload - 'actor' - 'reason' - 'updated_at' FROM (
	SELECT id, aggregate_type, payload, aggregate_type || concat_ws('/', payload->>'follower_id', payload->>'followee_id',
	payload->>'user_id', payload->>'group_id', payload->>'kind',
	       coalesce(payload->>'comment_id', payload->>'message_id', payload->>'review_id', payload->>'post_id')) AS entity
	  FROM outbox_messages WHERE tenant_id = $1 AND payload ? 'version') e ORDER BY entity, (payload->>'version')::int DESC`

// TestAnExportHasTheLastStateOfEverything exports every kind, with archived threads and deleted
// entities, in answers of any size.
func TestAnExportHasTheLastStateOfEverything(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.want(t, 201, "PUT", "/v1/follows/1/2", "")
	f.want(t, 204, "DELETE", "/v1/follows/1/2", "")
	f.want(t, 204, "DELETE", "/v1/comments/"+f.comment(t, 1, "withdrawn").text("comment_id"), "", "If-Match: *")
	f.comment(t, 1, "of an old thread")
	f.exec(t, `UPDATE comments SET updated_at = updated_at - interval '2 hours'`)
	f.archive(t)
	f.populate(t, "text")
	other := f
	other.token = f.newToken(t, tenant+1, "other", tokens.Roles()...)
	other.want(t, 201, "PUT", "/v1/follows/8/9", "")
	f.exec(t, boundSQL, 7)

	want := map[string]map[string]bool{}
	rows, _ := f.system.Query(t.Context(), lastEventsSQL, tenant)
	var kind string
	var payload map[string]any
	if _, err := pgx.ForEachRow(rows, []any{&kind, &payload}, func() error {
		if want[kind] == nil {
			want[kind] = map[string]bool{}
		}
		want[kind][fmt.Sprint(payload)] = true
		payload = nil
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	plurals := map[string]string{"thread": "threads"}
	for _, k := range kinds.Builtin().AllEdges() {
		plurals[k.Name] = k.Plural
	}
	for _, k := range kinds.Builtin().AllChildren() {
		plurals[k.Name] = k.Plural
	}
	for kind, plural := range plurals {
		all := f.export(t, plural, "")
		got := map[string]bool{}
		for _, s := range all.states {
			var data map[string]any
			if err := json.Unmarshal(s.Data, &data); err != nil {
				t.Fatal(err)
			}
			if actor, ok := data["actor"]; !ok || actor != "" || !strings.HasPrefix(s.Type, "tidings."+kind+".") {
				t.Errorf("%s: %+v", plural, s)
			}
			delete(data, "actor")
			delete(data, "updated_at")
			got[fmt.Sprint(data)] = true
		}
		if diff := cmp.Diff(want[kind], got); diff != "" || len(got) == 0 || len(got) != len(all.states) {
			t.Errorf("%s: %d states (-last events +export):\n%s", plural, len(all.states), diff)
		}
		if all.end.End != "done" || all.head.Kind != kind || all.head.Tenant != tenant || len(all.head.Streams) != 1 ||
			all.head.Streams[0].Stream != "EVENTS-0" || all.head.Streams[0].Sequence != "7" {
			t.Errorf("%s: %+v %+v", plural, all.head, all.end)
		}

		// The answers have one or two states. Every second answer breaks off before its last line,
		// and the stream continues meanwhile.
		f.exec(t, boundSQL, 7)
		x := f.export(t, plural, "?lines=1")
		f.exec(t, boundSQL, 1000)
		some := x.states
		for n := 0; x.end.End == "more"; n++ {
			x = f.export(t, plural, "?"+url.Values{"cursor": {x.head.Cursor}, "after": {some[len(some)-1].After},
				"lines": {fmt.Sprint(1 + n%2)}}.Encode())
			some = append(some, x.states[:min(1, len(x.states))]...)
			if n > 100 {
				t.Fatalf("%s has no end", plural)
			}
		}
		if diff := cmp.Diff(all.states, some); diff != "" || x.head.Streams[0].Sequence != "7" || x.head.BeganAt.IsZero() {
			t.Errorf("%s: streams %+v (-at once +resumed):\n%s", plural, x.head.Streams, diff)
		}
		f.exec(t, boundSQL, 7)
		if theirs := other.export(t, plural, ""); len(theirs.states) > 0 != (kind == "follow") {
			t.Errorf("%s of another tenant: %+v", plural, theirs.states)
		}
		refusals := map[string]string{"?cursor=" + all.head.Cursor + "A": "400 cursor-invalid", "?after=a/b": "422 validation-failed",
			"?after=1,%00": "422 validation-failed", "?after=..": "422 validation-failed",
			"?after=1,*": "422 validation-failed", "?lines=0": "422 validation-failed",
			"?cursor=" + f.export(t, map[bool]string{true: "likes", false: "follows"}[plural == "follows"],
				"").head.Cursor: "400 cursor-invalid"}
		for query, want := range refusals {
			if a := f.do(t, "GET", "/v1/"+plural+":export"+query, ""); fmt.Sprint(a.StatusCode, " ", a.text("code")) != want {
				t.Errorf("%s%s: %d %s, want %s", plural, query, a.StatusCode, a.body, want)
			}
		}
	}
	plain := f
	plain.token = f.newToken(t, tenant, "plain", "read", "write", "moderate", "admin")
	plain.want(t, 403, "GET", "/v1/comments:export", "")
}

// TestAnExportNotesTheStreamsBeforeItReads commits and publishes an event while an export begins.
// The export has it among its states, or the stream has it after the export's positions.
func TestAnExportNotesTheStreamsBeforeItReads(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.want(t, 201, "PUT", "/v1/follows/7/42", "")
	ctx := t.Context()
	tx, err := f.owner.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	if _, err := tx.Exec(ctx, `LOCK TABLE outbox_partitions IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	answered := make(chan exported, 1)
	go func() {
		defer close(answered)
		answered <- f.export(t, "follows", "")
	}()
	testkit.Eventually(t, "the export to ask for the positions", func() (waits bool, err error) {
		err = f.system.QueryRow(ctx,
			`SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'outbox_partitions'::regclass AND NOT granted)`).Scan(&waits)
		return waits, err
	})
	f.want(t, 204, "DELETE", "/v1/follows/7/42", "") // its event is published before the positions are read
	if _, err := tx.Exec(ctx, boundSQL, 2); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	x, ok := <-answered
	if !ok || len(x.states) != 1 || x.head.Streams[0].Sequence != "2" || x.states[0].Type != "tidings.follow.removed.v1" ||
		!strings.Contains(string(x.states[0].Data), `"version":2`) {
		t.Errorf("%+v, states %s: want the removal, which is in the stream at 2 and not behind it", x.head.Streams, x.states)
	}
}

// TestAnExportThatCannotBeJoinedIsRefused covers erasures, which remove events of edges from the
// streams, and streams that drop old events.
func TestAnExportThatCannotBeJoinedIsRefused(t *testing.T) {
	t.Parallel()
	f := open(t)
	heads, away := map[string]api.StreamHead{}, error(nil)
	var err error
	f.Handler, err = api.New(config(), api.Deps{Store: store.New(f.pool, nil), Tokens: f.pool, DLQ: outbox.NewDLQ(f.pool, nil),
		Projections: f.pool, Fleet: fleet, Log: testkit.Logger(t), Reg: prometheus.NewRegistry(),
		Streams: func(context.Context) (map[string]api.StreamHead, error) { return heads, away }})
	if err != nil {
		t.Fatal(err)
	}
	f.want(t, 201, "PUT", "/v1/follows/7/42", "")
	f.exec(t, boundSQL, 7)
	follows, messages := f.export(t, "follows", ""), f.export(t, "messages", "")
	created := follows.head.Streams[0].Created.Time
	resumed := func(plural string, x exported) string {
		t.Helper()
		a := f.do(t, "GET", "/v1/"+plural+":export?cursor="+x.head.Cursor, "")
		return fmt.Sprint(a.StatusCode, a.text("code"))
	}
	for name, c := range map[string]struct {
		heads map[string]api.StreamHead
		away  error
		want  string
	}{
		"the stream has what comes behind": {heads: map[string]api.StreamHead{"EVENTS-0": {Created: created, First: 8}},
			want: "200"},
		"it has dropped the first of it": {heads: map[string]api.StreamHead{"EVENTS-0": {Created: created, First: 9}},
			want: "410export-outdated"},
		"it was recreated": {heads: map[string]api.StreamHead{"EVENTS-0": {Created: created.Add(time.Second),
			First: 1}}, want: "410export-outdated"},
		"it is gone": {want: "410export-outdated"},
		"nobody can say, and the reader finds out": {away: errors.New("no broker"), want: "200"},
		"of one it is known though another is not": {heads: map[string]api.StreamHead{"EVENTS-0": {Created: created, First: 9}},
			away: errors.New("no leader"), want: "410export-outdated"},
		"others are there, and this one is not known of": {heads: map[string]api.StreamHead{"EVENTS-1": {}},
			away: errors.New("no leader"), want: "200"},
	} {
		heads, away = c.heads, c.away
		if got := resumed("follows", follows); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	heads, away = nil, errors.New("no broker")

	erasure := func(sql string) { f.exec(t, sql, tenant) }
	other := f
	other.token = f.newToken(t, tenant+1, "other", tokens.Roles()...)
	theirs := other.export(t, "follows", "")
	erasure(`INSERT INTO erasures (tenant_id, author_id, requested_by) VALUES ($1, 7, 'test')`)
	if got, kept := resumed("follows", follows), resumed("messages", messages); got != "410export-outdated" || kept != "200" {
		t.Errorf("an erasure has begun: follows %s, messages, which it leaves events of, %s", got, kept)
	}
	if a := f.want(t, 503, "GET", "/v1/follows:export", ""); a.text("code") != "erasure-unfinished" || a.Header.Get("Retry-After") == "" {
		t.Errorf("while it runs: %s", a.body)
	}
	f.export(t, "messages", "")
	other.want(t, 200, "GET", "/v1/follows:export?cursor="+theirs.head.Cursor, "")
	erasure(`UPDATE erasures SET finished_at = now() WHERE tenant_id = $1`)
	if got := resumed("follows", follows); got != "410export-outdated" {
		t.Errorf("it has ended: %s", got)
	}
	again := f.export(t, "follows", "")
	if got := resumed("follows", again); got != "200" {
		t.Errorf("begun again: %s", got)
	}
	erasure(`UPDATE erasures SET runs = runs + 1 WHERE tenant_id = $1`)
	if got := resumed("follows", again); got != "410export-outdated" {
		t.Errorf("another run: %s", got)
	}
}

// during calls a function when the first bytes of an answer are written.
type during struct {
	*httptest.ResponseRecorder
	once sync.Once
	do   func()
}

func (d *during) Write(b []byte) (int, error) {
	d.once.Do(d.do)
	return d.ResponseRecorder.Write(b)
}

// TestAnExportThatFailsSaysSoInItsLastLine fails after the status was sent. The lines before the
// failure are valid.
func TestAnExportThatFailsSaysSoInItsLastLine(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.exec(t, `INSERT INTO edges_follow (tenant_id, from_id, to_id) SELECT $1, g, g + 1 FROM generate_series(1, 1200) g`, tenant)
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/v1/follows:export", nil)
	r.Header.Set("Authorization", "Bearer "+f.token)
	w := &during{ResponseRecorder: httptest.NewRecorder(), do: func() {
		var open int // while the answer is sent, however slowly the client reads it
		if err := f.system.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND state LIKE 'idle in transaction%'`).Scan(&open); err != nil || open > 0 {
			t.Errorf("%d open transactions, %v", open, err)
		}
		f.exec(t, `INSERT INTO erasures (tenant_id, author_id, requested_by) VALUES ($1, 7, 'test')`, tenant)
	}}
	f.ServeHTTP(w, r)
	lines := strings.Split(strings.TrimSuffix(w.Body.String(), "\n"), "\n")
	var end api.ExportEnd
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &end); err != nil || w.Code != 200 || len(lines) != 502 || end.End != "problem" ||
		end.Problem == nil || end.Problem.Code != "export-outdated" || end.Problem.RequestID == "" {
		t.Errorf("%d, %d lines, the last %s: want a page and the problem of the second", w.Code, len(lines), lines[len(lines)-1])
	}
}
