package upstreams_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"pgregory.net/rapid"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/kinds/upstreams"
	"github.com/tidings/tidings/outbox"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const orders = `
upstream: order
type_prefix: com.example
source: https://orders.example.com
id: uuid
tenants: [1, 2]
max_payload: 400
events:
  placed:
    summary: A customer placed the order.
    versions:
      1:
        type: object
        required: [version, total]
        properties:
          version: {type: integer, minimum: 1}
          total: {type: number, exclusiveMinimum: 0}
          note: {type: string, maxLength: 300, not: {const: 1}}
        additionalProperties: false
  shipped:
    versions:
      1: {type: object}
      2: {type: object, required: [carrier]}
`

func declare(t *testing.T, pool *pgxpool.Pool, file string, logins ...string) declared.Added {
	t.Helper()
	u, err := kindfile.ReadUpstream([]byte(file))
	if err != nil {
		t.Fatal(err)
	}
	u.Logins = slices.Concat([]string{}, logins)
	done, err := declared.Add(t.Context(), pool, declared.Request{Upstream: *u, Actor: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return done
}

// login makes a login of upstreams, and returns a pool of its connections and its name.
func login(t *testing.T, db *testkit.DB) (*pgxpool.Pool, string) {
	t.Helper()
	name := "orders_" + strings.ToLower(rand.Text()[:12]) // logins belong to the server
	made := testkit.UpstreamLogin(t, db, name)
	owner := db.Pool(t, postgres.RoleOwner)
	t.Cleanup(func() {
		if _, err := owner.Exec(context.WithoutCancel(t.Context()), "DROP ROLE "+name); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, made.Password)
	pool, err := pgxpool.New(t.Context(), u.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool, name
}

const order = "8b5f0d5e-3f1c-4c6a-9f55-0f6f0a1f2b3c"

// placed is an event that fits the declaration.
func placed() event.Event {
	return event.Event{TenantID: 1, AggregateType: "order", AggregateID: order, Type: "placed", Version: 1,
		Payload: json.RawMessage(`{"version": 1, "total": 9.5}`)}
}

func put(ctx context.Context, pool *pgxpool.Pool, e event.Event) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return outbox.Append(ctx, tx, []event.Event{e}) })
}

func TestTheOutboxRefusesEventsThatNobodyDeclared(t *testing.T) {
	db := testkit.Postgres(t)
	system := db.Pool(t, postgres.RoleSystem)
	pool, name := login(t, db)
	other, otherName := login(t, db)
	declare(t, system, orders, name)
	declare(t, system, strings.NewReplacer("order\n", "invoice\n").Replace(orders), otherName)
	if err := put(t.Context(), pool, placed()); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		change func(e *event.Event)
		want   string
	}{
		"a type of nobody": {func(e *event.Event) { e.AggregateType = "parcel" }, "the login " + name +
			" may not append events of parcel"},
		"a type of another": {func(e *event.Event) { e.AggregateType = "invoice" }, "the login " + name +
			" may not append events of invoice"},
		"an event of a kind": {func(e *event.Event) { e.AggregateType = "follow" }, "the login " + name +
			" may not append events of follow"},
		"a heartbeat":           {func(e *event.Event) { e.AggregateType = "heartbeat" }, "may not append events of heartbeat"},
		"another tenant":        {func(e *event.Event) { e.TenantID = 3 }, "order may not have events of tenant 3"},
		"the installation":      {func(e *event.Event) { e.TenantID = 0 }, "order may not have events of tenant 0"},
		"an unknown event":      {func(e *event.Event) { e.Type = "eaten" }, "order has no event type eaten"},
		"an unknown version":    {func(e *event.Event) { e.Version = 2 }, "order.placed has no version 2"},
		"an id of another form": {func(e *event.Event) { e.AggregateID = "7" }, "7 is not an id of order: want uuid"},
		"no object":             {func(e *event.Event) { e.Payload = []byte(`[1]`) }, "the payload is array: want an object"},
		"a large payload": {func(e *event.Event) { e.Payload = fmt.Appendf(nil, `{"note": %q}`, strings.Repeat("x", 400)) },
			"the payload has 412 bytes: order has a limit of 400"},
		"a payload of a number": {func(e *event.Event) { e.Payload = []byte(`{"total": 1e1000}`) },
			"the payload has 1012 bytes: order has a limit of 400"},
		"a missing member": {func(e *event.Event) { e.Payload = []byte(`{"version": 1}`) }, "order.placed.v1: /total is missing"},
		"a member of wrong type": {func(e *event.Event) { e.Payload = []byte(`{"version": 1.5, "total": 1}`) },
			"order.placed.v1: /version is number: want integer"},
		"an undeclared member": {func(e *event.Event) { e.Payload = []byte(`{"version": 1, "total": 1, "x": 1}`) },
			"order.placed.v1: /x is not allowed"},
		"no trace": {func(e *event.Event) { e.TraceParent = "x" }, "the trace_id is not a W3C traceparent"},
	} {
		t.Run(what, func(t *testing.T) {
			e := placed()
			c.change(&e)
			var refused *pgconn.PgError
			if err := put(t.Context(), pool, e); !errors.As(err, &refused) || refused.Code != "23514" ||
				refused.ConstraintName != "outbox_messages_upstream" || !strings.Contains(refused.Message, c.want) || refused.Hint == "" {
				t.Errorf("got %v, want a refusal because %s", err, c.want)
			}
		})
	}
	if err := put(t.Context(), other, placed()); err == nil {
		t.Error("the login of another upstream may append the event")
	}
	if err := put(t.Context(), system, event.Event{TenantID: 1, AggregateType: "parcel", AggregateID: "1", Type: "x",
		Payload: []byte(`{}`)}); err != nil {
		t.Errorf("an operator is refused: %v", err)
	}

	// A change is in force for the next transaction.
	declare(t, system, strings.NewReplacer("[1, 2]", "[1, 2, 3]", "max_payload: 400", "max_payload: 4000").Replace(orders))
	e := placed()
	e.TenantID = 3
	if err := put(t.Context(), pool, e); err != nil {
		t.Error(err)
	}
	e.Type = "shipped"
	for arrays, want := range map[int]string{498: "", 499: "payload_nests_less_than_500_deep"} {
		e.Payload = fmt.Appendf(nil, `{"x": %s1%s}`, strings.Repeat("[", arrays), strings.Repeat("]", arrays))
		if err := put(t.Context(), pool, e); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("a payload with %d arrays in each other: %v, want %q", arrays, err, want)
		}
	}
	if err := declared.Remove(t.Context(), system, "order", "test", "moved"); err != nil {
		t.Fatal(err)
	}
	if err := put(t.Context(), pool, e); err == nil {
		t.Error("an event of a removed upstream was accepted")
	}
}

