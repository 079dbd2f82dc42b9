package deploy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
)

// TestTheFleetRunsWithTheLeastRights runs every binary, command and subscriber with the login and
// the NATS user of docs/security.md. Each does all its work once, and no server refuses anything.
// Then the test tries all forbidden statements and subjects, and the servers refuse every one.
func TestTheFleetRunsWithTheLeastRights(t *testing.T) {
	f := newFleet(t)
	for _, who := range binaries {
		f.start(who)
	}
	token := strings.TrimSpace(f.tidings("token", "create", "--tenant", "7", "--name", "web"))
	other := strings.TrimSpace(f.tidings("token", "create", "--tenant", "8", "--name", "web"))
	live, err := f.connect("t7_plain", nil).SubscribeSync("live.t7.>")
	if err != nil {
		t.Fatal(err)
	}
	stopService := f.service()
	f.follow(other, 1, 2)
	f.follow(token, 1, 2)
	if m, err := live.NextMsg(time.Minute); err != nil ||
		!strings.HasPrefix(m.Subject, "events.0.t7.") && m.Subject != "live.t7.follow.created" {
		t.Errorf("the live feed sends %v, %v", m, err)
	}
	f.durable("EVENTS-0", 1)
	if status := f.request(token, http.MethodPost, "/v1/posts/100/comments", `{"author_id": "7", "body": "hello"}`,
		nil); status != http.StatusCreated {
		t.Errorf("comment: %d", status)
	}
	f.restartRelay(token)
	f.rotate(token)
	f.operate(token)
	stopService()
	for who, p := range f.procs {
		resp, err := f.client.Get("http://" + p.ops + "/metrics") // the answer needs PostgreSQL and NATS
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err != nil || resp.StatusCode != http.StatusOK ||
			!strings.Contains(string(body), `tidings_build_info{binary="`+who+`",`) {
			t.Errorf("metrics of %s: status %d, %v", who, resp.StatusCode, err)
		}
		f.permitted(who, p.Log())
	}
	f.refuse()
}

// follow writes an edge and waits until the projection has it.
func (f *fleet) follow(token string, from, to int64) {
	f.t.Helper()
	if status := f.request(token, http.MethodPut, fmt.Sprintf("/v1/follows/%d/%d", from, to), "", nil); status != http.StatusCreated {
		f.t.Fatalf("follow: status %d", status)
	}
	testkit.Eventually(f.t, fmt.Sprintf("user %d to have the follower %d", to, from), func() (bool, error) {
		var page struct {
			Items []struct {
				ID event.ID `json:"id"`
			} `json:"items"`
		}
		status := f.request(token, http.MethodGet, fmt.Sprintf("/v1/users/%d/followers", to), "", &page)
		if len(page.Items) == 0 {
			return false, fmt.Errorf("status %d, %+v", status, page)
		}
		return true, nil
	})
}

// service runs a handler of package subscribe that always fails, so its events become dead letters.
// stop waits for one and ends it.
func (f *fleet) service() (stop func()) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	denied, done, got := make(chan error, 100), make(chan error, 1), make(chan struct{}, 100)
	nc := f.connect("svc", denied)
	testkit.Eventually(f.t, "a stream", func() (bool, error) {
		js, err := jetstream.New(f.connect("operator", nil))
		if err == nil {
			_, err = js.Stream(f.t.Context(), "EVENTS-0")
		}
		return err == nil, err
	})
	f.tidings("nats", "durable", "--name", "svc", "--filter", "follow.*")
	go func() {
		done <- subscribe.Handle(ctx, nc, "svc", "follow.*", func(context.Context, subscribe.Event[event.Edge]) error {
			got <- struct{}{}
			return errors.New("never")
		}, subscribe.Attempts(1), subscribe.Log(testkit.Logger(f.t)))
	}()
	return func() {
		<-got
		operator := f.connect("operator", denied)
		letters, err := subscribe.HandlerDeadLetters(operator)
		if err != nil {
			f.t.Fatal(err)
		}
		testkit.Eventually(f.t, "a dead letter", func() (bool, error) {
			all, err := postgres.Collect(letters.List(f.t.Context(), "svc-follow", 0))
			return len(all) > 0, err
		})
		cancel()
		if err := <-done; err != nil {
			f.t.Error(err)
		}
		select {
		case err := <-denied:
			f.t.Errorf("NATS refused a request of package subscribe: %v", err)
		default:
		}
	}
}

