package cli

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/store"
)

// ownKinds are kinds that no release has.
const ownKinds = `objects: {song: songs}
edges:
  play: {plural: plays, from: user, to: song, forward: plays, reverse: players, attributes: {mood: {enum: [calm, loud], filter: true}}}
children:
  verdict: {plural: verdicts, parent: song, threaded: true, attributes: {stars: {type: integer, minimum: 1, maximum: 5, aggregate: true}}}
`

func TestAKindIsServedWhileDevRuns(t *testing.T) {
	d := newDev(t)
	d.start(t)
	if status, _ := d.request(t, http.MethodPut, "/v1/plays/1/2", `{"mood":"loud"}`, nil, nil); status != http.StatusNotFound {
		t.Fatalf("status %d before there is the kind, want 404", status)
	}
	file := filepath.Join(t.TempDir(), "kinds.yaml")
	if err := os.WriteFile(file, []byte(ownKinds), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, nil, "", "kinds", "apply", file, "--data", d.dir); code != exitOK {
		t.Fatalf("exit code %d, %s%s", code, stdout, stderr)
	}
	testkit.Eventually(t, arriveWithin, "the new kind to have routes", func() (bool, error) {
		status, _ := d.request(t, http.MethodPut, "/v1/plays/1/2", `{"mood":"loud"}`, nil, nil)
		return status == http.StatusCreated, nil
	})
	testkit.Eventually(t, arriveWithin, "the edge to be counted", func() (bool, error) {
		var got map[string]any
		status, _ := d.request(t, http.MethodGet, "/v1/songs/2/counts", "", nil, &got)
		return status == http.StatusOK && fmt.Sprint(got["players"]) == "1", nil
	})
	d.verify(t)
}

// The commands that work with the archive of threads know the kinds in force, not those of the release alone.
func TestTheArchiveOfThreadsKnowsTheKindsInForce(t *testing.T) {
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL, "COMMENT_ARCHIVE_AFTER": "1h"}
	if code, stdout, stderr := run(t, env, ownKinds, "kinds", "apply", "-"); code != exitOK {
		t.Fatalf("exit code %d, %s%s", code, stdout, stderr)
	}
	pool := db.Pool(t, postgres.RoleSystem)
	now, err := truthKinds(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	out, err := store.New(db.Pool(t, postgres.RoleAPI), nil).CreateChildren(t.Context(), 1, now.Children["verdict"],
		[]store.NewChild{{Meta: store.Meta{Actor: "ann"}, Object: 5, AuthorID: 7, Body: "a text", Attributes: []byte(`{"stars":5}`)}})
	if err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `UPDATE children_verdict SET created_at = created_at - interval '3 h', updated_at = updated_at - interval '3 h'`); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, env, "", "archive", "run", "--job", store.ArchiveJob); code != exitOK {
		t.Fatalf("exit code %d, %s%s", code, stdout, stderr)
	}
	archived := func() (n int) {
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM children_archive_verdict`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := archived(); n != 1 {
		t.Fatalf("%d children of the added kind are archived, want 1", n)
	}
	var id string
	if err := pool.QueryRow(t.Context(), `SELECT archive_id::text FROM archived_threads WHERE kind = 'verdict'`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, env, "", "archive", "undo", "--id", id); code != exitOK || archived() != 0 {
		t.Errorf("exit code %d, %d are archived, %s%s", code, archived(), stdout, stderr)
	}
}
