package cli

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
)

// damages are all the ways in which verify can find a projection wrong.
var damages = []string{
	// pairs: missing, of nobody, of another version, in another state, at another place
	`DELETE FROM edge_lists WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 LIMIT 3)`,
	`INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at) VALUES (1, 'follow', 900001, 900002, true, 1, now()), (7, 'follow', 1, 2, false, 1, now())`,
	`UPDATE edge_lists SET version = version + 5 WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 OFFSET 5 LIMIT 3)`,
	`UPDATE edge_lists SET version = 0 WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 OFFSET 10 LIMIT 3)`,
	`UPDATE edge_lists SET active = NOT active WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 OFFSET 15 LIMIT 3)`,
	`UPDATE edge_lists SET positioned_at = positioned_at + interval '1h' WHERE (from_id, to_id) IN (SELECT from_id, to_id FROM edge_lists ORDER BY 1, 2 OFFSET 20 LIMIT 3)`,
	// accounts: wrong on either side, missing, of nobody
	`UPDATE edge_counts SET incoming = incoming + 7 WHERE object_id IN (3, 4)`,
	`UPDATE edge_counts SET outgoing = outgoing + 7 WHERE object_id IN (4, 5)`,
	`DELETE FROM edge_counts WHERE object_id IN (6, 7)`,
	`INSERT INTO edge_counts (tenant_id, kind, object_id, incoming) VALUES (1, 'follow', 900003, 2)`,
	// comments: missing, of nobody, with another content, state, version or count
	`DELETE FROM child_lists WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id, path LIMIT 3)`,
	`INSERT INTO child_lists (tenant_id, kind, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at, updated_at, visible, visible_descendants, shown)
	 SELECT tenant_id, kind, gen_random_uuid(), object_id, parent_id, 'damage', '0000000000000ffffffff0', author_id, body, author_state, moderation_state, version, created_at, updated_at, visible, visible_descendants, shown
	   FROM child_lists ORDER BY object_id, path LIMIT 1`,
	`UPDATE child_lists SET body = body || ' damaged' WHERE child_id IN (SELECT child_id FROM child_lists WHERE visible ORDER BY object_id DESC, path LIMIT 2)`,
	`UPDATE child_lists SET version = version + 3 WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id DESC, path DESC LIMIT 2)`,
	`UPDATE child_lists SET visible_descendants = visible_descendants + 1, shown = true WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY object_id, path DESC LIMIT 2)`,
	`UPDATE child_lists SET visible = NOT visible, shown = NOT visible OR visible_descendants > 0 WHERE child_id IN (SELECT child_id FROM child_lists ORDER BY child_id LIMIT 2)`,
	// threads: wrong counts, of nobody, other settings
	`UPDATE child_buckets SET visible = visible + 1 WHERE ctid IN (SELECT ctid FROM child_buckets ORDER BY object_id LIMIT 2)`,
	`DELETE FROM child_buckets WHERE object_id = (SELECT max(object_id) FROM child_buckets)`,
	`UPDATE child_totals SET total = total + 1 WHERE object_id = (SELECT min(object_id) FROM child_totals)`,
	`INSERT INTO child_settings (tenant_id, kind, object_id, locked, premoderated, title, version) VALUES (1, 'comment', 900004, true, false, '', 1)`,
	// histories: heads that are missing
	`DELETE FROM follow_history WHERE (follower_id, followee_id) IN (SELECT follower_id, followee_id FROM follow_history ORDER BY 1, 2 LIMIT 2)`,
	`DELETE FROM comment_history WHERE comment_id IN (SELECT comment_id FROM comment_history ORDER BY 1 LIMIT 2)`,
}

func TestVerifyRepairMendsEveryDifferenceWhileWritesGoOn(t *testing.T) {
	d := newDev(t)
	d.start(t)
	for _, generate := range [][]string{{"--generate", "users=80,edges=600,seed=1"}, {"--kind", "comment", "--generate", "posts=8,comments=200,seed=1"}} {
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
	writing := make(chan int)
	go func() {
		code, _, _ := run(t, nil, "", "load", "--data", d.dir, "--generate", "users=300,edges=3000,seed=2")
		writing <- code
	}()
	for _, sql := range damages {
		if tag, err := conn.Exec(t.Context(), sql); err != nil || tag.RowsAffected() == 0 {
			t.Fatalf("%s: %d rows, %v", sql, tag.RowsAffected(), err)
		}
	}
	_, stdout, stderr := run(t, nil, "", "verify", "--repair", "--wait", "1s", "--data", d.dir, "--json")
	var v verification
	if err := json.Unmarshal([]byte(stdout), &v); err != nil {
		t.Fatalf("verify --repair: %v\n%s\n%s", err, stdout, stderr)
	}
	for _, p := range v.Projections {
		if p.Mended == 0 && p.Projection != "thread versions" && p.Projection != "comment archive" { // these are the truth
			t.Errorf("%s: nothing mended: %s", p.Projection, stdout)
		}
		for _, d := range p.Differences { // what was on its way
			t.Log(d)
		}
	}
	if code := <-writing; code != exitOK {
		t.Errorf("load: exit code %d", code)
	}
	d.verify(t)
	code, stdout, stderr := run(t, nil, "", "verify", "--repair", "--data", d.dir, "--json")
	if err := json.Unmarshal([]byte(stdout), &v); code != exitOK || err != nil {
		t.Fatalf("verify --repair: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	for _, p := range v.Projections {
		if p.Mended != 0 {
			t.Errorf("%s: mended %d where nothing differs", p.Projection, p.Mended)
		}
	}
}

func TestVerifyRepairLeavesWhatIsInADLQ(t *testing.T) {
	d := newDev(t)
	d.start(t)
	if code, stdout, stderr := run(t, nil, "", "load", "--data", d.dir, "--generate", "users=20,edges=60,seed=1"); code != exitOK {
		t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	d.verify(t)
	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	var followee int64
	if err := conn.QueryRow(t.Context(), `DELETE FROM edge_lists WHERE ctid = (SELECT ctid FROM edge_lists LIMIT 1) RETURNING to_id`).Scan(&followee); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), `INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id, event_id,
		event_type, event_version, headers, payload, error) VALUES ('followercounts', 1, 'p00', 1, 'follow', $1, gen_random_uuid(), 'created', 1, '{}', '', 'test')`, followee); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := run(t, nil, "", "verify", "--repair", "--data", d.dir, "--json")
	var v verification
	if err := json.Unmarshal([]byte(stdout), &v); code != exitError || err != nil {
		t.Fatalf("verify --repair: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	var n int
	if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM edge_lists`).Scan(&n); err != nil || n != 59 || len(v.DeadLetters) == 0 {
		t.Errorf("%d edges, %v, %s: the pair of the parked aggregate was touched", n, err, stdout)
	}
}