// durable creates the tenant's durable consumer as the operator, and reads so many events through
// it as the tenant.
func (f *fleet) durable(stream string, events int) {
	f.t.Helper()
	f.tidings("nats", "durable", "--name", "mailer", "--tenant", "7", "--filter", "follow.created")
	denied := make(chan error, 100)
	js, err := jetstream.New(f.connect("t7_mailer", denied))
	if err != nil {
		f.t.Fatal(err)
	}
	c, err := js.Consumer(f.t.Context(), stream, "t7_mailer")
	if err != nil {
		f.t.Fatal(err)
	}
	batch, err := c.Fetch(events, jetstream.FetchMaxWait(time.Minute))
	if err != nil {
		f.t.Fatal(err)
	}
	n := 0
	for m := range batch.Messages() {
		n++
		if err := m.DoubleAck(f.t.Context()); err != nil || !strings.Contains(m.Subject(), ".t7.") {
			f.t.Errorf("%s: %v", m.Subject(), err)
		}
	}
	if n != events || len(denied) > 0 {
		f.t.Errorf("the durable consumer of %s read %d events, want %d; NATS refused %d requests", stream, n, events, len(denied))
	}
}

// restartRelay kills the relay while it works, so the next relay must read the stream to learn what
// the first one published.
func (f *fleet) restartRelay(token string) {
	f.t.Helper()
	for to := range int64(20) {
		f.request(token, http.MethodPut, fmt.Sprintf("/v1/follows/1/%d", 1000+to), "", nil)
	}
	p := f.procs["relay"]
	p.Kill() // it may have published rows that it has not marked
	f.permitted("relay", p.Log())
	// Takes back the last mark. The next relay then finds a published message without a mark, and
	// catches up.
	if _, err := f.db.Pool(f.t, postgres.RoleOwner).Exec(f.t.Context(), `
		WITH last AS (SELECT stream_seq, id FROM outbox_messages WHERE partition = 0 ORDER BY stream_seq DESC LIMIT 1),
		     tail AS (UPDATE outbox_partitions SET tail_seq = last.stream_seq - 1, floor_id = 0 FROM last WHERE partition = 0)
		UPDATE outbox_messages m SET processed_at = NULL, stream_seq = NULL, partition = NULL FROM last WHERE m.id = last.id`); err != nil {
		f.t.Fatal(err)
	}
	f.start("relay")
	f.follow(token, 1, 3)
}

// rotate gives every NATS user another password until NATS has refused the clients, and then
// restores the passwords.
func (f *fleet) rotate(token string) {
	f.t.Helper()
	probe := f.connect("operator", nil)
	f.setPasswords("wrong-")
	f.b.Reload(f.t, f.users)
	before := probe.Stats().Reconnects
	testkit.Eventually(f.t, "refusals", func() (bool, error) { return probe.Stats().Reconnects >= before+8, nil })
	// The relay never reconnects a connection, so its log reports a refusal in other words.
	testkit.Eventually(f.t, "NATS to refuse every binary except the relay", func() (bool, error) {
		for _, who := range binaries {
			if p := f.procs[who]; who != "relay" && !strings.Contains(strings.ToLower(p.Log()), "authorization violation") {
				return false, fmt.Errorf("the log of %s has no refusal", who)
			}
		}
		return true, nil
	})
	f.setPasswords("")
	f.b.Reload(f.t, f.users)
	f.follow(token, 1, 4)
	f.tidings("verify", "--wait", "60s")
}

// operate runs the commands that change streams, and the commands that read all tables and streams.
func (f *fleet) operate(token string) {
	f.t.Helper()
	f.tidings("partitions", "resize", "--to", "2", "--yes")
	f.follow(token, 1, 5)
	f.follow(token, 1, 6)
	f.tidings("verify", "--wait", "60s")
	js, err := jetstream.New(f.connect("operator", nil))
	if err != nil {
		f.t.Fatal(err)
	}
	if err := js.DeleteStream(f.t.Context(), "EVENTS-1"); err != nil {
		f.t.Fatal(err)
	}
	f.tidings("repair", "stream", "--yes")
	f.follow(token, 1, 7)
	f.run(append(f.env("operator"), "DATABASE_URL="+f.db.URL), "replay", "--consumer", "followercounts", "--yes")
	f.follow(token, 1, 8)
	f.tidings("erase", "--tenant", "7", "--author", "7", "--wait", "60s", "--yes")
	f.tidings("stream", "configure", "--max-age", "700h", "--yes")
	f.tidings("verify", "--wait", "60s")
	f.tidings("status")
	// Exit code 3: doctor finds that the PostgreSQL of a test runs without fsync.
	if out, code := f.try(f.env("operator"), "doctor"); code != 0 && code != 3 {
		f.t.Errorf("doctor ends with exit code %d\n%s", code, out)
	}
}