// TestALoginOfAnUpstreamReadsNothing: it sees the ids that it was given, in the transaction that
// wrote the rows, and no other row.
func TestALoginOfAnUpstreamReadsNothing(t *testing.T) {
	db := testkit.Postgres(t)
	pool, name := login(t, db)
	declare(t, db.Pool(t, postgres.RoleSystem), orders, name)
	declare(t, db.Pool(t, postgres.RoleSystem), strings.Replace(orders, "order\n", "invoice\n", 1), "another")
	if err := put(t.Context(), pool, placed()); err != nil {
		t.Fatal(err)
	}
	if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		var n int
		if err := tx.QueryRow(t.Context(), `SELECT count(id) FROM outbox_messages`).Scan(&n); err != nil || n != 0 {
			t.Errorf("it sees %d rows of earlier transactions, %v", n, err)
		}
		e := []event.Event{placed()}
		if err := outbox.Append(t.Context(), tx, e); err != nil || e[0].OutboxID == 0 || e[0].ID == "" {
			t.Errorf("Append set %+v, %v", e[0], err)
		}
		return tx.QueryRow(t.Context(), `SELECT count(id) FROM outbox_messages`).Scan(&n)
	}); err != nil {
		t.Error(err)
	}
	rows, _ := db.Pool(t, postgres.RoleOwner).Query(t.Context(), `SELECT relname::text FROM pg_class
		 WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND relname <> 'outbox_messages' ORDER BY 1`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(tables) < 30 {
		t.Fatalf("%d tables, %v", len(tables), err)
	}
	for _, table := range tables {
		for _, sql := range []string{"SELECT * FROM %s", "DELETE FROM %s", "TRUNCATE %s", "INSERT INTO %s DEFAULT VALUES"} {
			var refused *pgconn.PgError
			if _, err := pool.Exec(t.Context(), fmt.Sprintf(sql, pgx.Identifier{table}.Sanitize())); !errors.As(err, &refused) ||
				refused.Code != "42501" {
				t.Errorf(sql+": %v, want a refusal", table, err)
			}
		}
	}
	for _, sql := range []string{"SET ROLE tidings_system", "SET ROLE tidings_writer", "SELECT upstream_misfit('{}', '{}', '')",
		"UPDATE outbox_messages SET payload = '{}'", "SELECT payload FROM outbox_messages"} {
		if _, err := pool.Exec(t.Context(), sql); err == nil {
			t.Errorf("%s is allowed", sql)
		}
	}
	var declaration *string
	if err := pool.QueryRow(t.Context(), "SELECT upstream_of('invoice')").Scan(&declaration); err != nil || declaration != nil {
		t.Errorf("it reads the declaration of another: %v, %v", declaration, err)
	}
}

