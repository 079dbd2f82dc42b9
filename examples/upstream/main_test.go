package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// login runs setup.sql and returns the login's URL. The login has a name of its own, because all
// databases of a server share their logins.
func login(t *testing.T, db *testkit.DB) string {
	t.Helper()
	content, err := os.ReadFile("setup.sql")
	if err != nil {
		t.Fatal(err)
	}
	name := "bookmarks_" + strings.ToLower(rand.Text()[:12])
	owner := db.Pool(t, postgres.RoleOwner)
	t.Cleanup(func() {
		if _, err := owner.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP OWNED BY %s; DROP ROLE %[1]s", name),
			pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Error(err)
		}
	})
	file, err := os.ReadFile("bookmark.yaml")
	if err != nil {
		t.Fatal(err)
	}
	order, err := kindfile.ReadUpstream(file)
	if err != nil {
		t.Fatal(err)
	}
	order.Logins = []string{name}
	if _, err := declared.Add(t.Context(), db.Pool(t, postgres.RoleSystem),
		declared.Request{Upstream: *order, Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	made := testkit.UpstreamLogin(t, db, name)
	setup := strings.ReplaceAll(string(content), "bookmarks_service", name)
	if _, err := owner.Exec(t.Context(), setup, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, made.Password)
	return u.String()
}

// publish runs a relay on the database until the test ends, and returns a reader of its stream.
func publish(t *testing.T, db *testkit.DB) jetstream.Consumer {
	t.Helper()
	nats := testkit.NATS(t)
	js := system.Streams(t, nats)
	system.Start(t, system.Relay(t, system.RelayConfig(), db.Pool(t, postgres.RoleSystem), nats.Config()).Run)
	consumer, err := js.OrderedConsumer(t.Context(), nats.Config().StreamName(0), jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return consumer
}

const (
	post    = "auth0|5f7c-12"
	users   = 5
	writers = 8
	changes = 3*users*writers + 1
)

// write lets writers save the same bookmarks at once. One rolls its change back, and one saves an
// unchanged note.
func write(t *testing.T, service string) {
	t.Helper()
	var g errgroup.Group
	for w := range writers {
		g.Go(func() error {
			for i := range 3 * users {
				args := []string{fmt.Sprint(i%users + 1), post, fmt.Sprintf("note %d of %d", i, w)}
				if err := run(t.Context(), service, args, io.Discard); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), service)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	undo := errors.New("undo")
	for _, end := range []error{undo, nil} {
		err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			_, err := save(t.Context(), tx, bookmark{UserID: "1", PostID: post, Note: "the last"})
			return errors.Join(err, end)
		})
		if !errors.Is(err, end) {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := run(t.Context(), service, []string{"1", post, "the last"}, &out); err != nil || out.String() != "version 0\n" {
		t.Fatalf("saving an unchanged note: %s%v", &out, err)
	}
	if err := run(t.Context(), service, []string{"7", "42"}, &out); err == nil {
		t.Error("it saves without a note")
	}
}

func TestEachChangeIsOneEventInItsOrder(t *testing.T) {
	db := testkit.Postgres(t)
	write(t, login(t, db))
	messages, err := publish(t, db).Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer messages.Stop()
	last := map[string]bookmark{}
	for n := range changes {
		m, err := messages.Next(jetstream.NextMaxWait(time.Minute))
		if err != nil {
			t.Fatalf("after %d events: %v", n, err)
		}
		var b bookmark
		if err := json.Unmarshal(m.Data(), &b); err != nil {
			t.Fatal(err)
		}
		want := "events.0.t1.bookmark.updated"
		if b.Version == 1 {
			want = "events.0.t1.bookmark.created"
		}
		if m.Subject() != want || b.PostID != post || b.Version != last[b.UserID].Version+1 {
			t.Errorf("%s: %+v behind %+v", m.Subject(), b, last[b.UserID])
		}
		kind := "com.example" + strings.TrimPrefix(want, "events.0.t1") + ".v1"
		if h := m.Headers(); h.Get(event.HeaderType) != kind || h.Get(event.HeaderSource) != "https://bookmarks.example.com" {
			t.Errorf("headers %v, want the names of the declaration", h)
		}
		last[b.UserID] = b
	}

	owner := db.Pool(t, postgres.RoleOwner)
	rows, _ := owner.Query(t.Context(), `SELECT user_id, post_id, note, version FROM bookmarks`)
	state, err := pgx.CollectRows(rows, pgx.RowToStructByPos[bookmark])
	if err != nil || len(state) != users {
		t.Fatalf("%d bookmarks, %v", len(state), err)
	}
	for _, b := range state {
		if b != last[b.UserID] {
			t.Errorf("the last event has %+v, the table %+v", last[b.UserID], b)
		}
	}
	var events int
	if err := owner.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages`).Scan(&events); err != nil || events != changes {
		t.Errorf("%d messages, want %d, %v", events, changes, err)
	}
}
