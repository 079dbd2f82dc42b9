package docs_test

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
)

// TestTheSizingPageHasTheBytesOfAMessage publishes events as `tidings bench sizes` writes them, and
// compares the bytes of the stream with the page's.
func TestTheSizingPageHasTheBytesOfAMessage(t *testing.T) {
	const each = 1000
	page, err := os.ReadFile("sizing.md")
	if err != nil {
		t.Fatal(err)
	}
	db, b := testkit.Postgres(t), testkit.NATS(t)
	owner, js := db.Pool(t, postgres.RoleOwner), system.Streams(t, b)
	system.Start(t, system.Relay(t, system.RelayConfig(), db.Pool(t, postgres.RoleRelay), b.Config()).Run)
	bytes := func() int {
		t.Helper()
		s, err := js.Stream(t.Context(), b.Config().StreamName(0))
		if err != nil {
			t.Fatal(err)
		}
		return int(s.CachedInfo().State.Bytes)
	}
	for _, c := range []struct{ kind, payload string }{
		{"follow", `jsonb_build_object('follower_id', a::text, 'followee_id', b::text, 'status', 'ACTIVE', 'version', 1,
			'created_at', now(), 'positioned_at', now(), 'updated_at', now(), 'actor', 'user:' || a)`},
		{"comment", `jsonb_build_object('comment_id', gen_random_uuid(), 'post_id', b::text, 'slug', 'abcd2345',
			'path', '0632f8a0000000abcd2344', 'author_id', a::text, 'body', repeat('a comment of 24 letters ', 5),
			'author_state', 'ACTIVE', 'moderation_state', 'NONE', 'version', 1, 'created_at', now(), 'updated_at', now(),
			'actor', 'user:' || a)`},
	} {
		system.AwaitPublished(t, owner)
		before := bytes()
		if _, err := owner.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			SELECT 1, $1, b::text, 'created', `+c.payload+`
			  FROM (SELECT 10000000 + n AS a, 200000000 + n AS b FROM generate_series(1, $2::int) n) p`,
			pgx.QueryExecModeExec, c.kind, each); err != nil {
			t.Fatal(err)
		}
		system.AwaitPublished(t, owner)
		got := float64(bytes()-before) / each
		row := regexp.MustCompile(`\| stream, a message of a ` + c.kind + ` \| (\d+) \|`).FindSubmatch(page)
		if row == nil {
			t.Fatalf("the page has no message of a %s, which has %.0f bytes", c.kind, got)
		}
		if want, err := strconv.ParseFloat(string(row[1]), 64); err != nil || got < 0.95*want || got > 1.05*want {
			t.Errorf("a message of a %s has %.0f bytes, and %s on the page, %v", c.kind, got, row[1], err)
		}
	}
}