func TestADeclarationKeepsWhatStoredEventsHave(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	first := declare(t, pool, orders, "a_login")
	if !first.New || first.Version == 0 {
		t.Errorf("%+v", first)
	}
	if again := declare(t, pool, orders); again.New || len(again.Changes) > 0 || again.Version != first.Version {
		t.Errorf("the same declaration again: %+v", again)
	}
	for what, c := range map[string]struct{ old, new, want string }{
		"a prefix":         {"com.example", "org.example", "type_prefix: is com.example and stays so"},
		"a source":         {"https://orders.", "https://o.", "source: is https://orders.example.com and stays so"},
		"narrower ids":     {"id: uuid", "id: integer", "id: uuid cannot become integer"},
		"a schema":         {"maxLength: 300", "maxLength: 200", "events.placed.versions.1: its schema stays"},
		"a number as text": {"const: 1", `const: "1"`, "events.placed.versions.1: its schema stays"},
		"an event type":    {"  placed:", "  put:", "events.placed: stays"},
		"an event version": {"      2: {type: object, required: [carrier]}\n", "", "events.shipped.versions.2: stays"},
	} {
		u, err := kindfile.ReadUpstream([]byte(strings.Replace(orders, c.old, c.new, 1)))
		if err != nil {
			t.Fatal(what, err)
		}
		_, err = declared.Add(t.Context(), pool, declared.Request{Upstream: *u, Actor: "test"})
		if !errors.Is(err, declared.ErrRefused) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %s", what, err, c.want)
		}
	}
	if _, err := declared.Add(t.Context(), pool, declared.Request{Upstream: upstreams.Upstream{Name: "order"}}); err == nil {
		t.Error("an empty declaration is accepted")
	}
	next := strings.NewReplacer("id: uuid", "id: string", "400", "500", "[1, 2]", "all", "      1: {type: object}",
		"      1: {type: object}\n      3: {type: object}").
		Replace(orders)
	want := []string{"id: uuid → string", "tenants: 1 2 → all", "max_payload: 400 → 500", "events.shipped.versions.3: added",
		"logins: b added"}
	if got := declare(t, pool, next, "b"); !cmp.Equal(got.Changes, want) {
		t.Errorf("changes: %q, want %q", got.Changes, want)
	}
	if err := declared.Remove(t.Context(), pool, "order", "ann", "no longer sold"); err != nil {
		t.Fatal(err)
	}
	if err := declared.Remove(t.Context(), pool, "order", "ann", ""); !errors.Is(err, declared.ErrNotFound) {
		t.Errorf("a second removal: %v", err)
	}
	names, err := declared.Namings(t.Context(), pool, []string{"order", "invoice"})
	if err != nil || names["order"] != (event.Naming{TypePrefix: "com.example", Source: "https://orders.example.com"}) {
		t.Errorf("the relay reads %+v, %v of a removed upstream", names, err)
	}
	if got := declare(t, pool, next); !slices.Equal(got.Changes, []string{"upstream order: added again"}) {
		t.Errorf("changes: %q", got.Changes)
	}
	history, err := declared.History(t.Context(), pool, "order")
	if err != nil || len(history) != 4 || history[2].Reason != "no longer sold" || !history[2].Removed {
		t.Errorf("history: %+v, %v", history, err)
	}
}

