package erasure

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/relay"
)

// forms are forms in which a writer may spell the ids of a comment's event.
var forms = map[string]func(payload map[string]any){
	"as events have them":           func(map[string]any) {},
	"the comment in upper case":     func(p map[string]any) { p["comment_id"] = strings.ToUpper(p["comment_id"].(string)) },
	"the comment without hyphens":   func(p map[string]any) { p["comment_id"] = strings.ReplaceAll(p["comment_id"].(string), "-", "") },
	"the comment in braces":         func(p map[string]any) { p["comment_id"] = "{" + p["comment_id"].(string) + "}" },
	"the comment as a URN":          func(p map[string]any) { p["comment_id"] = "urn:uuid:" + p["comment_id"].(string) },
	"the author with leading zeros": func(p map[string]any) { p["author_id"] = "0" + p["author_id"].(string) },
	"the author in decimals":        func(p map[string]any) { p["author_id"] = json.RawMessage(p["author_id"].(string) + ".0") },
	"the author as a number":        func(p map[string]any) { p["author_id"] = json.RawMessage(p["author_id"].(string)) },
	"another author":                func(p map[string]any) { p["author_id"] = "8" },
	"no author":                     func(p map[string]any) { delete(p, "author_id") },
	"names in capitals": func(p map[string]any) {
		rename(p, "comment_id", "Comment_ID")
		rename(p, "author_id", "AUTHOR_ID")
	},
	"a mark that says it is redacted": func(p map[string]any) { p["erased"] = true },
}

func rename(p map[string]any, from, to string) {
	p[to] = p[from]
	delete(p, from)
}

// odd returns a payload of the comment with this body, in one of forms. Its version is the
// comment's next.
func odd(t *testing.T, c event.Child, form, body string, version int64) string {
	t.Helper()
	c.Body, c.Version, c.Actor = body, version, "sql"
	b, err := c.Encode(commentKind.Names())
	if err != nil {
		t.Fatal(err)
	}
	var payload map[string]any
	if err := json.Unmarshal(b, &payload); err != nil {
		t.Fatal(err)
	}
	forms[form](payload)
	if b, err = json.Marshal(payload); err != nil {
		t.Fatal(err)
	}
	return string(b)
}

