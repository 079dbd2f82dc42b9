//go:build faults

package endtoend_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
)

// attacked is a database of follows and of two upstreams, order and invoice, with a relay and a
// consumer. The login "orders" is hostile.
type attacked struct {
	t        *testing.T
	system   *pgxpool.Pool
	store    *store.Store
	counts   followercounts.Projection
	history  *history.Projection
	orders   *pgxpool.Pool // the hostile login
	invoices *pgxpool.Pool
	nats     *testkit.Broker
	js       jetstream.JetStream
	written  map[string][]int // numbers of the events by aggregate, in order
	follows  int
}

const declaration = `
upstream: %s
type_prefix: com.example
source: https://%[1]ss.example.com
tenants: [1, 9223372036854775807]
max_payload: 60000
events:
  placed:
    versions:
      1: {type: object, required: [n], properties: {n: {type: integer, minimum: 0}}}
`

func newAttacked(t *testing.T) *attacked {
	t.Helper()
	db := testkit.PostgresProcess(t).DB(t)
	a := &attacked{t: t, system: db.Pool(t, postgres.RoleSystem), store: store.New(db.Pool(t, postgres.RoleAPI), nil),
		counts: followercounts.New(kinds.Builtin), history: history.New(kinds.Builtin), nats: testkit.NATS(t), written: map[string][]int{}}
	a.js = system.Streams(t, a.nats)
	connect := func(name string) *pgxpool.Pool {
		t.Helper()
		made := testkit.UpstreamLogin(t, db, name+"s")
		if err := a.declare(name, made.Name); err != nil {
			t.Fatal(err)
		}
		u, err := url.Parse(db.URL)
		if err != nil {
			t.Fatal(err)
		}
		u.User = url.UserPassword(made.Name, made.Password)
		pool, err := pgxpool.New(t.Context(), u.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		return pool
	}
	a.orders, a.invoices = connect("order"), connect("invoice")
	system.Start(t, system.Relay(t, system.RelayConfig(), a.system, a.nats.Config()).Run)
	for _, p := range []consumers.Projection{a.counts, a.history} {
		deps := consumers.Deps{Pool: a.system, JetStream: a.js}
		system.Start(t, system.Consumer(t, system.ConsumerConfig(), deps, a.nats.Config(), p).Run)
	}
	return a
}

func (a *attacked) declare(name string, logins ...string) error {
	u, err := kindfile.ReadUpstream(fmt.Appendf(nil, declaration, name))
	if err != nil {
		return err
	}
	u.Logins = logins
	_, err = declared.Add(a.t.Context(), a.system, declared.Request{Upstream: *u, Actor: "test"})
	return err
}

// execer is a pool, a connection or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func (a *attacked) exec(on execer, sql string) {
	a.t.Helper()
	if _, err := on.Exec(a.t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		a.t.Fatalf("%s: %v", sql, err)
	}
}

