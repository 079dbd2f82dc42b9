package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/store"
)

func TestEraseSaysWhatItWaitsForAndGoesOn(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": testkit.NATS(t).URL}
	out, err := store.New(db.Pool(t, postgres.RoleAPI), nil).CreateChildren(t.Context(), 1, kinds.Builtin().Children["comment"],
		[]store.NewChild{{Meta: store.Meta{Actor: "ann"}, Object: "5", AuthorID: "7", Body: "text"}})
	if err != nil || out[0].Err != nil {
		t.Fatal(out, err)
	}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"erase --tenant 1", exitInput, "--tenant and --author are required"},
		{"erase --tenant 1 --author 7 --wait -1s", exitInput, "--wait is -1s: want 0 or more"},
		{"erase --tenant 1 --author 7 --dry-run", exitOK,
			"children               1\nsettings and requests  0\nidempotency keys       0\noutbox                 1\n"},
		{"erase --tenant 1 --author 8", exitOK, "Author 8 of tenant 1 is erased"},
		{"erase --tenant 1 --author 7 --wait 0s --actor jane --reason asked --yes", exitAgain,
			"NOT finished; run it again. It waited for the relay: 2 messages about the author not published yet."},
	} {
		code, stdout, stderr := run(t, env, "", strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("%s: exit code %d, %s%s: want %d, %s", c.args, code, stdout, stderr, c.code, c.says)
		}
	}
	// mark the row as published
	if _, err := db.Pool(t, postgres.RoleSystem).Exec(t.Context(), `UPDATE outbox_messages SET processed_at = now()`); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := run(t, env, "", "erase", "--tenant", "1", "--author", "7", "--actor", "joe", "--yes", "--json")
	var r erasure.Report
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK {
		t.Fatalf("exit code %d, %v, %s%s", code, err, stdout, stderr)
	}
	if !r.Done || r.Runs != 2 || r.RequestedBy != "jane" || r.FinishedAt == nil || r.Counts[erasure.Children] != 1 ||
		r.Counts[erasure.Outbox] != 1 {
		t.Errorf("the report is %s", stdout)
	}
}
