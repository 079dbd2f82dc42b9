package docs_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/migrations"
)

// move rehearses a page that moves a service to Tidings, or away from it. The service has the table
// orders, whose rows count their own changes.
type move struct {
	t      *testing.T
	db     *testkit.DB
	owner  *pgxpool.Pool
	login  string // of the service
	broker *testkit.Broker
	js     jetstream.JetStream
	blocks []string // of the page
}

// orders is how many orders the service has.
const orders = 3

// startMove installs the outbox alone in db, as your-tables.md does, and makes the tables and the
// login of the service.
func startMove(t *testing.T, page string, db *testkit.DB) *move {
	t.Helper()
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	b := testkit.NATS(t)
	m := &move{t: t, db: db, owner: db.Pool(t, postgres.RoleOwner), broker: b,
		login: "shop_app_" + strings.ToLower(rand.Text()[:12])} // logins belong to the server, not to the test's database
	if m.js, err = jetstream.New(b.Connect(t)); err != nil {
		t.Fatal(err)
	}
	text := strings.ReplaceAll(string(content), "shop_app", m.login)
	for _, block := range regexp.MustCompile("(?s)```(?:sql|sh|yaml)\n(.*?)```").FindAllStringSubmatch(text, -1) {
		m.blocks = append(m.blocks, block[1])
	}
	if _, err := migrations.UpIn(t.Context(), db.URL, migrations.Outbox, "tidings", testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	m.exec(fmt.Sprintf(`CREATE ROLE %[1]s LOGIN PASSWORD 'x';
		CREATE TABLE orders (id bigint PRIMARY KEY, version bigint NOT NULL DEFAULT 0);
		INSERT INTO orders SELECT generate_series(1, %[2]d);
		GRANT SELECT, UPDATE ON orders TO %[1]s`, m.login, orders))
	t.Cleanup(func() {
		if _, err := m.owner.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP OWNED BY %[1]s; DROP ROLE %[1]s", m.login),
			pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Error(err)
		}
	})
	return m
}

// declare does the page's steps of a declaration: the file, and the command that names it.
func (m *move) declare(file, command string) {
	m.t.Helper()
	if want := "tidings upstream add order --file order.yaml --login " + m.login + "\n"; command != want {
		m.t.Fatalf("the page runs %q, want %q", command, want)
	}
	declare(m.t, m.db.In(m.t, "tidings"), file, m.login)
}

