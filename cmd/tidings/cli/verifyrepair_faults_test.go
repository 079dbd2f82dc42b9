//go:build faults

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/verify"
)

func TestVerifyRepairMendsEveryDifferenceWhileWritesGoOn(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	for _, generate := range [][]string{{"--generate", "users=80,edges=600,seed=1"},
		{"--kind", "comment", "--generate", "posts=8,comments=200,seed=1"}} {
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
	for _, sql := range damages {
		if tag, err := conn.Exec(t.Context(), sql); err != nil || tag.RowsAffected() == 0 {
			t.Fatalf("%s: %d rows, %v", sql, tag.RowsAffected(), err)
		}
	}
	edges := func() (n int, err error) {
		err = conn.QueryRow(t.Context(), `SELECT count(*) FROM edges`).Scan(&n)
		return n, err
	}
	before, err := edges()
	if err != nil {
		t.Fatal(err)
	}
	writing, repaired := make(chan int, 1), make(chan struct{})
	go func() {
		for seed := 2; ; seed++ { // until the repair has ended
			code, _, _ := run(t, nil, "", "load", "--data", d.dir, "--generate", fmt.Sprintf("users=300,edges=1000,seed=%d", seed))
			select {
			case <-repaired:
			default:
				if code == exitOK {
					continue
				}
			}
			writing <- code
			return
		}
	}()
	testkit.Eventually(t, "the writes to begin", func() (bool, error) { n, err := edges(); return n > before, err })
	_, stdout, stderr := run(t, nil, "", "verify", "--repair", "--wait", "1s", "--data", d.dir, "--json")
	close(repaired)
	var v verify.Report
	if err := json.Unmarshal([]byte(stdout), &v); err != nil {
		t.Fatalf("verify --repair: %v\n%s\n%s", err, stdout, stderr)
	}
	for _, p := range v.Projections {
		if p.Repaired == 0 && p.Projection != "thread versions" && p.Projection != "comment archive" { // these are the truth
			t.Errorf("%s: nothing repaired: %s", p.Projection, stdout)
		}
		for _, d := range p.Differences { // rows whose events had not arrived yet
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
		if p.Repaired != 0 {
			t.Errorf("%s: repaired %d where nothing differs", p.Projection, p.Repaired)
		}
	}
}

// TestADryRunOfVerifyRepairSaysExactlyWhatTheRepairDoes damages all projections, parks an aggregate
// in each DLQ, and compares the dry run's list with the repair's, and that with the tables.
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
		if diff := cmp.Diff(p.Repair, real.Repair, cmpopts.IgnoreUnexported(verify.Repaired{})); diff != "" ||
			p.Repaired != real.Repaired || p.Left != real.Left {
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
				t.Errorf("the repair was said to repair %s", d)
			}
		}
		for _, m := range p.Repair {
			if m.Left != "" && !still[m.Entity] {
				t.Errorf("the repair was said to leave %s", m)
			}
		}
		if p.Projection != "thread versions" && p.Projection != "comment archive" && (p.Left == 0 || p.Repaired == 0) {
			t.Errorf("%s: %d repaired, %d left: the test shows nothing", p.Projection, p.Repaired, p.Left)
		}
	}
	if code, stdout, stderr := run(t, nil, "", "verify", "--data", d.dir, "--dry-run"); code != exitInput {
		t.Errorf("--dry-run alone: exit code %d\n%s%s", code, stdout, stderr)
	}
}
