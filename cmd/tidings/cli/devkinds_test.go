package cli

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
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

// TestTheSiteInOneFileWorks runs a section of docs/kinds.md against a dev.
func TestTheSiteInOneFileWorks(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/kinds.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## A site in one file\n")
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := func(language string) (all []string) {
		for _, m := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(section, -1) {
			all = append(all, m[1])
		}
		return all
	}
	inYAML, inShell, inHTTP := blocks("yaml"), blocks("sh"), blocks("http")
	if len(inYAML) != 1 || len(inShell) != 1 || len(inHTTP) != 6 {
		t.Fatalf("the section has %d blocks of YAML, %d of commands and %d requests", len(inYAML), len(inShell), len(inHTTP))
	}
	d := newDev(t)
	d.start(t)
	var comment struct {
		ID string `json:"comment_id"`
	}
	send := func(request string) (int, string) {
		line, body, _ := strings.Cut(strings.ReplaceAll(request, "{comment_id}", comment.ID), "\n")
		method, path, _ := strings.Cut(line, " ")
		var answer json.RawMessage
		status, _ := d.request(t, method, path, strings.TrimSpace(body), http.Header{"Idempotency-Key": {path}}, &answer)
		return status, string(answer)
	}
	create, vote, react := inHTTP[0], inHTTP[1], inHTTP[2]
	if status, _ := send(react); status != http.StatusNotFound {
		t.Fatalf("status %d before the kind exists, want 404", status)
	}
	file := filepath.Join(t.TempDir(), "kinds.yaml")
	if err := os.WriteFile(file, []byte(inYAML[0]), 0o600); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(inShell[0]) {
		args := strings.Fields(regexp.MustCompile(`"[^"]*"`).ReplaceAllString(strings.TrimPrefix(line, "tidings "), "site"))
		args[slices.Index(args, "kinds.yaml")] = file
		if code, stdout, stderr := run(t, nil, "", append(args, "--data", d.dir)...); code != exitOK {
			t.Fatalf("%s: exit code %d, %s%s", line, code, stdout, stderr)
		}
	}
	testkit.Eventually(t, "the new kind to have routes", func() (bool, error) {
		status, _ := send(react)
		return status == http.StatusCreated, nil
	})
	status, answer := send(create)
	if err := json.Unmarshal([]byte(answer), &comment); status != http.StatusCreated || err != nil {
		t.Fatalf("%s: %d %s %v", create, status, answer, err)
	}
	if status, answer := send(vote); status != http.StatusCreated {
		t.Fatalf("%s: %d %s", vote, status, answer)
	}
	if status, answer := send(strings.Replace(create, `0000000a"`, `0000000A"`, 1)); status != http.StatusUnprocessableEntity {
		t.Errorf("an author whose id is no UUID in lower case: %d %s", status, answer)
	}
	d.verify(t)
	for i, want := range [][]string{
		{`"voters":1`, `"likers":0`, `"sum":1`}, {`"heart":1`, `"sad":0`, `"comments":{"total":1`}, {`"reaction":{"active":true`},
	} {
		status, answer := send(inHTTP[3+i])
		for _, text := range want {
			if status != http.StatusOK || !strings.Contains(answer, text) {
				t.Errorf("%s: %d %s, want %s", inHTTP[3+i], status, answer, text)
			}
		}
	}
}

// The commands on shelved threads must use the kinds in force, not only the built-in ones.
func TestTheArchiveOfThreadsKnowsTheKindsInForce(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	if code, _, stderr := run(t, env, "", "archive", "settings", "comment_archive_after=1h", "--yes"); code != exitOK {
		t.Fatal(stderr)
	}
	if code, stdout, stderr := run(t, env, ownKinds, "kinds", "apply", "-"); code != exitOK {
		t.Fatalf("exit code %d, %s%s", code, stdout, stderr)
	}
	pool := db.Pool(t, postgres.RoleSystem)
	now, err := truthKinds(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	out, err := store.New(db.Pool(t, postgres.RoleAPI), nil).CreateChildren(t.Context(), 1, now.Children["verdict"],
		[]store.NewChild{{Meta: store.Meta{Actor: "ann"}, Object: "5", AuthorID: "7", Body: "a text", Attributes: []byte(`{"stars":5}`)}})
	if err != nil || out[0].Err != nil {
		t.Fatal(err, out)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`UPDATE children_verdict SET created_at = created_at - interval '3 h', updated_at = updated_at - interval '3 h'`); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, env, "", "archive", "run", "--job", store.ShelvingJob); code != exitOK {
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