func TestAnUpstreamAndAKindNeverShareAName(t *testing.T) {
	truth, projections := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	dbs := catalog.Databases{Truth: truth, Projections: projections}
	apply := func(name string) error {
		set, err := kindfile.Extend(kinds.Builtin(), fmt.Appendf(nil, "children: {%s: {plural: %ss, parent: post}}", name, name))
		if err != nil {
			t.Fatal(err)
		}
		_, err = catalog.Apply(t.Context(), dbs, catalog.Request{Kinds: set, Actor: "test"})
		return err
	}
	declare(t, truth, orders)
	if err := apply("order"); err == nil || !strings.Contains(err.Error(), "the upstream order has events of that name") {
		t.Errorf("a kind with the name of an upstream: %v", err)
	}
	if err := apply("invoice"); err != nil {
		t.Fatal(err)
	}
	u, err := kindfile.ReadUpstream([]byte(strings.Replace(orders, "order\n", "invoice\n", 1)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := declared.Add(t.Context(), truth, declared.Request{Upstream: *u, Actor: "test"}); !errors.Is(err,
		declared.ErrRefused) {
		t.Errorf("an upstream with the name of a kind: %v", err)
	}
}

func TestAFileOfAnUpstreamIsCheckedAsAWholeWithLines(t *testing.T) {
	_, err := kindfile.ReadUpstream([]byte(`upstream: follow
type_prefix: tidings.x
source: a b
id: number
tenants: [0]
max_payload: 9999999
events:
  pl.aced:
    versions:
      0: {type: object}
      1: {type: array}
      2: {type: object, properties: {a: {pattern: '\d', $ref: x}}}
`))
	want := []string{
		`line 1: upstream: "follow" is the name of a kind or of events of Tidings`,
		`line 2: type_prefix: "tidings.x": want a reversed domain name of yours, like com.example`,
		`line 3: source: "a b": want a URI or a path, at most 255 characters without blanks`,
		`line 4: id: "number": want string, integer or uuid`,
		`line 6: max_payload: is 9999999: want 2 to 983040 bytes`,
		`line 5: tenants: 0 is not a tenant`,
		`line 8: events.pl.aced: "pl.aced" is not a valid event type: want 1 to 64 letters, digits, _ and -`,
		`line 10: events.pl.aced.versions.0: "0" is not a version: want 1 to 32767`,
		`line 11: events.pl.aced.versions.1: want a JSON Schema with "type": "object"`,
		`line 12: events.pl.aced.versions.2.properties.a.$ref: this keyword is not supported: the table could not check it`,
		`line 12: events.pl.aced.versions.2.properties.a.pattern: "\\d" is not a regular expression ` +
			`that PostgreSQL reads as JSON Schema does: ` +
			`write sets in brackets instead of classes like \d`,
	}
	if err == nil {
		t.Fatal("the file is accepted")
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestAPatternOfTwoMeaningsIsRefused has patterns that PostgreSQL refuses, or reads otherwise than
// ECMA 262 does.
func TestAPatternOfTwoMeaningsIsRefused(t *testing.T) {
	for pattern, allowed := range map[string]bool{`^[a-z.]+$`: true, `^\[a\.b(?:c|d){2,255}.\(?:$`: true, `a{256}`: false,
		`a{1,1000}`: false, `\d`: false, `(?i)a`: false, `(?=a)`: false, `(?P<a>b)`: false,
		`[[.a.]]`: false, `[[:alpha:]]`: false, `[]a]`: false, `(a)\1`: false, `a**`: false} {
		u, err := kindfile.ReadUpstream([]byte(strings.Replace(orders, "maxLength: 300", "pattern: '"+pattern+"'", 1)))
		if (err == nil) != allowed {
			t.Errorf("%s: %+v, %v", pattern, u, err)
		}
	}
}

// value draws a value of JSON.
func value(depth int) *rapid.Generator[any] {
	return rapid.Custom(func(t *rapid.T) any {
		most := 5
		if depth == 0 {
			most = 3
		}
		switch rapid.IntRange(0, most).Draw(t, "kind") {
		case 0:
			return rapid.SampledFrom([]any{nil, true, false}).Draw(t, "constant")
		case 1:
			return json.Number(rapid.SampledFrom([]string{"0", "1", "-1", "2.0", "2.5", "1e2", "10", "7"}).Draw(t, "number"))
		case 2, 3:
			return rapid.SampledFrom([]string{"", "a", "ab", "äöü", "x-1", "uvwxyz", "a\nb"}).Draw(t, "text")
		case 4:
			return rapid.SliceOfN(value(depth-1), 0, 3).Draw(t, "array")
		}
		all := map[string]any{}
		for _, k := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "c"}), 0, 3, rapid.ID).Draw(t, "names") {
			all[k] = value(depth-1).Draw(t, k)
		}
		return all
	})
}

// schema draws a JSON Schema of the supported keywords.
func schema(depth int) *rapid.Generator[any] {
	return rapid.Custom(func(t *rapid.T) any {
		s := map[string]any{}
		small := func(what string) any { return json.Number(fmt.Sprint(rapid.IntRange(0, 3).Draw(t, what))) }
		for range rapid.IntRange(0, 3).Draw(t, "keywords") {
			k := rapid.SampledFrom([]string{"type", "types", "enum", "const", "minLength", "maxLength", "pattern", "minimum", "maximum",
				"exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "uniqueItems", "minProperties",
				"maxProperties",
				"required", "properties", "additionalProperties", "items", "allOf", "anyOf", "oneOf", "not"}).Draw(t, "keyword")
			kinds := []any{"object", "array", "string", "number", "integer", "boolean", "null"}
			switch k {
			case "type":
				s[k] = rapid.SampledFrom(kinds).Draw(t, k)
			case "types":
				s["type"] = rapid.SliceOfNDistinct(rapid.SampledFrom(kinds), 1, 3, func(v any) any { return v }).Draw(t, k)
			case "enum":
				s[k] = rapid.SliceOfN(value(1), 1, 3).Draw(t, k)
			case "const":
				s[k] = value(1).Draw(t, k)
			case "pattern":
				s[k] = patterned().Draw(t, k).(map[string]any)[k]
			case "uniqueItems":
				s[k] = rapid.Bool().Draw(t, k)
			case "required":
				s[k] = rapid.SliceOfNDistinct(rapid.SampledFrom([]any{"a", "b", "c"}), 1, 2, func(v any) any { return v }).Draw(t, k)
			case "multipleOf":
				s[k] = json.Number(rapid.SampledFrom([]string{"1", "2", "0.5"}).Draw(t, k))
			case "properties":
				if depth > 0 {
					s[k] = map[string]any{"a": schema(depth-1).Draw(t, "a"), "b": schema(depth-1).Draw(t, "b")}
				}
			case "additionalProperties", "items", "not":
				if depth > 0 {
					s[k] = schema(depth-1).Draw(t, k)
				} else {
					s[k] = rapid.Bool().Draw(t, k)
				}
			case "allOf", "anyOf", "oneOf":
				if depth > 0 {
					s[k] = rapid.SliceOfN(schema(depth-1), 1, 3).Draw(t, k)
				}
			default:
				s[k] = small(k)
			}
		}
		return s
	})
}

// bounded draws a schema of one bound, whose values often lie on it.
func bounded() *rapid.Generator[any] {
	return rapid.Custom(func(t *rapid.T) any {
		k := rapid.SampledFrom([]string{"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
			"maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}).Draw(t, "keyword")
		return map[string]any{k: json.Number(fmt.Sprint(rapid.IntRange(1, 2).Draw(t, "bound")))}
	})
}

func patterned() *rapid.Generator[any] {
	return rapid.Custom(func(t *rapid.T) any {
		return map[string]any{"pattern": rapid.SampledFrom([]any{"^a", "[a-z]{2}", "^(?:x|u)", "-[0-9]$", "", "^a.b", "^[^.]{2,3}$",
			"a.?b$", "^.{3}$"}).Draw(t, "pattern")}
	})
}

// TestTheTableChecksPayloadsAsJSONSchemaDoes compares the function in the database with a library,
// on random schemas and values.
func TestTheTableChecksPayloadsAsJSONSchemaDoes(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleOwner)
	fits := map[bool]int{}
	rapid.Check(t, func(rt *rapid.T) {
		s, values := rapid.OneOf(schema(2), bounded(), patterned()).Draw(rt, "schema"), rapid.SliceOfN(value(2), 20, 20).Draw(rt, "values")
		c := jsonschema.NewCompiler()
		if err := c.AddResource("mem:s", s); err != nil {
			rt.Fatal(err)
		}
		compiled, err := c.Compile("mem:s")
		if err != nil {
			rt.Fatal(err)
		}
		schemaText, err := json.Marshal(upstreams.Compile(s))
		if err != nil {
			rt.Fatal(err)
		}
		var texts []string
		for _, v := range values {
			text, err := json.Marshal(v)
			if err != nil {
				rt.Fatal(err)
			}
			texts = append(texts, string(text))
		}
		rows, _ := pool.Query(t.Context(), `SELECT coalesce(upstream_misfit($1::text::jsonb, v::jsonb, ''), '')
			FROM unnest($2::text[]) WITH ORDINALITY AS u(v, n) ORDER BY n`, string(schemaText), texts)
		reasons, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			rt.Fatal(err)
		}
		for i, v := range values {
			err := compiled.Validate(v)
			if (err == nil) != (reasons[i] == "") {
				rt.Errorf("%s with %s: the table says %q, the library %v", texts[i], schemaText, reasons[i], err)
			}
			fits[err == nil]++
		}
	})
	if fits[true] < 50 || fits[false] < 50 {
		t.Errorf("%d values fit and %d do not", fits[true], fits[false])
	}
}

// TestWhatADeclarationCosts logs the cost of the checks for each row (docs/upstream.md).
func TestWhatADeclarationCosts(t *testing.T) {
	db := testkit.Postgres(t)
	system := db.Pool(t, postgres.RoleSystem)
	pool, name := login(t, db)
	declare(t, system, orders, name)
	const rows = 2000
	for role, p := range map[string]*pgxpool.Pool{"system": system, "upstream": pool} {
		began := time.Now()
		if _, err := p.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			SELECT 1, 'order', $1, 'placed', '{"version": 1, "total": 9.5, "note": "by hand"}' FROM generate_series(1,
				$2::int)`, order, rows); err != nil {
			t.Error(err)
		}
		t.Logf("%s: %s a row", role, time.Since(began)/rows)
	}
}