// refuse tries every forbidden subject and statement.
func (f *fleet) refuse() {
	f.t.Helper()
	for user, subjects := range mustNotPublish {
		f.refused(user, subjects, func(nc *nats.Conn, subject string) error { return nc.Publish(subject, nil) })
	}
	for user, subjects := range mustNotSubscribe {
		f.refused(user, subjects, func(nc *nats.Conn, subject string) error { _, err := nc.SubscribeSync(subject); return err })
	}
	for login, statements := range mustNotRun {
		for _, sql := range statements {
			f.refusedBy(login, sql)
		}
	}
}

// refused tries each subject as a NATS user, and fails the test if NATS permits one.
func (f *fleet) refused(user string, subjects []string, try func(*nats.Conn, string) error) {
	f.t.Helper()
	denied := make(chan error, len(subjects))
	nc := f.connect(user, denied)
	for _, subject := range subjects {
		if err := errors.Join(try(nc, subject), nc.Flush()); err != nil {
			f.t.Fatal(err)
		}
		select {
		case err := <-denied:
			if !strings.Contains(err.Error(), `"`+subject+`"`) {
				f.t.Errorf("%s, %s: %v", user, subject, err)
			}
		case <-time.After(30 * time.Second):
			f.t.Errorf("NATS permits %s to use %s", user, subject)
		}
	}
}

const anEvent = "events.0.t7.follow.created"

func api(verbs ...string) (all []string) {
	for _, v := range verbs {
		all = append(all, "$JS.API."+v)
	}
	return all
}

var mustNotPublish = map[string][]string{
	"relay": append(api("STREAM.NAMES", "CONSUMER.CREATE.EVENTS-0.x", "CONSUMER.MSG.NEXT.EVENTS-0.x",
		"CONSUMER.DELETE.EVENTS-0.x", "STREAM.DELETE.EVENTS-0", "STREAM.PURGE.EVENTS-0",
		"STREAM.MSG.DELETE.EVENTS-0"), "live.t7.follow.created", "_INBOX_api.x", "$KV.EVENTS-erased.x"),
	"api": append(api("STREAM.UPDATE.EVENTS-0", "STREAM.DELETE.EVENTS-0", "STREAM.MSG.GET.EVENTS-0", "DIRECT.GET.EVENTS-0",
		"CONSUMER.CREATE.EVENTS-0.x", "STREAM.CREATE.X"),
		anEvent, "live.t7.follow.created"),
	"consumer": append(api("CONSUMER.CREATE.EVENTS-0.x.events.>", "STREAM.CREATE.X", "STREAM.UPDATE.EVENTS-0", "STREAM.DELETE.EVENTS-0",
		"STREAM.PURGE.EVENTS-0", "STREAM.MSG.DELETE.EVENTS-0", "STREAM.SNAPSHOT.EVENTS-0"),
		anEvent, "tidings.wake", "live.t7.follow.created"),
	"operator": {"live.t7.follow.created", "$SYS.REQ.SERVER.PING", "_INBOX_relay.x"},
	"t7_plain": append(api("INFO", "STREAM.NAMES", "CONSUMER.CREATE.EVENTS-0.t7_plain"), anEvent, "live.t7.follow.created",
		"tidings.wake"),
	"t7_mailer": append(api("STREAM.INFO.EVENTS-0", "CONSUMER.CREATE.EVENTS-0.t7_mailer", "CONSUMER.DURABLE.CREATE.EVENTS-0.t7_mailer",
		"CONSUMER.CREATE.EVENTS-0.t7_mailer.events.*.t7.follow.created", "CONSUMER.MSG.NEXT.EVENTS-0.svc-follow",
		"CONSUMER.INFO.EVENTS-0.svc-follow", "CONSUMER.DELETE.EVENTS-0.t7_mailer", "STREAM.MSG.GET.EVENTS-0"),
		"$JS.ACK.EVENTS-0.svc-follow.1.1.1.1.1", "EVENTS-dead.letter.svc-follow", anEvent, "live.t7.follow.created"),
	"svc": append(api("STREAM.DELETE.EVENTS-dead", "STREAM.CREATE.EVENTS-dead", "STREAM.MSG.DELETE.EVENTS-dead",
		"CONSUMER.CREATE.EVENTS-0.svc-follow.events.*.*.follow.*", "CONSUMER.DELETE.EVENTS-0.t7_mailer"),
		"EVENTS-dead.letter.other", anEvent),
}

