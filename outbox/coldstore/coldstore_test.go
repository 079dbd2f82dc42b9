package coldstore

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var august = time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC)

// The two ranges of a rig: one has the rows of August, the other one row from just before and one
// from just after.
var (
	part  = outbox.Range{From: 1, To: 100_000, FirstAt: august}
	other = outbox.Range{From: 100_000, To: 200_000, FirstAt: august.AddDate(0, 0, -1)}
)

// rangesSQL makes the two ranges in an empty archive.
const rangesSQL = `
DO $$ DECLARE r record; BEGIN
  FOR r IN SELECT from_id FROM outbox_ranges LOOP EXECUTE format('DROP TABLE %I', 'outbox_messages_' || r.from_id); END LOOP;
END $$;
DELETE FROM outbox_ranges;
CREATE TABLE outbox_messages_1 PARTITION OF outbox_messages_archive FOR VALUES FROM (1) TO (100000);
CREATE TABLE outbox_messages_100000 PARTITION OF outbox_messages_archive FOR VALUES FROM (100000) TO (200000);
INSERT INTO outbox_ranges (from_id, to_id, state, settled_at, archived_at, first_at)
VALUES (1, 100000, 'ARCHIVED', now(), now(), '2026-08-01 00:00:00Z'), (100000, 200000, 'ARCHIVED', now(), now(), '2026-07-31 00:00:00Z')`

// fillSQL writes n rows of a month, with every kind of value that a column can hold, and times at
// the month's edges and just outside.
const fillSQL = `
INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
       available_at, processed_at, attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition)
SELECT g, CASE WHEN g % 3 = 0 THEN 9223372036854775807 ELSE 7 END, 'comment', 9007199254740993 + g, 'created', 1,
       jsonb_build_object('author_id', (g % 5)::text, 'body', 'secret ' || g || E' "<&>\n\t\u2028 é😀 \\',
                          'big', 12345678901234567890.000000000000000001, 'none', null),
       CASE g WHEN 1 THEN @month::timestamptz ELSE @month::timestamptz + (g / 2) * interval '1 minute 0.000001 seconds' END,
       CASE g % 4 WHEN 0 THEN '-infinity'::timestamptz WHEN 1 THEN 'infinity' ELSE @month::timestamptz END, now(), g % 3,
       CASE WHEN g % 2 = 0 THEN E'no\ttoken' END, CASE WHEN g % 3 = 0 THEN '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01' END,
       md5(g::text)::uuid, CASE WHEN g % 7 > 0 THEN g END, @month::timestamptz + interval '1 second',
       CASE WHEN g % 7 > 0 THEN 40000 + g % 3 END
  FROM generate_series(1, @n::int) g
UNION ALL
SELECT 100000 + g, 7, 'comment', 1, 'created', 1, '{"author_id": "1", "body": "elsewhere"}',
       CASE g WHEN 1 THEN @month::timestamptz - interval '1 microsecond' ELSE @month::timestamptz + interval '1 month' END,
       now(), now(), 0, NULL, NULL, md5('x' || g)::uuid, 1, now(), 0
  FROM generate_series(1, 2) g`

type rig struct {
	*Store
	t    *testing.T
	db   *testkit.DB
	pool *pgxpool.Pool
	dir  string
}

func noFence(context.Context, pgx.Tx) error { return nil }

func newRig(t *testing.T, n int) *rig {
	t.Helper()
	db := testkit.Postgres(t)
	r := &rig{t: t, db: db, pool: db.Pool(t, postgres.RoleSystem), dir: t.TempDir()}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), rangesSQL); err != nil {
		t.Fatal(err)
	}
	r.exec(fillSQL, pgx.StrictNamedArgs{"month": august, "n": n})
	r.at("file://" + r.dir)
	return r
}

// at makes the store export to url, in segments of 7 rows.
func (r *rig) at(url string) {
	r.Store = New(r.pool, url, noFence, nil, nil)
	r.segmentRows = 7
}