const appendSQL = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
	VALUES (1, 'comment', $1, $2, $3)`

// TestNothingThatSQLWritersWroteIsLeftAnywhere: SQL writers with the writers' role try every form.
// Everything that the table accepts is erased.
func TestNothingThatSQLWritersWroteIsLeftAnywhere(t *testing.T) {
	w := newWorld(t)
	w.relay()
	w.consume(w.projections)
	writer := w.truthDB.Pool(t, postgres.RoleWriter)
	var taken []string
	for post, form := range slices.Sorted(maps.Keys(forms)) {
		c := w.comment(tenant, w.author, event.IDOf(10+post), "", "", "first "+w.secret)
		if _, err := writer.Exec(t.Context(), appendSQL, c.Parent, event.Edited, odd(t, c, form, "second "+w.secret, 2)); err == nil {
			taken = append(taken, form)
			w.exec(writer, `UPDATE comments SET version = 2, body = 'second ' || $2 WHERE comment_id = $1`, c.ID, w.secret)
		}
		// Also on a post that is not the comment's, alone in its partition.
		if _, err := writer.Exec(t.Context(), appendSQL, event.IDOf(500+post), event.Edited,
			strings.Replace(odd(t, c, form, "elsewhere "+w.secret, 3), fmt.Sprintf(`"post_id":"%d"`, 10+post),
				fmt.Sprintf(`"post_id":"%d"`, 500+post), 1)); err == nil {
			t.Errorf("with %s the table accepts an event on a post that is not the comment's", form)
		}
	}
	if want := []string{"a mark that says it is redacted", "as events have them"}; !slices.Equal(taken, want) {
		t.Errorf("the table accepts %q, want %q", taken, want)
	}
	w.settle(w.projections)
	w.erased("what the table took")
}

// TestNothingThatTheTableLetThroughIsLeftAnywhere writes as the system role, which no policy
// restricts. An erasure itself finds every form, in each possible place, also on posts that are not
// the comment's.
func TestNothingThatTheTableLetThroughIsLeftAnywhere(t *testing.T) {
	w := newWorld(t)
	stop := w.relay()
	w.consume(w.projections)
	post := int64(10)
	write := func(where string) {
		for _, form := range slices.Sorted(maps.Keys(forms)) {
			post++
			c := w.comment(tenant, w.author, event.IDOf(post), "", "", "first "+w.secret)
			for _, typ := range []string{event.Edited, event.Erased} { // also payloads that claim to be erasures
				w.exec(w.truth, appendSQL, event.IDOf(post), typ, odd(t, c, form, where+" "+w.secret, 2))
				// The comment's events on a post that is not its own: the post that the payload
				// names, and another one.
				w.exec(w.truth, appendSQL, event.IDOf(1000+post), typ, odd(t, c, form, where+" "+w.secret, 2))
				c := c
				c.Parent = event.IDOf(2000 + post)
				w.exec(w.truth, appendSQL, c.Parent, typ, odd(t, c, form, where+" "+w.secret, 2))
			}
		}
	}
	write("applied")
	w.settle(w.projections)
	stop()
	write("pending")
	w.exec(w.truth, `WITH gone AS (DELETE FROM outbox_messages WHERE processed_at IS NULL AND aggregate_id::int % 3 = 0
		AND event_type = 'edited' RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, trace_id, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, trace_id,
		event_id, inserted_at, slot FROM gone`)
	w.archive("outbox_messages_archive", "processed_at IS NOT NULL AND aggregate_id::int % 3 = 1")
	w.relay()
	w.erased("what the table let through")
}

// archive moves rows to the archive, or to the table of kept rows.
func (w *world) archive(table string, where ...string) {
	w.t.Helper()
	w.exec(w.truthDB.Pool(w.t, postgres.RoleOwner), `CREATE TABLE IF NOT EXISTS outbox_messages_archived PARTITION OF
		outbox_messages_archive FOR VALUES FROM (1) TO (50000001)`)
	const columns = `id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at,
		processed_at, attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition`
	for _, rows := range where {
		if n := w.exec(w.truth, `WITH gone AS (DELETE FROM outbox_messages m WHERE `+rows+` RETURNING *) INSERT INTO `+table+` (`+columns+
			`) SELECT `+columns+` FROM gone`); n == 0 {
			w.t.Fatalf("archived no row of %s", rows)
		}
	}
}

// erased erases the author. It fails unless the text is gone, every partition continues, and the
// stream and the database agree.
func (w *world) erased(what string) {
	w.t.Helper()
	report, err := w.erase(Options{Wait: time.Minute})
	if err != nil || !report.Done {
		w.t.Fatal(report, err)
	}
	w.t.Logf("%+v", report)
	w.gone("after the erasure of " + what)
	// Every slot accepts another event, for any tenant.
	seen := make(map[int]bool)
	for id := int64(1); len(seen) < event.Slots; id++ {
		var slot int
		if err := w.truth.QueryRow(w.t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type,
			payload)
			VALUES (2, 'like', $1, 'created', '{}') RETURNING slot`, event.IDOf(id)).Scan(&slot); err != nil {
			w.t.Fatal(err)
		}
		seen[slot] = true
	}
	w.settle(w.projections)
	if r, err := relay.Repair(w.t.Context(), w.truth, w.nats.Config(), testkit.Logger(w.t),
		relay.RepairOptions{DryRun: true}); err != nil || !r.Healthy {
		w.t.Errorf("%+v, %v: stream and database disagree", r, err)
	}
}

// TestAnErasureLeavesEveryPartitionAMessage: an event of the comment is the only one, or the last,
// of a partition that gets no comment.erased.
func TestAnErasureLeavesEveryPartitionAMessage(t *testing.T) {
	w := newWorld(t)
	w.relay()
	w.consume(w.projections)
	w.comment(2, "8", "10", "", "", "what stands before it and stays: what was deleted has not expired")
	c := w.comment(tenant, w.author, "10", "", "", "first "+w.secret)
	for post := int64(100); post < 110; post++ {
		w.exec(w.truth, appendSQL, event.IDOf(post), event.Edited, odd(t, c, "as events have them", "astray "+w.secret, 2))
	}
	w.settle(w.projections)
	w.erased("what went astray")
}