var mustNotSubscribe = map[string][]string{
	"relay":     {"_INBOX_api.>", "live.>", "events.>", ">"},
	"api":       {"_INBOX_relay.>", "live.>", "events.>", ">", "tidings.wake"},
	"consumer":  {"_INBOX_relay.>", "live.>", "events.>", "tidings.wake"},
	"operator":  {"_INBOX_consumer.>", "events.>", ">"},
	"t7_plain":  {"live.t8.>", "live.>", "live.*.follow.created", "events.>", "_INBOX.>", "_INBOX_api.>"},
	"t7_mailer": {"live.t7.>", "live.t8.follow.created", "_INBOX_t7_plain.>", "_INBOX.>", "events.*.t7.>"},
	"svc":       {"live.*.comment.created", "_INBOX_t7_mailer.>"},
}

// everywhere has statements that PostgreSQL must refuse to every login.
var everywhere = []string{`CREATE TABLE mine (x int)`, `CREATE ROLE mine`, `DROP TABLE edge_lists`,
	`ALTER TABLE edges DISABLE ROW LEVEL SECURITY`, `SELECT pg_read_file('PG_VERSION')`}

var mustNotRun = map[string][]string{
	"api": slices.Concat(everywhere, []string{`SELECT token_hash FROM api_tokens`, `SELECT FROM api_tokens`,
		`INSERT INTO api_tokens DEFAULT VALUES`, `UPDATE outbox_messages SET payload = '{}'`,
		`DELETE FROM edges`, `UPDATE outbox_partitions SET tail_seq = 0`, `DELETE FROM leases`, `SELECT outbox_range_drop(1)`,
		`SET ROLE tidings_system`, `SET ROLE tidings_relay`}),
	"relay": slices.Concat(everywhere, []string{`SELECT FROM edges`, `UPDATE edges SET version = 1`, `INSERT INTO edges DEFAULT VALUES`,
		`SELECT FROM children`, `SELECT FROM api_tokens`,
		`UPDATE outbox_messages SET payload = '{}'`, `UPDATE outbox_messages SET tenant_id = 1`, `DELETE FROM outbox_messages_dlq`,
		`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (7, 'follow', 2, 'created', '{}')`,
		`DELETE FROM outbox_messages_archive`, `SELECT FROM edge_lists`, `SELECT outbox_range_drop(1)`, `SET ROLE tidings_system`,
		`SET ROLE tidings_api`, `DELETE FROM leases`}),
	"followercounts": slices.Concat(everywhere, []string{`SELECT FROM edges`, `SELECT FROM children`, `SELECT FROM outbox_messages`,
		`INSERT INTO outbox_messages DEFAULT VALUES`,
		`SELECT FROM api_tokens`, `UPDATE projection_kinds SET object = '{}'`, `DELETE FROM consumer_dead_letters`,
		`DELETE FROM consumer_pauses`, `DELETE FROM leases`, `UPDATE leases SET kind = 'x'`,
		`INSERT INTO lease_members VALUES ('relay', 'x', 'infinity')`, `SELECT drop_history('follow')`, `SET ROLE tidings_system`}),
	"verify": slices.Concat(everywhere, []string{`UPDATE edges SET version = 1`, `DELETE FROM outbox_messages`,
		`SELECT token_hash FROM api_tokens`, `UPDATE edge_lists SET version = 1`, `SET ROLE tidings_system`}),
	"archiver": slices.Concat(everywhere, []string{`SET ROLE tidings_api`, `DELETE FROM kinds`}),
	"writer": slices.Concat(everywhere, []string{`SELECT payload FROM outbox_messages`, `SELECT FROM api_tokens`,
		`SELECT FROM edge_lists`, `SET ROLE tidings_system`}),
}
