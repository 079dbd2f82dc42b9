package cli

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/verify"
)

// damages are all types of differences that verify can find in a projection.
var damages = []string{
	// pairs: missing, unknown to the truth, with another version, in another state, at another place
	`DELETE FROM edge_lists WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 LIMIT 3)`,
	`INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at)
		VALUES (1, 'follow', 900001, 900002, true, 1, now()), (7, 'follow', 1, 2, false, 1, now())`,
	`UPDATE edge_lists SET version = version + 5 WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 OFFSET 5
		LIMIT 3)`,
	`UPDATE edge_lists SET version = 0 WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 OFFSET 10 LIMIT 3)`,
	`UPDATE edge_lists SET active = NOT active WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 OFFSET 15
		LIMIT 3)`,
	`UPDATE edge_lists SET positioned_at = positioned_at + interval '1h'
		WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 OFFSET 20 LIMIT 3)`,
	// accounts: wrong on either side, missing, unknown to the truth
	`UPDATE edge_counts SET incoming = incoming + 7 WHERE object_id IN (3, 4)`,
	`UPDATE edge_counts SET outgoing = outgoing + 7 WHERE object_id IN (4, 5)`,
	`DELETE FROM edge_counts WHERE object_id IN (6, 7)`,
	`INSERT INTO edge_counts (tenant_id, kind, object_id, incoming) VALUES (1, 'follow', 900003, 2)`,
	// comments: missing, unknown to the truth, with another content, state, version or count
	`DELETE FROM child_lists WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id, path LIMIT 3)`,
	`INSERT INTO child_lists (tenant_id, kind, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state,
		version, created_at, updated_at, visible, visible_descendants, shown)
	 SELECT tenant_id, kind, gen_random_uuid(), object_id, parent_id, 'damage', '0000000000000ffffffff0', author_id, body, author_state,
	 moderation_state, version, created_at, updated_at, visible, visible_descendants, shown
	   FROM child_lists ORDER BY object_id, path LIMIT 1`,
	`UPDATE child_lists SET body = body || ' damaged' WHERE child_id IN (SELECT child_id FROM child_lists WHERE visible
		ORDER BY object_id DESC, path LIMIT 2)`,
	`UPDATE child_lists SET version = version + 3 WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id DESC, path DESC
		LIMIT 2)`,
	`UPDATE child_lists SET visible_descendants = visible_descendants + 1, shown = true
		WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id, path DESC LIMIT 2)`,
	`UPDATE child_lists SET visible = NOT visible, shown = NOT visible OR visible_descendants > 0
		WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY child_id LIMIT 2)`,
	// threads: wrong counts, unknown to the truth, with other settings
	`UPDATE child_buckets SET visible = visible + 1 WHERE ctid IN (SELECT ctid FROM child_buckets ORDER BY object_id LIMIT 2)`,
	`DELETE FROM child_buckets WHERE object_id = (SELECT max(object_id) FROM child_buckets)`,
	`UPDATE child_totals SET total = total + 1 WHERE object_id = (SELECT min(object_id) FROM child_totals)`,
	`INSERT INTO child_settings (tenant_id, kind, object_id, locked, premoderated, title, version)
		VALUES (1, 'comment', 900004, true, false, '', 1)`,
	// histories: missing latest versions
	`DELETE FROM follow_history WHERE (follower_id, followee_id) IN (SELECT follower_id, followee_id FROM follow_history ORDER BY 1, 2
		LIMIT 2)`,
	`DELETE FROM comment_history WHERE comment_id IN (SELECT comment_id FROM comment_history ORDER BY 1 LIMIT 2)`,
}