func (r *rig) exec(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.pool.Exec(r.t.Context(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

// table returns all columns of the month's rows in the archive, or of its restored rows.
func (r *rig) table() []string {
	r.t.Helper()
	rows, _ := r.pool.Query(r.t.Context(), `SELECT a::text
		FROM (SELECT * FROM outbox_messages_archive UNION ALL SELECT * FROM outbox_messages_kept) a
		WHERE occurred_at >= $1 AND occurred_at < $2 ORDER BY id`,
		august, monthEnd(august))
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

func (r *rig) drop() {
	r.t.Helper()
	r.exec(`DELETE FROM outbox_messages_archive WHERE id < 100000`)
}

func (r *rig) export() Export {
	r.t.Helper()
	e, err := r.Export(r.t.Context(), part)
	if err != nil {
		r.t.Fatal(err)
	}
	return e
}

func (r *rig) check(want bool, says string) {
	r.t.Helper()
	ok, why, err := r.Check(r.t.Context(), part)
	if err != nil || ok != want || !strings.Contains(why, says) {
		r.t.Errorf("may be dropped: %t, %q, %v; want %t, %q", ok, why, err, want, says)
	}
}

func (r *rig) complete() (ids []string) {
	r.t.Helper()
	all, err := r.List(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range all {
		ids = append(ids, e.ID)
	}
	return ids
}

// files returns the names in the rig's directory.
func (r *rig) files() (names []string) {
	r.t.Helper()
	err := filepath.WalkDir(r.dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, path)
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return names
}

// s3 serves a bucket whose requests fail when fail returns true.
func (r *rig) s3(fail func(w http.ResponseWriter, req *http.Request) bool) *s3mem.Backend {
	r.t.Helper()
	backend := s3mem.New()
	if err := backend.CreateBucket("cold"); err != nil {
		r.t.Fatal(err)
	}
	fake := gofakes3.New(backend, gofakes3.WithLogger(gofakes3.StdLog(log.New(io.Discard, "", 0)))).Server()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !fail(w, req) {
			fake.ServeHTTP(w, req)
		}
	}))
	r.t.Cleanup(server.Close)
	for name, value := range map[string]string{"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
		"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"} {
		r.t.Setenv(name, value)
	}
	r.at("s3://cold?" + url.Values{"region": {"eu-west-1"}, "endpoint": {server.URL}, "use_path_style": {"true"},
		"prefix": {"events/"}}.Encode())
	return backend
}

func unprepared(context.Context) error { return nil }

func TestARangeGoesOutAndComesBackAsItWas(t *testing.T) {
	for name, place := range map[string]func(r *rig){
		"file": func(*rig) {},
		"s3": func(r *rig) {
			r.s3(func(_ http.ResponseWriter, req *http.Request) bool {
				if !strings.HasPrefix(req.Header.Get("Authorization"), "AWS4-HMAC-SHA256 Credential=key/") ||
					!strings.Contains(req.Header.Get("Authorization"), "/eu-west-1/s3/") {
					t.Errorf("a request is signed %q", req.Header.Get("Authorization"))
				}
				return false
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 300)
			place(r)
			// More than a page of memory.
			r.exec(`UPDATE outbox_messages_archive SET payload = jsonb_build_object('body', repeat('x', 2500000)) WHERE id BETWEEN 100
				AND 102`)
			before := r.table()
			if r.check(false, "not exported"); len(before) != 300 {
				t.Fatalf("%d rows", len(before))
			}
			e := r.export()
			if e.Rows != 300 {
				t.Errorf("exported %+v", e)
			}
			r.check(true, "")
			if due, err := r.Due(t.Context()); err != nil || len(due) != 1 || due[0].From != other.From {
				t.Errorf("due: %v, %v; want the other range alone", due, err)
			}
			if err := r.Verify(t.Context(), time.Time{}, func(f Finding) error {
				if f.Problem != "" || f.Table != TableSame || f.Month != "2026-08" || f.Export.ID != e.ID {
					t.Errorf("%+v", f)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
			r.drop()
			for range 2 {
				got, err := r.Restore(t.Context(), august, "", unprepared)
				if err != nil || got.Read != 300 {
					t.Fatalf("%+v, %v", got, err)
				}
			}
			if diff := cmp.Diff(before, r.table()); diff != "" {
				t.Errorf("(-before +restored):\n%s", diff)
			}
			r.check(true, "")
			if err := r.Verify(t.Context(), august, func(f Finding) error {
				if f.Problem != "" || f.Table != TableGone || f.Export.ID != e.ID {
					t.Errorf("%+v", f)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAnExportReadsARangeByPages(t *testing.T) {
	r := newRig(t, 3000)
	r.segmentRows = 2000
	r.exec(`INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at, processed_at, attempts, event_id, inserted_at)
		SELECT g, 0, 'heartbeat', 1, 'sent', 1, '{}', $1, now(), now(), 0, gen_random_uuid(), now() FROM generate_series(50000, 50900) g`,
		august)
	r.db.RowsPerStatement(t, 2000, "outbox_messages_archive")
	if e := r.export(); e.Rows != 3000 {
		t.Errorf("exported %+v", e)
	}
	r.check(true, "")
	if _, err := r.Export(t.Context(), outbox.Range{From: 50_000, To: 100_000, FirstAt: august}); !errors.Is(err, ErrNoRows) {
		t.Errorf("a range of heartbeats alone: %v", err)
	}
	if _, err := r.Export(t.Context(), outbox.Range{From: 300_000, To: 400_000, FirstAt: august}); !errors.Is(err, ErrNoRows) {
		t.Errorf("an empty range: %v", err)
	}
	if all, err := r.List(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("%d exports, %v", len(all), err)
	}
}

func TestAStrangerReadsASegment(t *testing.T) {
	r := newRig(t, 20)
	r.export()
	n := 0
	for _, name := range r.files() {
		if !strings.HasSuffix(name, ".ndjson.gz") || strings.HasPrefix(filepath.Base(name), "index-") {
			continue
		}
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		z, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		for d := json.NewDecoder(z); d.More(); n++ {
			var row struct {
				ID      string
				Payload struct{ Body string }
			}
			if err := d.Decode(&row); err != nil || !strings.HasPrefix(row.Payload.Body, "secret "+row.ID+" \"<&>\n") {
				t.Errorf("%+v, %v", row, err)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	if n != 20 {
		t.Errorf("%d rows, want 20", n)
	}
}

// If files or table change in any way, the range may not be dropped; once exported again, it may.
func TestARangeWhoseExportIsNotWhatTheTableHoldsIsKeptAndExportedAgain(t *testing.T) {
	r := newRig(t, 20)
	edit := func(suffix string, change func(content []byte) []byte) func() {
		return func() {
			i := slices.IndexFunc(r.files(), func(name string) bool {
				return strings.Contains(name, "/2026-08/") && strings.HasSuffix(name, suffix)
			})
			name := r.files()[i]
			content, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if content = change(content); content == nil {
				err = os.Remove(name)
			} else {
				err = os.WriteFile(name, content, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	cases := []struct {
		name string
		do   func()
		says string
	}{
		{"a segment is cut short", edit("2.ndjson.gz", func(b []byte) []byte { return b[:len(b)/2] }), "damaged"},
		{"a segment has lost its last byte", edit("3.ndjson.gz", func(b []byte) []byte { return b[:len(b)-1] }), "damaged"},
		{"a segment is empty", edit("1.ndjson.gz", func(b []byte) []byte { return b[:0] }), "damaged"},
		{"a byte differs", edit("1.ndjson.gz", func(b []byte) []byte { b[len(b)/2] ^= 1; return b }), "damaged"},
		{"a segment continues after its end", edit("1.ndjson.gz", func(b []byte) []byte { return append(b, b...) }), "damaged"},
		{"a segment is gone", edit("2.ndjson.gz", func([]byte) []byte { return nil }), "does not exist"},
		{"the manifest is gone", edit(manifestName, func([]byte) []byte { return nil }), "does not exist"},
		{"the manifest differs", edit(manifestName, func(b []byte) []byte { return append(b, '\n') }), "damaged"},
		{"the manifest is cut short", edit(manifestName, func(b []byte) []byte { return b[:len(b)-10] }), "damaged"},
		{"a row came late", func() {
			r.exec(`INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
				occurred_at, available_at, processed_at, attempts, event_id, inserted_at)
				VALUES (9999, 7, 'comment', 1, 'created', 1, '{}',
				'2026-08-31 23:59:59.999999+00', now(), now(), 0, gen_random_uuid(), now())`)
		}, "it has 21 rows"},
		{"a row differs", func() {
			r.exec(`UPDATE outbox_messages_archive SET payload = payload || '{"body": "another"}' WHERE id = 9999`)
		}, "has changed"},
	}

	r.export()
	for _, c := range cases {
		r.check(true, "")
		c.do()
		r.check(false, c.says)
		done, err := r.ExportDue(t.Context(), t.Context().Err)
		if err != nil || !slices.ContainsFunc(done, func(e Export) bool { return e.Range == part.From }) {
			t.Errorf("%s: exported again: %v, %v", c.name, done, err)
		}
		if t.Failed() {
			t.Fatalf("when %s", c.name)
		}
	}
	r.check(true, "")
	if err := os.RemoveAll(r.dir); err != nil {
		t.Fatal(err)
	}
	r.check(false, "does not exist")
	if _, err := New(r.pool, r.url, noFence, nil, nil).Export(t.Context(), part); err == nil {
		t.Error("exported to a place that is gone")
	}
}

// Each request to the store fails once, in turn, in every way; of those that are cut off, only each
// sixth. A partial export never counts, and its files are removed.
func TestAStoreThatFailsAtAnyStepLeadsToNoDrop(t *testing.T) {
	for name, how := range map[string]func(w http.ResponseWriter){
		"full":    func(w http.ResponseWriter) { w.WriteHeader(http.StatusInsufficientStorage) },
		"cut off": func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, // the S3 client retries this by itself
		"a false answer": func(w http.ResponseWriter) { // a file that is accepted but not kept, or whose content ends early
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write([]byte("short"))
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 10)
			var n, failing atomic.Int64
			backend := r.s3(func(w http.ResponseWriter, _ *http.Request) bool {
				if n.Add(1) != failing.Load() {
					return false
				}
				how(w)
				return true
			})
			failures, stride := 0, int64(1)
			if name == "cut off" {
				stride = 6 // each takes a second or two
			}
			for step := int64(1); ; step += stride {
				n.Store(0)
				failing.Store(step)
				_, err := r.Export(t.Context(), part)
				made := n.Load()
				failing.Store(0)
				if step > 100 {
					t.Fatalf("export %d still fails: %v", step, err)
				}
				if err == nil {
					r.check(true, "")
					if made < step {
						break
					}
					r.exec(`UPDATE outbox_archive_exports SET state = 'OVER', over_at = now()`)
					continue
				}
				failures++
				if len(r.complete()) > 0 {
					t.Fatalf("request %d failed: %v, and complete is %v", step, err, r.complete())
				}
				r.check(false, "not exported")
			}
			if failures < 6 && name != "cut off" {
				t.Errorf("%d exports failed", failures)
			}
			r.check(true, "")
			if _, err := r.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := objects(t, backend); len(got) != 4 || !strings.Contains(got[0], r.complete()[0]) ||
				!strings.Contains(got[3], r.complete()[0]) {
				t.Errorf("left are %v", got)
			}
			for step := int64(1); ; step += stride { // also while Check runs
				n.Store(0)
				failing.Store(step)
				ok, why, err := r.Check(t.Context(), part)
				if n.Load() < step {
					break
				}
				if ok && name != "cut off" || !ok && why == "" && err == nil {
					t.Errorf("request %d failed: may be dropped: %t, %q, %v", step, ok, why, err)
				}
			}
		})
	}
}

func objects(t *testing.T, backend *s3mem.Backend) (keys []string) {
	t.Helper()
	list, err := backend.ListBucket("cold", &gofakes3.Prefix{}, gofakes3.ListBucketPage{})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range list.Contents {
		keys = append(keys, o.Key)
	}
	return keys
}

func TestADiskThatFailsLeadsToNoDrop(t *testing.T) {
	r := newRig(t, 20)
	r.at("file://" + r.dir + "?prefix=a/")
	if err := os.WriteFile(filepath.Join(r.dir, "a"), nil, 0o600); err != nil { // in the place of a directory
		t.Fatal(err)
	}
	if _, err := r.Export(t.Context(), part); err == nil {
		t.Error("exported into a file")
	}
	r.check(false, "not exported")
	if err := os.Remove(filepath.Join(r.dir, "a")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ExportDue(t.Context(), t.Context().Err); err != nil {
		t.Error(err)
	}
	r.check(true, "")
	for _, name := range r.files() {
		if !strings.HasPrefix(name, filepath.Join(r.dir, "a", "2026-0")) {
			t.Errorf("left is %s", name)
		}
	}
}

func TestOfTwoExportersTheLaterCountsAndTheFilesOfTheOtherGo(t *testing.T) {
	r := newRig(t, 20)
	rival := New(r.pool, r.url, noFence, nil, nil)
	r.check(false, "not exported")
	var second Export
	first := New(r.pool, r.url, noFence, nil, func(p Progress) { // everything is written, but not complete
		if second.ID == "" && strings.HasPrefix(p.Step, "read back") {
			var err error
			if second, err = rival.Export(t.Context(), part); err != nil {
				t.Error(err)
			}
		}
	})
	if _, err := first.Export(t.Context(), part); !errors.Is(err, errTaken) {
		t.Errorf("the first one: %v", err)
	}
	if got := r.complete(); !slices.Equal(got, []string{second.ID}) {
		t.Errorf("complete: %v, want %s", got, second.ID)
	}
	for _, name := range r.files() { // the first one has removed its own
		if !strings.Contains(name, second.ID) {
			t.Errorf("left is %s", name)
		}
	}
	if n, err := r.Sweep(t.Context()); err != nil || n != 0 {
		t.Errorf("swept %d, %v", n, err)
	}
	r.check(true, "")
}

func TestAnExporterThatLostItsRightCompletesNothing(t *testing.T) {
	r := newRig(t, 20)
	lost := errors.New("lost")
	calls := 0
	r.fence = func(context.Context, pgx.Tx) error {
		if calls++; calls > 1 {
			return lost
		}
		return nil
	}
	if _, err := r.Export(t.Context(), part); !errors.Is(err, lost) || len(r.complete()) > 0 {
		t.Errorf("%v, complete: %v", err, r.complete())
	}
	r.fence = noFence
	r.export()
	r.fence = func(context.Context, pgx.Tx) error { return lost }
	if ok, _, err := r.Check(t.Context(), part); ok || !errors.Is(err, lost) {
		t.Errorf("may be dropped: %t, %v", ok, err)
	}
	if _, err := r.Restore(t.Context(), august, "", unprepared); !errors.Is(err, lost) {
		t.Errorf("restore: %v", err)
	}
}

// A row that arrives after its range was dropped is exported beside the earlier export, never in
// its place.
func TestWhatComesAfterTheDropIsExportedBesideTheRest(t *testing.T) {
	r := newRig(t, 20)
	first := r.export()
	r.check(true, "")
	r.exec(`DELETE FROM outbox_messages_archive WHERE id < 100000 AND id <> 20`)
	r.exec(`UPDATE outbox_messages_archive SET id = 21 WHERE id = 20`)
	r.check(false, "it has 1 row")
	second := r.export()
	r.check(true, "")
	if got := r.complete(); !slices.Equal(got, []string{second.ID, first.ID}) {
		t.Fatalf("complete: %v, want both", got)
	}
	r.drop()
	if got, err := r.Restore(t.Context(), august, "", unprepared); err != nil || got.Restored != 21 {
		t.Errorf("%+v, %v", got, err)
	}
	r.check(true, "") // restored rows do not belong to the range
	if _, err := r.Export(t.Context(), part); !errors.Is(err, ErrNoRows) {
		t.Errorf("a dropped range was exported: %v", err)
	}
}

func TestADamagedExportRestoresNothing(t *testing.T) {
	r := newRig(t, 20)
	r.export()
	r.drop()
	last := filepath.Join(r.dir, "2026-08", r.complete()[0], "00003.ndjson.gz")
	if err := os.Truncate(last, 50); err != nil {
		t.Fatal(err)
	}
	for _, from := range []string{"", "file://" + r.dir} {
		if _, err := r.Restore(t.Context(), august, from, unprepared); !errors.Is(err, ErrDamaged) || len(r.table()) > 0 {
			t.Errorf("from %q: %v, and %d rows are there", from, err, len(r.table()))
		}
	}
	if _, err := r.Export(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Redact(t.Context(), 7, "1", erase); err != nil || got.Rows != 2 || len(got.Unread) != 1 ||
		!strings.Contains(got.Unread[0], "00003.ndjson.gz: ") {
		t.Errorf("redact: %+v, %v, want two rows of the range that is sound", got, err)
	}
	if len(r.complete()) != 2 {
		t.Errorf("complete: %v", r.complete())
	}
	if err := r.Verify(t.Context(), august, func(f Finding) error {
		if bad := f.Export.Range == part.From; strings.Contains(f.Problem, "damaged") != bad || f.Damaged != bad ||
			(f.Table == TableGone) != bad {
			t.Errorf("%+v", f)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if _, err := r.Restore(t.Context(), august.AddDate(0, 2, 0), "", unprepared); !errors.Is(err, ErrNoExport) {
		t.Errorf("a month that was not exported: %v", err)
	}
}

// TestADamagedExportKeepsBackTheSoundOnes has two exports with events of the month. The second one
// is damaged.
func TestADamagedExportKeepsBackTheSoundOnes(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20)
	r.export()
	r.exec(`UPDATE outbox_messages_archive SET occurred_at = $1 WHERE id >= 100000`, august.Add(time.Hour))
	damaged, err := r.Export(t.Context(), other)
	if err != nil {
		t.Fatal(err)
	}
	r.exec(`DELETE FROM outbox_messages_archive`)
	if err := os.Truncate(filepath.Join(r.dir, damaged.dir(), "00001.ndjson.gz"), 50); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Restore(t.Context(), august, "", unprepared); !errors.Is(err, ErrDamaged) || len(r.table()) > 0 {
		t.Errorf("%+v, %v, and %d rows are there", got, err, len(r.table()))
	}
}

func TestARangeWhoseFilesAreDamagedIsNotDropped(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20)
	e := r.export()
	if err := os.Truncate(filepath.Join(r.dir, "2026-08", e.ID, "00003.ndjson.gz"), 50); err != nil {
		t.Fatal(err)
	}
	if ok, why, err := r.Check(t.Context(), part); ok || err != nil || !strings.Contains(why, "00003.ndjson.gz") {
		t.Errorf("%t, %s, %v", ok, why, err)
	}
}

// Direct SQL writers may set payloads and times that no other writer sets.
func TestOddRowsComeBackAndSpoilNothing(t *testing.T) {
	r := newRig(t, 5)
	r.exec(`UPDATE outbox_messages_archive SET payload = 'null' WHERE id = 2`)
	want := r.table()
	e := r.export()
	if all, err := r.List(t.Context()); err != nil || len(all) != 1 || e.ExportedAt == nil ||
		!e.ExportedAt.Equal(*all[0].ExportedAt) || e.Rows != 5 {
		t.Errorf("the export is %+v, and listed are %+v, %v", e, all, err)
	}
	r.drop()
	if got, err := r.Restore(t.Context(), august, "", unprepared); err != nil || got.Restored != 5 {
		t.Errorf("a month with the payload null: %+v, %v", got, err)
	}
	if diff := cmp.Diff(want, r.table()); diff != "" {
		t.Errorf("(-before +restored):\n%s", diff)
	}
	r.exec(`UPDATE outbox_messages_archive SET occurred_at = '0001-01-01 00:00:00+00' WHERE id = 100001`)
	if ok, why, err := r.Check(t.Context(), other); ok || err != nil || !strings.Contains(why, "not exported") {
		t.Errorf("a range with an event of Go's zero time: %t, %s, %v", ok, why, err)
	}
	if odd, err := r.Export(t.Context(), other); err != nil || odd.Rows != 2 {
		t.Errorf("exported %+v, %v", odd, err)
	} else if got, err := r.Restore(t.Context(), time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC), "", unprepared); err != nil ||
		got.Read != 2 || got.Restored != 0 {
		t.Errorf("its month: %+v, %v", got, err)
	}
	if all, err := r.List(t.Context()); err != nil || len(all) != 2 || all[0].ID != e.ID || all[0].StaleAt != nil {
		t.Errorf("exports of other ranges: %+v, %v", all, err)
	}
}

// The database was restored from a backup before the rows moved, or the stream was lost and is
// published again.
func TestARowThatTheOutboxHasAgainIsNotRestoredBesideIt(t *testing.T) {
	r := newRig(t, 5)
	r.export()
	r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) SELECT 1, 'post', 1, 'created', '{}'
		FROM generate_series(1, 5)`)
	r.exec(`DELETE FROM outbox_messages`) // ids up to 5 are used
	r.exec(`WITH gone AS (DELETE FROM outbox_messages_archive WHERE id = 3 RETURNING *)
		INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at, event_id,
		inserted_at, processed_at, stream_seq)
		SELECT id, tenant_id, 'post', aggregate_id, event_type, payload, occurred_at, occurred_at, event_id, occurred_at,
		now() - interval '8 d', 77 FROM gone`)
	// Another event.
	r.exec(`INSERT INTO outbox_messages (id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (4, gen_random_uuid(), 1, 'post', 1, 'created', '{}')`)
	r.exec(`DELETE FROM outbox_messages_archive WHERE id = 4`)
	if got, err := r.Restore(t.Context(), august, "", unprepared); err != nil || got.Read != 5 || got.Restored != 1 {
		t.Errorf("%+v, %v; want only the missing row", got, err)
	}
	cfg := outbox.ArchiveConfig{RangeRows: 1000, RangeAge: time.Hour}
	archive, err := outbox.NewArchive(cfg, func(context.Context) (outbox.Terms, error) { return outbox.Terms{After: time.Hour}, nil },
		r.pool, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	if err := archive.Run(t.Context(), unheld{}); err != nil {
		t.Error(err)
	}
	if len(r.table()) != 5 {
		t.Errorf("the month has %d rows", len(r.table()))
	}
}

// unheld is a lease that nobody else takes.
type unheld struct{}

func (unheld) Fence(context.Context, pgx.Tx) error { return nil }
func (unheld) Continue() error                     { return nil }
func (unheld) Count(string, int64)                 {}

// A process without the export URL dropped a range without Check: the files are all that is left of
// it.
func TestARangeThatWasDroppedUnaskedStaysOutside(t *testing.T) {
	r := newRig(t, 20)
	unset := New(r.pool, "", noFence, nil, nil)
	if ok, why, err := unset.Check(t.Context(), part); !ok || err != nil {
		t.Errorf("without exports, where none are wanted: %t, %s, %v", ok, why, err)
	}
	first := r.export()
	r.exec(`UPDATE outbox_messages_archive SET attempts = 9 WHERE id = 3`)
	if ok, _, err := unset.Check(t.Context(), part); ok || err != nil {
		t.Errorf("an exported range that has changed since may be dropped: %t, %v", ok, err)
	}
	first = r.export()
	if ok, why, err := unset.Check(t.Context(), part); !ok || err != nil {
		t.Errorf("an exported range: %t, %s, %v", ok, why, err)
	}
	r.exec(`DELETE FROM outbox_messages_archive WHERE id < 100000 AND id <> 20`)
	r.exec(`UPDATE outbox_messages_archive SET id = 21 WHERE id = 20`)
	second := r.export()
	if got := r.complete(); !slices.Equal(got, []string{second.ID, first.ID}) {
		t.Errorf("complete: %v, want both", got)
	}
}

// An unavailable store is detected before the table is read, and does not count as damage.
func TestAStoreThatIsAwayIsFoundOutFirst(t *testing.T) {
	r := newRig(t, 20)
	away := false
	r.s3(func(w http.ResponseWriter, _ *http.Request) bool {
		if away {
			w.WriteHeader(http.StatusForbidden)
		}
		return away
	})
	r.export()
	away = true
	r.exec(`UPDATE outbox_messages_archive SET attempts = 9 WHERE id = 3`) // a comparison with the table would find this
	if ok, _, err := r.Check(t.Context(), part); ok || err == nil || errors.Is(err, ErrDamaged) {
		t.Errorf("%t, %v", ok, err)
	}
	if err := r.Verify(t.Context(), august, func(f Finding) error {
		if f.Problem == "" {
			t.Errorf("%+v", f)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// erase redacts the texts of author 1, in a row or in the table.
func erase(row *Row) bool {
	var p map[string]any
	d := json.NewDecoder(strings.NewReader(string(row.Payload)))
	d.UseNumber()
	if err := d.Decode(&p); err != nil || p["author_id"] != "1" || p["body"] == "" {
		return false
	}
	p["body"] = ""
	var err error
	row.Payload, err = json.Marshal(p)
	return err == nil
}

const eraseSQL = `UPDATE outbox_messages_archive SET payload = payload || '{"body": ""}' WHERE tenant_id = 7
	AND payload ->> 'author_id' = '1'`

// read returns everything in the store, uncompressed.
func read(t *testing.T, ctx context.Context, r *rig) (all string) {
	t.Helper()
	b, err := r.open(r.url)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := b.list(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if err := b.read(ctx, key, func(in io.Reader) error {
			if strings.HasSuffix(key, ".gz") {
				z, err := gzip.NewReader(in)
				if err != nil {
					return err
				}
				in = z
			}
			content, err := io.ReadAll(in)
			all += string(content)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// Each request fails in turn. Repeated, the redaction completes, and the store has nothing that it
// removed.
func TestARedactionWhoseRequestFailedIsRunAgain(t *testing.T) {
	r := newRig(t, 30)
	var n, failing atomic.Int64
	var index atomic.Bool // the failed request reads an index
	backend := r.s3(func(w http.ResponseWriter, req *http.Request) bool {
		if n.Add(1) != failing.Load() {
			return false
		}
		index.Store(req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/index-"))
		w.WriteHeader(http.StatusForbidden)
		return true
	})
	r.export()
	before := r.table()
	first := r.complete()[0]
	// A partial export of a dead process.
	stopped, stop := context.WithCancel(t.Context())
	half := New(r.pool, r.url, noFence, nil, func(p Progress) { stop() })
	if _, err := half.Export(stopped, other); err == nil {
		t.Fatal("the half export was completed")
	}
	secret := "secret 1 " // of tenant 7, author 1
	if !strings.Contains(read(t, t.Context(), r), secret) {
		t.Fatal("no file has the secret")
	}
	total := 0
	for step := int64(1); ; step++ {
		n.Store(0)
		failing.Store(step)
		r.exec(`DELETE FROM outbox_archive_exports WHERE swept_at IS NOT NULL`) // as after a day
		got, err := r.Redact(t.Context(), 7, "1", erase)
		total += got.Rows
		if n.Load() < step {
			if err != nil || got.Rows != 0 || len(got.Unread) > 0 {
				t.Fatalf("at the end: %+v, %v", got, err)
			}
			break
		}
		if err == nil && len(got.Unread) == 0 && !index.Load() { // without an index, all segments are read
			t.Errorf("request %d failed without an error", step)
		}
		if len(r.complete()) != 1 {
			t.Fatalf("complete: %v", r.complete())
		}
	}
	failing.Store(0)
	content := read(t, t.Context(), r)
	if strings.Contains(content, secret) || !strings.Contains(content, "secret 3 ") || total < 4 {
		t.Errorf("redacted %d rows; the secret is there: %t; that of others: %t", total, strings.Contains(content, secret),
			strings.Contains(content, "secret 3 "))
	}
	if now := r.complete(); slices.Contains(now, first) ||
		slices.ContainsFunc(objects(t, backend), func(key string) bool { return !strings.Contains(key, now[0]) }) {
		t.Errorf("complete is %v, left are %v", now, objects(t, backend))
	}
	r.check(false, "has changed") // the table is not redacted
	r.exec(eraseSQL)
	r.exec(`UPDATE outbox_archive_exports SET stale_at = NULL`)
	r.check(true, "") // now the table equals it
	r.drop()
	if _, err := r.Restore(t.Context(), august, "", unprepared); err != nil {
		t.Fatal(err)
	}
	after := r.table()
	if len(after) != len(before) || strings.Contains(strings.Join(after, "\n"), secret) {
		t.Errorf("restored: %d rows", len(after))
	}
}

func TestARedactionRewritesOnlyWhatChanges(t *testing.T) {
	r := newRig(t, 30)
	r.export()
	for _, who := range [][2]int64{{8, 1}, {7, 77}} {
		if got, err := r.Redact(t.Context(), who[0], event.IDOf(who[1]), erase); err != nil || !cmp.Equal(got, Redacted{Files: 1}) {
			t.Errorf("user %d of tenant %d: %+v, %v", who[1], who[0], got, err)
		}
	}
	sums := func() (sums []string) {
		b, err := r.open(r.url)
		if err != nil {
			t.Fatal(err)
		}
		m, err := readManifest(t.Context(), b, "2026-08/"+r.complete()[0], nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range m.Segments {
			sums = append(sums, s.SHA256)
		}
		return sums
	}
	before := sums()
	if got, err := r.PreviewRedaction(t.Context(), 7, "1", erase); got.Rows != 4 || err != nil || !slices.Equal(sums(), before) {
		t.Errorf("PreviewRedaction: %+v, %v", got, err)
	}
	got, err := r.Redact(t.Context(), 7, event.IDOf(8%5), func(row *Row) bool {
		if row.ID != 8 || row.LastError == nil {
			return false
		}
		row.LastError = nil
		return true
	})
	after := sums()
	if got.Rows != 1 || err != nil || before[0] != after[0] || before[1] == after[1] || before[2] != after[2] {
		t.Errorf("%+v, %v: %v -> %v", got, err, before, after)
	}
	if got, err := r.Redact(t.Context(), 7, "1", func(row *Row) bool { row.ID++; return true }); err != nil || len(got.Unread) != 1 {
		t.Errorf("a redaction may change keys: %+v, %v", got, err)
	}
}

// many makes n exports of one segment each. Export i names author 1000+i, who wrote its comments,
// and user 2000+i, who follows somebody. User auth0|3 is the actor of an event in export 3.
func (r *rig) many(n int) (all []Export) {
	r.t.Helper()
	r.exec(`DELETE FROM outbox_messages_archive`)
	r.exec(`INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at, processed_at, attempts, event_id, inserted_at)
	  SELECT 1 + i * 10 + g, 7, CASE g WHEN 0 THEN 'follow' ELSE 'comment' END, 1, 'created', 1,
	         CASE g WHEN 0 THEN jsonb_build_object('follower_id', (2000 + i)::text, 'followee_id', 5, 'actor',
	         CASE i WHEN 3 THEN 'user:auth0|3' ELSE 'user:2000' END)
	                ELSE jsonb_build_object('comment_id', gen_random_uuid(), 'author_id', (1000 + i)::text, 'body', 'secret') END,
	         $2, now(), now(), 0, gen_random_uuid(), now()
	    FROM generate_series(0, $1::int - 1) i, generate_series(0, 2) g`, n, august)
	for i := range int64(n) {
		e, err := r.Export(r.t.Context(), outbox.Range{From: 1 + 10*i, To: 11 + 10*i, FirstAt: august})
		if err != nil {
			r.t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

// blank empties the bodies of an author, and the ends of edges of a user.
func blank(person string) func(row *Row) bool {
	return func(row *Row) bool {
		was := string(row.Payload)
		for _, of := range []string{`"author_id": "` + person + `"`, `"follower_id": "` + person + `"`, `"actor": "user:` + person + `"`} {
			if strings.Contains(was, of) {
				row.Payload = json.RawMessage(`{"erased": true}`)
			}
		}
		return string(row.Payload) != was
	}
}

// An erasure reads only the segments that the index lists for the person. A damaged file delays
// only erasures of people whose data it may have.
func TestARedactionReadsOnlyTheFilesThatNameThePerson(t *testing.T) {
	r := newRig(t, 1)
	all := r.many(6)
	segment := func(i int) string { return filepath.Join(r.dir, "2026-08", all[i].ID, "00001.ndjson.gz") }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Truncate(segment(4), 50))
	want := func(person string, want Redacted, unread ...string) {
		t.Helper()
		got, err := r.Redact(t.Context(), 7, event.ID(person), blank(person))
		if err != nil || len(got.Unread) != len(unread) {
			t.Fatalf("%s: %+v, %v", person, got, err)
		}
		for i, file := range unread {
			if !strings.Contains(got.Unread[i], file) {
				t.Errorf("%s: unread is %q, want %s named", person, got.Unread[i], file)
			}
		}
		if got.Unread = nil; !cmp.Equal(got, want) {
			t.Errorf("%s: %+v, want %+v", person, got, want)
		}
	}
	want("999", Redacted{Files: 6})           // without any comment
	want("1002", Redacted{Rows: 2, Files: 8}) // reads its segment, and again to rewrite it
	want("1002", Redacted{Files: 6})          // the new index does not list the person
	want("2001", Redacted{Rows: 1, Files: 8})
	want("auth0|3", Redacted{Rows: 1, Files: 8})
	want("1004", Redacted{Files: 7}, all[4].ID+"/00001.ndjson.gz: ")

	// Without its index an export may name anybody; its restore needs no index.
	index := filepath.Join(r.dir, "2026-08", all[5].ID, "index-00001.ndjson.gz")
	must(os.Truncate(index, 50))
	want("999", Redacted{Files: 7})
	want("1005", Redacted{Rows: 2, Files: 8})
	must(r.Verify(t.Context(), time.Time{}, func(f Finding) error {
		if f.Export.Range == all[5].Range && f.Problem != "" {
			t.Errorf("the copy: %+v", f)
		}
		return nil
	}))
	// An export with a damaged manifest may name anybody too, until it is ended.
	must(os.Truncate(filepath.Join(r.dir, "2026-08", all[4].ID, "manifest.json"), 50))
	want("999", Redacted{Files: 5}, all[4].ID+"/manifest.json: ")
	r.exec(`UPDATE outbox_archive_exports SET state = 'OVER', over_at = now() WHERE export_id = $1`, all[4].ID)
	want("999", Redacted{Files: 5})
	want("1004", Redacted{Files: 5})
	files := read(t, t.Context(), r)
	// Not within a time or a UUID.
	names := func(id string) bool {
		return regexp.MustCompile(`["\[, ]` + regexp.QuoteMeta(id) + `["\],]`).MatchString(files)
	}
	if names("1002") || names("2001") || names("auth0|3") || !names("1003") {
		t.Error("the files still name an erased person, or lack another one")
	}
}

// Files of format 1 remain readable: the first version of the format wrote these.
func TestAnOldExportIsRestoredFromItsPlaceAlone(t *testing.T) {
	r := newRig(t, 10)
	r.exec(`UPDATE outbox_messages_archive SET processed_at = '2026-08-09 10:11:12.131415+00'`)
	want := r.table()
	r.drop()
	dir, err := filepath.Abs("testdata/format1")
	if err != nil {
		t.Fatal(err)
	}
	got, err := r.Restore(t.Context(), august, "file://"+dir, unprepared)
	if err != nil || got.Restored != 10 {
		t.Fatalf("%+v, %v", got, err)
	}
	if diff := cmp.Diff(want, r.table()); diff != "" {
		t.Errorf("(-filled +restored):\n%s", diff)
	}
}

func TestTheFormatHasEveryColumnOfTheArchive(t *testing.T) {
	r := newRig(t, 1)
	rows, _ := r.pool.Query(t.Context(), `SELECT attname::text,
		replace(format_type(atttypid, NULL), 'timestamp with time zone', 'timestamptz') FROM pg_attribute
		WHERE attrelid = 'outbox_messages_archive'::regclass AND attnum > 0 AND NOT attisdropped
		AND attname NOT IN ('behind', 'delayed', 'payload_bytes') ORDER BY attnum`) // used by waiting rows, or computed
	want, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Column])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, schema); diff != "" {
		t.Errorf("(-table +format): an export without this column loses it\n%s", diff)
	}
	err = outbox.WalkArchive(t.Context(), r.pool, part.From, part.To, func(_ outbox.ArchiveKey, line []byte) error {
		d := json.NewDecoder(strings.NewReader(string(line)))
		d.DisallowUnknownFields()
		var row Row
		if err := d.Decode(&row); err != nil {
			return err
		}
		var members map[string]any
		if err := json.Unmarshal(line, &members); err != nil || len(members) != len(schema) {
			return fmt.Errorf("%d members, want %d: %w", len(members), len(schema), err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestURLs(t *testing.T) {
	for text, ok := range map[string]bool{
		"": true, "file:///var/cold": true, "s3://bucket?region=eu-west-1&endpoint=https://s3.example": true, "file://dir/x": false,
		"file:": false, "/var/cold": false,
		"s3://": false, "s3://key:secret@bucket": false, "gs://bucket": false, "mem://": false, "%": false,
		"file:///var/cold?prefix=a/b/": true, "file:///var/cold?prefix=a": false, "file:///var/cold?prefix=../": false,
		"s3://bucket?anonymous=true": false, "file:///var/cold?region=x": false,
	} {
		if err := (Config{URL: text}).Validate(); (err == nil) != ok || err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v, want ok %t", text, err, ok)
		}
	}
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, sql := range map[string]string{
		"exports": exportsSQL, "abandon": abandonSQL, "begin": beginSQL, "complete": completeSQL, "supersede": supersedeSQL,
		"end": endSQL, "is complete": isCompleteSQL, "places": placesSQL, "states": statesSQL,
		"swept": sweptSQL, "stale": staleSQL, "release": releaseSQL,
	} {
		t.Run(name, func(t *testing.T) { testkit.Prepare(t, pool, sql) })
	}
}