// declare does what `tidings upstream add --file FILE --login LOGIN` does.
func declare(t *testing.T, db *testkit.DB, file, login string) {
	t.Helper()
	u, err := kindfile.ReadUpstream([]byte(file))
	if err != nil {
		t.Fatal(err)
	}
	u.Logins = []string{login}
	if _, err := declared.Add(t.Context(), db.Pool(t, postgres.RoleSystem),
		declared.Request{Upstream: *u, Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	testkit.UpstreamLogin(t, db, login)
}

func (m *move) exec(sql string) {
	m.t.Helper()
	if _, err := m.owner.Exec(m.t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		m.t.Fatalf("%s: %v", sql, err)
	}
}

// block takes the page's next block, which must contain text.
func (m *move) block(text string) string {
	m.t.Helper()
	if len(m.blocks) == 0 || !strings.Contains(m.blocks[0], text) {
		m.t.Fatalf("the page's next block lacks %q: %q", text, m.blocks)
	}
	b := m.blocks[0]
	m.blocks = m.blocks[1:]
	return b
}

// run executes the page's next block. If it does not get a lock in time, run repeats it, as the
// page says.
func (m *move) run(text string) {
	m.t.Helper()
	code := m.block(text)
	conn, err := m.owner.Acquire(m.t.Context())
	if err != nil {
		m.t.Fatal(err)
	}
	defer conn.Release()
	testkit.Eventually(m.t, text, func() (bool, error) {
		_, err := conn.Exec(m.t.Context(), code, pgx.QueryExecModeSimpleProtocol)
		if refused, ok := errors.AsType[*pgconn.PgError](err); ok && refused.Code == "55P03" { // lock_not_available
			_, err := conn.Exec(m.t.Context(), "ROLLBACK")
			return false, err
		}
		if err != nil {
			m.t.Fatalf("%s: %v", code, err)
		}
		return true, nil
	})
}

// untilZero repeats the page's next block, a query, until its answer is 0.
func (m *move) untilZero(text string) {
	m.t.Helper()
	code := m.block(text)
	testkit.Eventually(m.t, text, func() (bool, error) {
		var n int
		err := m.owner.QueryRow(m.t.Context(), code).Scan(&n)
		return n == 0, err
	})
}

// write lets two writers of the service change orders until stop. Each transaction changes an
// order, and then executes the writer's code with the order's id and version: a statement a line.
func (m *move) write(codes ...string) (stop func()) {
	m.t.Helper()
	u, err := url.Parse(m.db.URL)
	if err != nil {
		m.t.Fatal(err)
	}
	u.User = url.UserPassword(m.login, "x")
	var stops []func()
	for i := range 2 {
		code := codes[i%len(codes)]
		pool, err := pgxpool.New(m.t.Context(), u.String())
		if err != nil {
			m.t.Fatal(err)
		}
		m.t.Cleanup(pool.Close)
		stops = append(stops, system.Start(m.t, func(ctx context.Context) error {
			for tick := time.Tick(2 * time.Millisecond); ; {
				select {
				case <-ctx.Done():
					return nil
				case <-tick:
				}
				err := pgx.BeginFunc(context.WithoutCancel(ctx), pool, func(tx pgx.Tx) error {
					var id, version int64
					if err := tx.QueryRow(ctx, `UPDATE orders SET version = version + 1 WHERE id = $1 RETURNING id, version`,
						1+time.Now().UnixNano()/1000%orders).Scan(&id, &version); err != nil {
						return err
					}
					for statement := range strings.Lines(code) {
						if _, err := tx.Exec(ctx, statement, id, version); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil && ctx.Err() == nil {
					return err
				}
			}
		}))
	}
	return func() {
		for _, s := range stops {
			s()
		}
	}
}

// changed waits until the service has made some more changes.
func (m *move) changed() {
	m.t.Helper()
	sum := func() (n int64, err error) {
		err = m.owner.QueryRow(m.t.Context(), `SELECT sum(version)::bigint FROM orders`).Scan(&n)
		return n, err
	}
	before, err := sum()
	if err != nil {
		m.t.Fatal(err)
	}
	testkit.Eventually(m.t, "changes of orders", func() (bool, error) {
		now, err := sum()
		return now >= before+20, err
	})
}

// relay starts a relay.
func (m *move) relay() (stop func()) {
	m.t.Helper()
	pool := m.db.In(m.t, "tidings").Pool(m.t, postgres.RoleRelay)
	return system.Start(m.t, system.Relay(m.t, system.RelayConfig(), pool, m.broker.Config()).Run)
}

// published is an event on a stream: a version of an order.
type published struct {
	ID, Version int64
	at          time.Time
}

// check fails the test unless the streams together have each version of each order once, and in
// order of the time at which they were stored.
func (m *move) check(streams ...string) {
	m.t.Helper()
	var all []published
	for _, name := range streams {
		s, err := m.js.Stream(m.t.Context(), name)
		if err != nil {
			m.t.Fatal(err)
		}
		for seq := s.CachedInfo().State.FirstSeq; seq <= s.CachedInfo().State.LastSeq; seq++ {
			msg, err := s.GetMsg(m.t.Context(), seq)
			if err != nil {
				m.t.Fatal(err)
			}
			e := published{at: msg.Time}
			if err := json.Unmarshal(msg.Data, &e); err != nil {
				m.t.Fatalf("%s: %v", msg.Data, err)
			}
			if e.ID > 0 { // not a heartbeat, and not the marker of a page
				all = append(all, e)
			}
		}
	}
	slices.SortStableFunc(all, func(a, b published) int { return a.at.Compare(b.at) })
	got := map[int64]int64{}
	for i, e := range all {
		if e.Version != got[e.ID]+1 {
			m.t.Fatalf("event %d of %d is version %d of order %d, after version %d", i, len(all), e.Version, e.ID, got[e.ID])
		}
		got[e.ID] = e.Version
	}
	rows, _ := m.owner.Query(m.t.Context(), `SELECT id, version FROM orders`)
	var id, version int64
	if _, err := pgx.ForEachRow(rows, []any{&id, &version}, func() error {
		if got[id] != version || version < 10 {
			m.t.Errorf("order %d has version %d, and its last event %d", id, version, got[id])
		}
		return nil
	}); err != nil {
		m.t.Fatal(err)
	}
	if len(m.blocks) > 0 {
		m.t.Errorf("the test runs no %q", m.blocks)
	}
}

// poll is the loop of from-your-own-outbox.md: it publishes the rows of a table, and marks them.
func (m *move) poll(ctx context.Context) error {
	for tick := time.Tick(5 * time.Millisecond); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick:
		}
		err := pgx.BeginFunc(m.t.Context(), m.owner, func(tx pgx.Tx) error {
			rows, _ := tx.Query(m.t.Context(), `SELECT id, topic, payload::text FROM outbox WHERE sent_at IS NULL
				ORDER BY id LIMIT 50 FOR UPDATE`)
			batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
				ID             int64
				Topic, Payload string
			}])
			if err != nil {
				return err
			}
			for _, r := range batch {
				if _, err := m.js.Publish(m.t.Context(), r.Topic, []byte(r.Payload)); err != nil {
					return err
				}
				if _, err := tx.Exec(m.t.Context(), `UPDATE outbox SET sent_at = now() WHERE id = $1`, r.ID); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
}

// TestTheMoveFromAnOutboxOfOnesOwn runs from-your-own-outbox.md forth and back.
func TestTheMoveFromAnOutboxOfOnesOwn(t *testing.T) {
	t.Parallel()
	m := startMove(t, "from-your-own-outbox.md", testkit.EmptyPostgres(t))
	if _, err := m.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OLD", Subjects: []string{"order.>"}}); err != nil {
		t.Fatal(err)
	}
	m.run("CREATE TABLE outbox")
	m.exec("GRANT INSERT ON outbox TO " + m.login)
	const oldCode = `INSERT INTO outbox (topic, payload) VALUES ('order.paid', ` +
		`jsonb_build_object('id', $1::bigint, 'version', $2::bigint))`
	stopWriters := m.write(oldCode)
	stopPoller := system.Start(t, m.poll)
	m.changed()

	m.declare(m.block("upstream: order"), m.block("tidings upstream add"))
	m.run("CREATE TRIGGER")
	m.changed()
	m.untilZero("FROM outbox")
	stopPoller()
	m.changed()
	stopRelay := m.relay()
	m.changed()
	newCode := strings.NewReplacer("\n", " ", ";", "", "'7'", "$1::bigint::text", `'{"id": 7, "version": 2}'`,
		"jsonb_build_object('id', $1::bigint, 'version', $2::bigint)").Replace(m.block("INSERT INTO tidings.outbox_messages"))
	stopWriters()
	stopWriters = m.write(oldCode, newCode) // instance by instance
	m.changed()
	stopWriters()
	stopWriters = m.write(oldCode)

	m.run("DROP TRIGGER")
	m.changed()
	m.untilZero("FROM tidings.outbox_messages")
	stopRelay()
	stopPoller = system.Start(t, m.poll)
	m.changed()
	stopWriters()
	testkit.Eventually(t, "an empty outbox", func() (empty bool, err error) {
		err = m.owner.QueryRow(t.Context(), `SELECT NOT EXISTS (SELECT FROM outbox WHERE sent_at IS NULL)`).Scan(&empty)
		return empty, err
	})
	stopPoller()
	m.check("OLD", m.broker.Config().StreamName(0))
}
