package erase

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/ops/replay"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/threadcache"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestARunningReplayStopsAnErasureButNoDryRun: a dry run changes nothing, so it needs no lease and
// no lock.
func TestARunningReplayStopsAnErasureButNoDryRun(t *testing.T) {
	truth, projection, nats := testkit.Postgres(t), testkit.Postgres(t), testkit.NATS(t)
	js, err := jetstream.New(nats.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, nats.Config(), broker.Partition{LastSlot: event.Slots - 1},
		testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	d := Deps{Deps: erasure.Deps{Truth: truth.Pool(t, postgres.RoleSystem), Projections: projection.Pool(t, postgres.RoleSystem),
		Kinds: kinds.Builtin(), Fleet: []projections.Projection{threadcache.New(kinds.Builtin)}, JetStream: js, Broker: nats.Config()},
		ProjectionsURL: projection.URL,
		Postgres:       postgres.Config{MaxConns: 4, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute}}
	run := func(dry bool) error {
		_, err := Run(t.Context(), d, erasure.Options{TenantID: 1, AuthorID: "7", Actor: "a", DryRun: dry})
		return err
	}
	running, err := replay.Exclude(t.Context(), replay.Deps{URL: d.ProjectionsURL, Postgres: d.Postgres}, d.Fleet...)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(true); err != nil {
		t.Errorf("a dry run: %v", err)
	}
	if err := run(false); !errors.Is(err, erasure.ErrUnfinished) || !errors.Is(err, replay.ErrRunning) {
		t.Errorf("an erasure: %v, want that a replay is running", err)
	}
	if err := running.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := run(false); err != nil {
		t.Errorf("after the replay: %v", err)
	}
}

// TestTheFilesLoseWhatThePersonWroteAndKeepTheRest: each row is of the person as its author.
func TestTheFilesLoseWhatThePersonWroteAndKeepTheRest(t *testing.T) {
	db, dir, ctx := testkit.Postgres(t), t.TempDir(), t.Context()
	truth := db.Pool(t, postgres.RoleSystem)
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, `CREATE TABLE outbox_messages_archived PARTITION OF outbox_messages_archive
		FOR VALUES FROM (1) TO (50000001)`); err != nil {
		t.Fatal(err)
	}
	if _, err := truth.Exec(ctx, `INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type,
		event_version, payload, occurred_at, available_at, processed_at, attempts, event_id, stream_seq, inserted_at, partition)
		SELECT g, 1, 'comment', g, w, 1, jsonb_build_object('author_id', '7', 'body', w || ' text'), now(), now(), now(), 0,
		       md5(g::text)::uuid, 100 + g, now(), 0
		  FROM unnest('{erase,off,keep,damaged}'::text[]) WITH ORDINALITY AS u(w, g)`); err != nil {
		t.Fatal(err)
	}
	fence := func(context.Context, pgx.Tx) error { return nil }
	s := coldstore.New(truth, "file://"+dir, fence, nil, nil)
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	if e, err := s.Export(ctx, outbox.Range{From: 1, To: 50_000_001, FirstAt: time.Now()}); err != nil || e.Rows != 4 {
		t.Fatalf("%+v, %v", e, err)
	}
	damaged := errors.New("damaged")
	run := func(dryRun bool) (erasure.ColdReport, error) {
		return cold(truth, fence)(ctx, erasure.ColdRequest{TenantID: 1, Person: "7", DryRun: dryRun,
			Redact: func(_, eventType string, payload []byte) ([]byte, bool, error) {
				switch {
				case eventType == "damaged":
					return []byte(`{}`), false, damaged
				case eventType == "keep" || !bytes.Contains(payload, []byte("text")):
					return nil, false, nil
				}
				return []byte(`{"author_id": "7"}`), eventType == "off", nil
			}})
	}
	if r, err := run(true); r.Rows != 2 || !errors.Is(err, damaged) || !strings.Contains(text(t, dir), "erase text") {
		t.Errorf("a dry run: %+v, %v", r, err)
	}
	if r, err := run(false); r.Rows != 2 || !errors.Is(err, damaged) {
		t.Errorf("%+v, %v", r, err)
	}
	left := text(t, dir)
	for want, times := range map[string]int{"erase text": 0, "off text": 0, "keep text": 1, "damaged text": 1,
		`"101"`: 1, `"102"`: 0, `"103"`: 1} {
		if got := strings.Count(left, want); got != times {
			t.Errorf("the files have %s %d times, want %d", want, got, times)
		}
	}
}

// text returns the content of the compressed files.
func text(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*", "*", "*.gz"))
	if err != nil {
		t.Fatal(err)
	}
	var all bytes.Buffer
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		r, err := gzip.NewReader(bytes.NewReader(b))
		if err == nil {
			_, err = io.Copy(&all, r)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return all.String()
}
