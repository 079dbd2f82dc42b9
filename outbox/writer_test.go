package outbox

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAWriterAppendsAndNoMore verifies the promises of docs/upstream.md about the role
// tidings_writer.
func TestAWriterAppendsAndNoMore(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleWriter)
	for tenant := range 2 {
		var id int64
		if err := pool.QueryRow(t.Context(), fmt.Sprintf(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type,
			payload, trace_id)
			VALUES (%d, 'like', 42, 'created', '{"version": 1}', NULL) RETURNING id`, tenant+1)).Scan(&id); err != nil {
			t.Error(err)
		}
	}
	for _, sql := range []string{
		`UPDATE outbox_messages SET payload = '{}'`, `UPDATE outbox_messages SET processed_at = now()`, `DELETE FROM outbox_messages`,
		`SELECT payload FROM outbox_messages`,
		`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, processed_at)
			VALUES (1, 'like', 42, 'created', '{}', now())`,
		`INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (7, 1, 'like', 42, 'created', '{}')`,
		`SELECT setval('outbox_messages_id_seq', 7)`, `SELECT last_value FROM outbox_messages_id_seq`,
		`SELECT FROM api_tokens`, `SELECT FROM outbox_messages_dlq`, `SELECT FROM outbox_messages_archive`,
		`SELECT FROM outbox_partitions`, `SELECT FROM leases`,
		`SELECT FROM child_keys`, `SELECT FROM threads`, `DELETE FROM follows`, `DELETE FROM comments`,
		`UPDATE follows SET follower_id = 1`, `UPDATE comments SET moderation_state = 'APPROVED'`,
	} {
		if _, err := pool.Exec(t.Context(), sql); !postgres.IsSystemic(err) { // for example insufficient_privilege
			t.Errorf("%s: %v, want an error", sql, err)
		}
	}
}

// TestARowHasItsTransactionIDBeforeItsID: the proof of the floor rests on that
// (docs/adr/0004-floor.md). PostgreSQL fires the trigger after it has evaluated the defaults and
// before it writes the row.
func TestARowHasItsTransactionIDBeforeItsID(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	owner, writer := db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleWriter)
	exec(t, owner, `
		CREATE FUNCTION early() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		  IF pg_current_xact_id_if_assigned() IS NULL THEN RAISE EXCEPTION 'no transaction id yet'; END IF;
		  RETURN NEW;
		END $$;
		CREATE TRIGGER early BEFORE INSERT ON outbox_messages FOR EACH ROW EXECUTE FUNCTION early()`)
	const columns, values = `tenant_id, aggregate_type, aggregate_id, event_type, payload`, `1, 'like', 42, 'created', '{}'`
	for range 4 { // to log 32 ids ahead, a sequence takes a transaction id too; that is not at each of them
		if _, err := writer.Exec(t.Context(), `INSERT INTO outbox_messages (`+columns+`) VALUES (`+values+`)`); err != nil {
			t.Error(err)
		}
	}
	if _, err := owner.Exec(t.Context(), `INSERT INTO outbox_messages (id, event_id, `+columns+`)
		VALUES (7, gen_random_uuid(), `+values+`)`); err == nil || !strings.Contains(err.Error(), "no transaction id yet") {
		t.Errorf("a row with an id of its own: %v, want the trigger's error", err)
	}
}

// TestOnlyARelayWritesHeartbeats: they measure the path of all events, so nobody else may forge
// one.
func TestOnlyARelayWritesHeartbeats(t *testing.T) {
	db := testkit.Postgres(t)
	api, writer, relay := db.Pool(t, postgres.RoleAPI), db.Pool(t, postgres.RoleWriter), db.Pool(t, postgres.RoleRelay)
	// Without declarations: the rules of the table alone must hold.
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`ALTER POLICY writer_appends ON outbox_messages WITH CHECK (true)`); err != nil {
		t.Fatal(err)
	}
	for _, of := range []struct{ tenant, aggregateType string }{{"0", "heartbeat"}, {"0", "post"}, {"1", "heartbeat"}} {
		sql := fmt.Sprintf(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (%s, '%s', 1, 'sent', '{}')`, of.tenant, of.aggregateType)
		if _, err := writer.Exec(t.Context(), sql); !refusedBy(err, "42501", "heartbeats_are_the_relays") {
			t.Errorf("a writer's %s of tenant %s: %v", of.aggregateType, of.tenant, err)
		}
		if _, err := api.Exec(t.Context(), `SELECT set_config('tidings.tenant', '`+of.tenant+`', true); `+sql); err == nil {
			t.Errorf("the API's %s of tenant %s was taken", of.aggregateType, of.tenant)
		}
	}
	if n, _, err := Heartbeat(t.Context(), relay, time.Minute); n != 1 || err != nil {
		t.Errorf("the relay wrote %d heartbeats, %v", n, err)
	}
}

// The ids of a comment and of others, in the only form that events have.
const (
	commentID = "0196b2d4-7c00-7000-8000-00000000000a"
	otherID   = "0196b2d4-7c00-7000-8000-00000000000b"
)