// TestADryRunOfVerifyRepairSaysExactlyWhatTheRepairDoes damages all projections, parks an aggregate in each DLQ, and
// compares the dry run's list with the repair's, and that with the tables.
func TestADryRunOfVerifyRepairSaysExactlyWhatTheRepairDoes(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	for _, generate := range [][]string{{"--generate", "users=20,edges=60,seed=1"},
		{"--kind", "comment", "--generate", "posts=8,comments=80,seed=1"}} {
		if code, stdout, stderr := run(t, nil, "", append([]string{"load", "--data", d.dir}, generate...)...); code != exitOK {
			t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
		}
	}
	d.verify(t)
	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	exec := func(sql string, args ...any) {
		t.Helper()
		if tag, err := conn.Exec(t.Context(), sql, args...); err != nil || tag.RowsAffected() == 0 {
			t.Fatalf("%s: %d rows, %v", sql, tag.RowsAffected(), err)
		}
	}
	verified := func(args ...string) (v verify.Report) {
		t.Helper()
		code, stdout, stderr := run(t, nil, "", append([]string{"verify", "--data", d.dir, "--json", "--limit", "1000"}, args...)...)
		if err := json.Unmarshal([]byte(stdout), &v); err != nil || (code == exitOK) != v.OK {
			t.Fatalf("verify %v: exit code %d, %v\n%s\n%s", args, code, err, stdout, stderr)
		}
		return v
	}
	// Verify fails if there are dead letters, even without a difference.
	exec(`INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id, event_id,
		event_type, event_version, headers, payload, error)
		SELECT c.name, 1, 'p00', 1, c.type, c.id, gen_random_uuid(), 'created', 1, '{}', '', 'test'
		  FROM (VALUES ('followercounts', 'follow', (SELECT min(to_id) FROM edge_lists)), ('archiver', 'comment', (SELECT min(object_id)
		  FROM child_lists))) c(name, type, id)`)
	exec(`INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, event_id, inserted_at, slot)
		SELECT 0, 1, 'comment', max(object_id), 'created', 1, '{}', now(), now(), 11, gen_random_uuid(), now(), 0 FROM child_lists`)
	if v := verified(); v.OK || len(v.Why) != 3 || len(v.Lagging) > 0 {
		t.Errorf("beside dead letters: %+v", v.Why)
	}
	if code, stdout, _ := run(t, nil, "", "verify", "--data", d.dir); code != exitError ||
		strings.Contains(stdout, "Everything is equal") ||
		!strings.Contains(stdout, "NOT equal:\n  given up: outbox: 1 message in the DLQ\n  given up: followercounts: 1 dead letter\n") {
		t.Errorf("beside dead letters: exit code %d\n%s", code, stdout)
	}

	for _, sql := range damages {
		exec(sql)
	}
	exec(`UPDATE edge_lists SET version = version + 5 WHERE to_id = (SELECT min(to_id) FROM edge_lists)`)
	exec(`UPDATE child_lists SET body = body || '!' WHERE object_id = (SELECT max(object_id) FROM children)`)
	exec(`DELETE FROM comment_history WHERE comment_id = (SELECT h.comment_id FROM comment_history h
		JOIN children c ON c.child_id = h.comment_id
		WHERE c.object_id = (SELECT min(object_id) FROM children) ORDER BY 1 LIMIT 1)`)
	state := func() (sum string) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), `SELECT concat((SELECT sum(hashtext(t::text))
			FROM edge_lists t), (SELECT sum(hashtext(t::text)) FROM edge_counts t), (SELECT sum(hashtext(t::text)) FROM child_lists t),
			(SELECT sum(hashtext(t::text)) FROM child_buckets t), (SELECT sum(hashtext(t::text))
			FROM child_totals t), (SELECT sum(hashtext(t::text)) FROM comment_history t))`).Scan(&sum); err != nil {
			t.Fatal(err)
		}
		return sum
	}
	before := state()
	found, said := verified(), verified("--repair", "--dry-run")
	if state() != before {
		t.Error("the dry run changed a projection")
	}
	did, after := verified("--repair"), verified()
	for i, p := range said.Projections {
		real := did.Projections[i]
		if diff := cmp.Diff(p.Repair, real.Repair, cmpopts.IgnoreUnexported(verify.Mended{})); diff != "" ||
			p.Mended != real.Mended || p.Left != real.Left {
			t.Errorf("%s: the dry run said, and the repair did (-said +did):\n%s", p.Projection, diff)
		}
		stays, listed := make(map[string]bool), make(map[string]bool)
		for _, m := range p.Repair {
			stays[m.Entity], listed[m.Entity] = stays[m.Entity] || m.Left != "", true
		}
		for _, d := range found.Projections[i].Differences {
			if !listed[d.Entity] {
				t.Errorf("the dry run says nothing of %s", d)
			}
		}
		still := make(map[string]bool)
		for _, d := range after.Projections[i].Differences {
			if still[d.Entity] = true; !stays[d.Entity] {
				t.Errorf("the repair was said to mend %s", d)
			}
		}
		for _, m := range p.Repair {
			if m.Left != "" && !still[m.Entity] {
				t.Errorf("the repair was said to leave %s", m)
			}
		}
		if p.Projection != "thread versions" && p.Projection != "comment archive" && (p.Left == 0 || p.Mended == 0) {
			t.Errorf("%s: %d mended, %d left: the test shows nothing", p.Projection, p.Mended, p.Left)
		}
	}
	if code, stdout, stderr := run(t, nil, "", "verify", "--data", d.dir, "--dry-run"); code != exitInput {
		t.Errorf("--dry-run alone: exit code %d\n%s%s", code, stdout, stderr)
	}
}
