package cli

import (
	"strings"
	"testing"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

func TestEdgesRemoveWorksUntilAllAreGone(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	s := store.New(db.Pool(t, postgres.RoleAPI), nil)
	for _, pair := range [][2]event.ID{{"7", "8"}, {"8", "7"}, {"9", "8"}} {
		out, err := s.PutEdges(t.Context(), 1, kinds.Builtin().Edges["follow"],
			[]store.EdgeWrite{{Meta: store.Meta{Actor: "ann"}, From: pair[0], To: pair[1]}})
		if err != nil || out[0].Err != nil {
			t.Fatal(out, err)
		}
	}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"edges remove --tenant 1", exitInput, "--tenant and --id are required"},
		{"edges remove --tenant 1 --id a,b", exitInput, `--id: "a,b" is not an id`},
		{"edges remove --tenant 1 --id 7 --direction up", exitInput, `--direction is "up": want from, to or both`},
		{"edges remove --tenant 1 --id 7 --kind nothing", exitInput, "not every kind of [nothing]"},
		{"edges remove --tenant 2 --id 7 --kind follow", exitOK, "KIND    REMOVED\nfollow  0\n"},
		{"edges remove --tenant 1 --id 7 --direction from --actor jane --reason asked --yes --json", exitOK, `{"follow":1}`},
		{"edges remove --tenant 1 --id 7 --kind follow --yes", exitOK, "follow  1\n"},
		{"edges remove --tenant 1 --object post --id 7 --yes", exitOK, "like   0\n"},
	} {
		code, stdout, stderr := run(t, env, "", strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("%s: exit code %d, %s%s: want %d, %s", c.args, code, stdout, stderr, c.code, c.says)
		}
	}
	var active, actors int
	if err := db.Pool(t, postgres.RoleSystem).QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE status = 'ACTIVE'),
		(SELECT count(*) FROM edge_removals WHERE actor = 'jane' AND finished_at IS NOT NULL) FROM follows`).Scan(&active,
		&actors); err != nil || active != 1 || actors != 1 {
		t.Errorf("%d edges are left, want that of others; %d removals are jane's: %v", active, actors, err)
	}
}