// TestAnEventOfACommentNamesItInOneForm: consumers, erasures and operators search the same ids, and
// all events of a comment are in the partition of its post.
func TestAnEventOfACommentNamesItInOneForm(t *testing.T) {
	db := testkit.Postgres(t)
	writer := db.Pool(t, postgres.RoleWriter)
	for _, id := range []string{commentID, otherID} {
		if _, err := writer.Exec(t.Context(), `INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body)
			VALUES (1, $1::text::uuid, 42, right($1::text, 8), right($1::text, 22),
			CASE WHEN $1::text = $2::text THEN 7 ELSE 8 END, 'text')`, id, commentID); err != nil {
			t.Fatal(err)
		}
	}
	const good = `{"comment_id": "` + commentID + `", "post_id": "42", "author_id": "7", "version": 1}`
	const names, matches = "outbox_messages_child_check", "writer_child"
	for _, c := range []struct{ what, from, to, refusedBy string }{
		{"in upper case", commentID, strings.ToUpper(commentID), names},
		{"without hyphens", commentID, strings.ReplaceAll(commentID, "-", ""), names},
		{"in braces", commentID, "{" + commentID + "}", names},
		{"as a URN", commentID, "urn:uuid:" + commentID, names},
		{"with a space", commentID, commentID + " ", names},
		{"with a line break", commentID, commentID + `\n`, names},
		{"without the comment", `"comment_id"`, `"Comment_ID"`, names},
		{"as a list", `"` + commentID + `"`, `["` + commentID + `"]`, names},
		{"of an author with a blank", `"7"`, `"7 "`, names},
		{"of an author without an id", `"7"`, `""`, names},
		{"of an author too long", `"7"`, `"` + strings.Repeat("9", 129) + `"`, names},
		{"of an author in decimals", `"7"`, `7.0`, names},
		{"of an author as a number", `"7"`, `7`, names},
		{"of nobody", `"author_id"`, `"author"`, names},
		{"of another post than it is written to", `"42"`, `"43"`, names},
		{"of a post with a leading zero", `"42"`, `"042"`, names},
		{"of a post as a number", `"42"`, `42`, names},
		{"of a parent in upper case", `"version"`, `"parent_id": "` + strings.ToUpper(otherID) + `", "version"`, names},
		{"that is no object", good, `"text"`, names},
		{"that is null", good, `null`, names},
		{"of another's comment", `"7"`, `"8"`, matches},
		{"of an author with a leading zero", `"7"`, `"07"`, matches},
		{"of an author with a sign", `"7"`, `"+7"`, matches},
		{"of an author with the longest id", `"7"`, `"` + strings.Repeat("9", 128) + `"`, matches},
		{"of an author of no path", `"7"`, `".."`, matches},
		{"of a comment that nobody wrote", commentID, "0196b2d4-7c00-7000-8000-00000000000c", matches},
		{"of the other comment", commentID, otherID, matches},
	} {
		payload := strings.Replace(good, c.from, c.to, 1)
		if payload == good {
			t.Fatalf("%s: the payload did not change", c.what)
		}
		err := appendComment(t, writer, "42", payload)
		if c.refusedBy == names && !refusedBy(err, "23514", names) || c.refusedBy == matches && !refusedBy(err, "42501", matches) {
			t.Errorf("an event %s: %v, want an error of %s", c.what, err, c.refusedBy)
		}
	}
	// The event names itself correctly, but under a post without that comment.
	if err := appendComment(t, writer, "43", strings.Replace(good, `"42"`, `"43"`, 1)); !refusedBy(err, "42501", matches) {
		t.Errorf("an event of the comment on another post: %v, want an error", err)
	}
	if err := appendComment(t, writer, "42", good); err != nil {
		t.Error(err)
	}
	if err := appendComment(t, writer, "42", strings.Replace(good, `"version"`,
		`"text": {"of": ["a version to come"]}, "version"`, 1)); err != nil {
		t.Error(err)
	}
	for _, parent := range []string{`null`, `""`, `"` + otherID + `"`} {
		if err := appendComment(t, writer, "42", strings.Replace(good, `"version"`, `"parent_id": `+parent+`, "version"`, 1)); err != nil {
			t.Error(err)
		}
	}
	// Comments of a shelved thread count as comments.
	if _, err := db.Pool(t, postgres.RoleSystem).Exec(t.Context(),
		`WITH gone AS (DELETE FROM children_comment RETURNING *) INSERT INTO children_archive_comment SELECT * FROM gone`); err != nil {
		t.Fatal(err)
	}
	if err := appendComment(t, writer, "42", good); err != nil {
		t.Error(err)
	}
}

func appendComment(t *testing.T, pool *pgxpool.Pool, post event.ID, payload string) error {
	t.Helper()
	_, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'comment', $1, 'created', $2)`, post, payload)
	return err
}

// refusedBy reports whether the database refused a row because of this constraint or policy. Only
// the message names a policy.
func refusedBy(err error, code, name string) bool {
	var refused *pgconn.PgError
	return errors.As(err, &refused) && refused.Code == code &&
		(refused.ConstraintName == name || strings.Contains(refused.Message, `"`+name+`"`))
}
