package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/replay"
)

func TestReplayBuildsTheProjectionsOfARunningDevAnew(t *testing.T) {
	t.Parallel()
	d := newDev(t, "HEARTBEAT_INTERVAL=1s") // replay and verify must ignore heartbeats
	d.start(t)
	spec := followGraph(40, 400, 5)
	if code, stdout, stderr := run(t, nil, "", "load", "--generate", "users=40,edges=400,seed=5", "--data", d.dir); code != exitOK {
		t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	d.verify(t) // waits until every event is published and applied
	if code, stdout, _ := run(t, nil, "", "replay", "--consumer", "followercounts", "--dry-run", "--data", d.dir); code != exitOK ||
		!strings.Contains(stdout, "Nothing was changed (--dry-run)") {
		t.Errorf("a dry run: exit code %d\n%s", code, stdout)
	}
	for _, from := range []replay.Source{replay.Stream, replay.Truth} {
		code, stdout, stderr := run(t, nil, "", "replay", "--consumer", "followercounts", "--from", string(from), "--yes",
			"--json", "--data", d.dir)
		var report replay.Report
		if err := json.Unmarshal([]byte(stdout), &report); code != exitOK || err != nil {
			t.Fatalf("replay: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
		}
		if !report.Switched || report.From != from || report.Events < spec.Edges || !strings.Contains(stderr, "switching") {
			t.Errorf("replay: %s\n%s", stdout, stderr)
		}
		d.verify(t)
		d.checkCounts(t, spec)
	}
	d.checkHeartbeats(t)
	for _, args := range [][]string{{"--consumer", "nobody"}, {"--consumer", "archiver", "--from", "memory"}} {
		if code, _, stderr := run(t, nil, "", append([]string{"replay"}, args...)...); code != exitInput {
			t.Errorf("%v: exit code %d, %s", args, code, stderr)
		}
	}
}

// checkHeartbeats checks that heartbeats passed each station, and that only the outbox stores them.
func (d *dev) checkHeartbeats(t *testing.T) {
	t.Helper()
	want := map[string]string{"": "published", "followercounts": "applied", "threadcache": "applied", "archiver": "applied"}
	testkit.Eventually(t, fmt.Sprintf("heartbeats to pass %v", want), func() (bool, error) {
		resp, err := http.Get(d.instance(t).Ops + "/metrics")
		if err != nil {
			return false, err
		}
		defer resp.Body.Close()
		metrics, err := io.ReadAll(resp.Body)
		stations := regexp.MustCompile(`(?m)^tidings_path_latency_seconds_count\{consumer="(\w*)",part="\w+",station="(\w+)"\} [1-9]`).
			FindAllStringSubmatch(string(metrics), -1)
		got := map[string]string{}
		for _, s := range stations {
			got[s[1]] = s[2]
		}
		if err == nil && !maps.Equal(got, want) {
			err = fmt.Errorf("they have passed %v", got)
		}
		return err == nil, err
	})
	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	rows, _ := conn.Query(t.Context(), `SELECT table_name FROM information_schema.columns WHERE table_schema = current_schema()
		AND column_name = 'tenant_id'`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(tables) < 20 {
		t.Fatalf("%d tables, %v", len(tables), err)
	}
	for _, table := range tables {
		var some bool
		if err := conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM `+pgx.Identifier{table}.Sanitize()+
			` t WHERE tenant_id = 0 AND strpos(t::text, 'interval_seconds') > 0)`).Scan(&some); err != nil {
			t.Fatal(err)
		}
		if outbox := strings.HasPrefix(table, "outbox_messages"); some && !outbox || !some && table == "outbox_messages" {
			t.Errorf("heartbeats in %s: %t", table, some)
		}
	}
}