// session returns a session of the hostile login, which ends with the test.
func (a *attacked) session() *pgx.Conn {
	a.t.Helper()
	conn, err := pgx.ConnectConfig(a.t.Context(), a.orders.Config().ConnConfig)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// place appends the next event of an aggregate. column is a further one, with its value in SQL. The
// value of payload is added to the event's own.
func (a *attacked) place(on execer, upstream string, tenant int64, id, column, value string) {
	a.t.Helper()
	payload := "'{}'"
	switch column {
	case "payload":
		payload, column, value = value, "", ""
	case "":
	default:
		column, value = ", "+column, ", "+value
	}
	of := fmt.Sprintf("%d/%s/%s", tenant, upstream, id)
	sql := fmt.Sprintf(`INSERT INTO public.outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload%s)
		VALUES ($1, $2, $3, 'placed', jsonb_build_object('n', $4::int) || (%s)::jsonb%s)`, column, payload, value)
	if _, err := on.Exec(a.t.Context(), sql, tenant, upstream, id, len(a.written[of])); err != nil {
		a.t.Fatalf("%s: %v", sql, err)
	}
	a.written[of] = append(a.written[of], len(a.written[of]))
}

// work lets everybody write, and waits until all of it is published and counted.
func (a *attacked) work() {
	a.t.Helper()
	for i := range 10 {
		a.place(a.invoices, "invoice", 1, fmt.Sprint(i%3), "", "")
		a.place(a.orders, "order", 1, fmt.Sprint(i%3), "", "")
		if _, err := a.store.PutEdges(a.t.Context(), 1, kinds.Builtin().Edges["follow"], []store.EdgeWrite{{
			Meta: store.Meta{Actor: "user:1"}, From: event.ID(fmt.Sprint(100 + a.follows)), To: event.ID(fmt.Sprint(i % 3))}}); err != nil {
			a.t.Fatal(err)
		}
		a.follows++
	}
	system.AwaitPublished(a.t, a.system)
	system.AwaitApplied(a.t, a.system, a.js, a.nats.Config(), a.counts.Name())
	if _, err := a.counts.Verify(a.t.Context(), a.system, a.system, func(d projections.Difference) { a.t.Errorf("%+v", d) }); err != nil {
		a.t.Fatal(err)
	}
	var counted int
	if err := a.system.QueryRow(a.t.Context(), `SELECT sum(incoming) FROM edge_counts WHERE kind = 'follow'`).Scan(&counted); err != nil ||
		counted != a.follows {
		a.t.Errorf("%d follows are counted, %v: want %d", counted, err, a.follows)
	}
}

const insert = `INSERT INTO public.outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload`

// shadowSQL makes, for the session alone, what the outbox reads and calls for its checks.
const shadowSQL = `
CREATE TEMP TABLE upstreams (tenant_id bigint, object jsonb, name text, version_state text);
INSERT INTO pg_temp.upstreams VALUES (0, '{"logins": ["orders"], "max_payload": 100, "id_pattern": ".",
  "events": {"placed": {"checks": {"1": {}}}}}', 'parcel', 'LATEST');
CREATE FUNCTION pg_temp.upstream_of(text) RETURNS jsonb LANGUAGE sql AS 'SELECT object FROM pg_temp.upstreams';
CREATE FUNCTION pg_temp.upstream_misfit(jsonb, jsonb, text) RETURNS text LANGUAGE sql AS 'SELECT NULL::text';
CREATE FUNCTION pg_temp.upstream_accepts(bigint, text, text, text, smallint, jsonb, integer, text) RETURNS boolean
  LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION pg_temp.is_kind(text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
SET search_path = pg_temp, public;
`

// illegal are statements of the hostile login, by the SQLSTATE of their refusal.
var illegal = map[string][]string{
	"23514": { // check_violation
		insert + `) VALUES (1, 'invoice', '7', 'placed', '{"n": 0}')`,
		insert + `) VALUES (1, 'follow', '7', 'created', '{"n": 0}')`,
		insert + `) VALUES (1, 'thread', '7', 'updated', '{"n": 0}')`,
		insert + `) VALUES (0, 'heartbeat', '0', 'beat', '{}')`,
		insert + `) VALUES (0, 'order', '7', 'placed', '{"n": 0}')`,
		insert + `) VALUES (2, 'order', '7', 'placed', '{"n": 0}')`,
		insert + `) VALUES (-1, 'order', '7', 'placed', '{"n": 0}')`,
		insert + `) VALUES (1, 'order', '7', 'person.erased', '{"n": 0}')`,
		insert + `) VALUES (1, 'order', '7', 'placed', '{"n": -1}')`,
		insert + `) VALUES (1, 'order', '7', 'placed', 'null')`,
		insert + `) VALUES (1, 'order', '7', 'placed', jsonb_build_object('n', 0, 'x', repeat('x', 60000)))`,
		insert + `) VALUES (1, 'order', repeat('x', 129), 'placed', '{"n": 0}')`,
		insert + `) VALUES (1, 'order', E'a\nb', 'placed', '{"n": 0}')`,
		insert + `) VALUES (1, 'order', '../7', 'placed', '{"n": 0}')`,
		insert + `) VALUES (1, 'order', '*', 'placed', '{"n": 0}')`,
		insert + `, trace_id) VALUES (1, 'order', '7', 'placed', '{"n": 0}', E'00-\r\nNats-Msg-Id: 1')`,
		insert + `, occurred_at) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 'infinity')`,
		shadowSQL + insert + `) VALUES (1, 'parcel', '7', 'placed', '{"n": 0}')`,
	},
	"22P05": {insert + `) VALUES (1, 'order', '7', 'placed', '{"n": 0, "x": "\u0000"}')`},
	"0A000": {`COPY public.outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) FROM STDIN`},
	"428C9": { // generated_always
		insert + `, slot) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 0)`,
		insert + `, payload_bytes) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 0)`,
	},
	"42501": { // insufficient_privilege
		insert + `, id) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 1)`,
		insert + `, event_id) VALUES (1, 'order', '7', 'placed', '{"n": 0}', gen_random_uuid())`,
		insert + `, inserted_at) VALUES (1, 'order', '7', 'placed', '{"n": 0}', '-infinity')`,
		insert + `, processed_at) VALUES (1, 'order', '7', 'placed', '{"n": 0}', now())`,
		insert + `, attempts) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 11)`,
		insert + `, behind) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 1)`,
		insert + `, partition) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 0)`,
		insert + `, stream_seq) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 1)`,
		insert + `, available_at) VALUES (1, 'order', '7', 'placed', '{"n": 0}', 'infinity')`,
		insert + `) VALUES (1, 'order', '7', 'placed', ('{"n": 0, "x": ' || repeat('[', 5000) || repeat(']', 5000) || '}')::jsonb)`,
		insert + `) VALUES (1, 'order', '7', 'placed', ('{"n": 0,"x":' || repeat('{"y":', 499) || '1' || repeat('}', 499) || '}')::jsonb)`,
		strings.Replace(insert, "outbox_messages", "outbox_messages_1", 1) + `) VALUES (1, 'order', '7', 'placed', '{"n": 0}')`,
		`SET row_security = off; ` + insert + `) VALUES (1, 'parcel', '7', 'placed', '{"n": 0}')`,
		`SET session_replication_role = replica`, `SET ROLE tidings_system`, `SET ROLE tidings_relay`, `SET ROLE tidings_api`,
		`SET SESSION AUTHORIZATION invoices`, `ALTER ROLE orders SUPERUSER`, `GRANT tidings_system TO orders`, `CREATE ROLE another`,
		`UPDATE outbox_messages SET payload = '{}'`, `DELETE FROM outbox_messages`, `TRUNCATE outbox_messages`,
		`SELECT id FROM outbox_messages FOR UPDATE`, `SELECT payload FROM outbox_messages`,
		`BEGIN; LOCK TABLE outbox_messages IN ACCESS SHARE MODE`,
		`SET tidings.tenant = 1; SELECT * FROM edges`, `UPDATE upstreams SET object = object || '{"tenants": [2]}'`,
		`UPDATE leases SET owner = 'me'`, `UPDATE outbox_partitions SET closing = true`, `DELETE FROM consumer_offsets`,
		`SELECT setval('outbox_messages_id_seq', 1)`, `ALTER SEQUENCE outbox_messages_id_seq CACHE 100`,
		`ALTER TABLE outbox_messages DISABLE ROW LEVEL SECURITY`, `DROP POLICY upstream_appends ON outbox_messages`,
		`CREATE INDEX ON outbox_messages (id)`, `CREATE TABLE public.t (a int)`, `CREATE SCHEMA s`,
		`CREATE FUNCTION public.upstream_of(text) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb'`,
		`SELECT outbox_range_cut(1000)`, `SELECT outbox_range_make(1, 2)`, `SELECT upstream_misfit('{}', '{}', '')`,
		`SELECT require_mark(true)`,
		`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename <> current_user`, `SELECT pg_reload_conf()`,
		`SELECT pg_read_file('postgresql.conf')`, `COPY (SELECT 1) TO PROGRAM 'true'`,
	},
}

func TestTheLoginOfAnUpstreamHarmsNobodyElse(t *testing.T) {
	a := newAttacked(t)
	a.work()
	for code, all := range illegal {
		for _, sql := range all {
			conn := a.session()
			_, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
			if e, ok := errors.AsType[*pgconn.PgError](err); !ok || e.Code != code {
				t.Errorf("%.300s: %v, want SQLSTATE %s", sql, err, code)
			}
			if err := conn.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}

	// What PostgreSQL lets every login do. Another transaction stays open after each event.
	odd := a.session()
	a.exec(odd, `SET synchronous_commit = off; SET quote_all_identifiers = on; SET TimeZone = 'Pacific/Kiritimati';
		SET DateStyle = 'German'; SET statement_timeout = 0; SET row_security = on; SELECT nextval('outbox_messages_id_seq');
		SELECT pg_notify('tidings', 'x'); SELECT lo_create(0); CREATE TEMP TABLE outbox_messages (id int); LISTEN tidings`)
	for column, values := range map[string][]string{
		"available_at": {`'-infinity'`, `'4700-01-01 BC'`, `now() - interval '10 years'`},
		"occurred_at":  {`'0001-01-01 00:00Z'`, `'9999-12-31 23:59:59.999999Z'`},
		"trace_id":     {`'ff-' || repeat('0', 32) || '-' || repeat('0', 16) || '-ff'`},
		"payload": {`('{"x": ' || repeat('[', 498) || '1' || repeat(']', 498) || '}')`, `'{"x": 1e-400, "y": 1e400}'`,
			`jsonb_build_object('x', repeat('x', 59900))`, `'{"actor": "user:1", "event_id": "<script>", "x": "\u0001\r\n\u2028"}'`},
	} {
		for _, value := range values {
			a.place(odd, "order", 1, "odd", column, value)
		}
	}
	a.place(odd, "order", 9223372036854775807, strings.Repeat("~", 128), "", "")
	if err := pgx.BeginFunc(t.Context(), odd, func(tx pgx.Tx) error {
		for range 500 {
			a.place(tx, "order", 1, "many", "", "")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	a.work()
	release := a.hold()
	a.work()
	release()
	a.work()
	a.fill()
	a.work()
	a.verify()
}

// fill lets a session of the hostile login take the room of all locks of the server, and end. Until
// then the server refuses statements and connections of everybody.
func (a *attacked) fill() {
	a.t.Helper()
	greedy := a.session()
	outOfMemory := func(err error) bool {
		e, ok := errors.AsType[*pgconn.PgError](err)
		return ok && e.Code == "53200"
	}
	testkit.Eventually(a.t, "the server to refuse a connection", func() (bool, error) {
		if _, err := greedy.Exec(a.t.Context(), `SELECT pg_advisory_lock(k) FROM generate_series(1, 1000000) k`); !outOfMemory(err) {
			return false, fmt.Errorf("a million locks: %w", err) // each time it also takes what others have freed
		}
		conn, err := pgx.ConnectConfig(a.t.Context(), a.orders.Config().ConnConfig)
		if err == nil {
			return false, conn.Close(a.t.Context())
		}
		return outOfMemory(err), nil
	})
	if err := greedy.Close(a.t.Context()); err != nil {
		a.t.Error(err)
	}
	testkit.Eventually(a.t, "the server to take connections again", func() (bool, error) {
		conn, err := pgx.ConnectConfig(a.t.Context(), a.orders.Config().ConnConfig)
		return err == nil && conn.Close(a.t.Context()) == nil, nil
	})
}

// hold lets sessions of the hostile login keep what PostgreSQL gives to every login: a transaction
// that has written, a snapshot, and the advisory locks of Tidings. It returns once the findings and
// metrics name them. release ends them, and the transaction commits.
func (a *attacked) hold() (release func()) {
	t := a.t
	reg := prometheus.NewRegistry()
	reg.MustRegister(postgres.NewSizesCollector(a.system, testkit.Logger(t)))
	late, err := a.session().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	a.place(late, "order", 1, "late", "", "")
	a.work()
	if held := testkit.Series(t, reg)["tidings_postgres_horizon_transactions session"]; held < 20 {
		t.Errorf("30 transactions began since one that stays open, but the horizon is %v behind", held)
	}

	snapshot := a.session()
	a.exec(snapshot, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(id) FROM outbox_messages`)
	locks := a.session()
	a.exec(locks, `SELECT pg_advisory_lock(4097083626), pg_advisory_lock(x'74647270'::bigint), pg_advisory_lock(x'74646e6d'::bigint),
		pg_advisory_lock(x'74647074'::bigint), pg_advisory_lock(hashtext('versioned.follow_history'), 1024)`)
	found, err := doctor.Database(t.Context(), a.system, "truth")
	if err != nil || !slices.ContainsFunc(found, func(f doctor.Finding) bool {
		return f.Check == "foreign-lock" && strings.Contains(f.What, "user orders")
	}) {
		t.Errorf("the doctor finds %v, %v: want the login that holds locks", found, err)
	}
	if _, _, err := outbox.Exclusive(t.Context(), a.system, "repair"); !errors.Is(err, outbox.ErrNotExclusive) ||
		!strings.Contains(err.Error(), "the login orders") {
		t.Errorf("a repair: %v", err)
	}
	changed := make(chan error)
	go func() { changed <- a.declare("invoice", "invoices", "audit") }()
	testkit.Eventually(t, "a change of a declaration to wait", func() (bool, error) {
		all, err := postgres.ReadBlocked(t.Context(), a.system)
		return slices.ContainsFunc(all, func(b postgres.Blocked) bool { return b.By.User == "orders" }), err
	})
	return func() {
		t.Helper()
		lags, err := consumers.Lag(t.Context(), a.system, a.js, a.nats.Config(), a.history.Name())
		if err != nil || len(lags) != 1 || lags[0].Messages == 0 {
			t.Errorf("histories do not wait for their lock: %+v, %v", lags, err)
		}
		a.exec(locks, `SELECT pg_advisory_unlock_all()`)
		if err := <-changed; err != nil {
			t.Errorf("a change of a declaration after its wait: %v", err)
		}
		a.exec(snapshot, `COMMIT`)
		if err := late.Commit(t.Context()); err != nil {
			t.Error(err)
		}
		system.AwaitApplied(t, a.system, a.js, a.nats.Config(), a.history.Name())
	}
}

// verify compares the stream with what was written. Nothing may be parked, and no finding left.
func (a *attacked) verify() {
	t := a.t
	stream, err := a.js.Stream(t.Context(), a.nats.Config().StreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	info, err := stream.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got, follows := map[string][]int{}, 0
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
		m, err := stream.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		e, err := event.Decode(m.Subject, m.Header, m.Data)
		if err != nil {
			t.Error(err)
		}
		switch of := fmt.Sprintf("%d/%s/%s", e.TenantID, e.AggregateType, e.AggregateID); {
		case e.AggregateType == "follow":
			follows++
		case e.TenantID != 0: // no heartbeat
			var placed struct {
				N int `json:"n"`
			}
			if err := json.Unmarshal(m.Data, &placed); err != nil {
				t.Errorf("message %d: %v", seq, err)
			}
			got[of] = append(got[of], placed.N)
		}
	}
	if diff := cmp.Diff(a.written, got); diff != "" || follows != a.follows {
		t.Errorf("%d follows on the stream, want %d; others (-want +got):\n%s", follows, a.follows, diff)
	}
	system.AwaitApplied(t, a.system, a.js, a.nats.Config(), a.history.Name())
	var kept int
	if err := a.system.QueryRow(t.Context(), `SELECT count(*) FROM follow_history`).Scan(&kept); err != nil || kept != a.follows {
		t.Errorf("the histories have %d versions, %v: want %d", kept, err, a.follows)
	}
	for _, table := range []string{"outbox_messages_dlq", "consumer_dead_letters", "outbox_messages WHERE delayed OR attempts > 0"} {
		var n int
		if err := a.system.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&n); err != nil || n > 0 {
			t.Errorf("%d rows of %s, %v", n, table, err)
		}
	}
	found, err := doctor.Database(t.Context(), a.system, "truth")
	if err != nil || slices.ContainsFunc(found, func(f doctor.Finding) bool { return strings.Contains(f.What, "orders") }) {
		t.Errorf("the doctor still finds %v, %v", found, err)
	}
}
