package cli

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// outputFile has what commands print, both as text and with --json, without ids, numbers and times.
const outputFile = "testdata/output.golden"

// goldenCommands are the commands of outputFile, in the order in which they run. Those of the first
// list need a dev, those of the second one a database without relays. FILE is a file of kinds, DIR
// a directory, COMMENT the id of a comment.
var goldenCommands = [][]string{{
	"migrate", "partitions list", "partitions list --all",
	"kinds diff FILE", "kinds apply FILE --dry-run", "kinds apply FILE --reason music", "kinds apply FILE", "kinds list", "kinds history",
	"kinds show play!", "contracts write DIR/contracts!",
	"token create --tenant 7 --name NAME --expires 720h", "token create --tenant 7 --name NAME --replace --rate-read 5/1s",
	"token list --tenant 7", "token revoke --tenant 7 --name NAME --yes", "token revoke --tenant 7 --name none --yes",
	"outbox list", "outbox list --limit 1", "outbox show 9000001", "outbox show 1", "outbox retry 9000003!",
	"outbox kill 9000001 9000002 --reason x --yes!", "outbox kill 9000002 --reason x --yes!",
	"events find --sequence EVENTS-0/1", "events find --since 1h --type created --payload", "events find --id 99", "events find",
	"events find --since 1h --limit 1",
	"history edge 7 42 --tenant 1 --kind follow", "history follow 7 43 --tenant 1", "history comment COMMENT --tenant 1",
	"history thread 5 --tenant 1", "history author 7 --tenant 1 --limit 1", "history edge 7 42 --tenant 1 --kind none",
	"pause --consumer archiver --reason x", "pause --consumer archiver", "resume --consumer archiver", "resume --consumer archiver",
	"verify", "replay --consumer threadcache --dry-run", "replay --consumer threadcache --yes", "repair stream --dry-run",
	"repair stream --yes", "restore --since 1h --dry-run", "edges remove --tenant 1 --id 7 --kind follow --yes",
	"erase --tenant 1 --author 7 --dry-run", "erase --tenant 1 --author 7 --yes", "erase --tenant 1 --author 7 --yes",
	"load --generate users=4,edges=5,seed=1", "load --kind comment --generate posts=2,comments=3,seed=1",
	"stream configure --max-age 1h --yes!", "partitions resize --to 1!",
}, {
	"archive settings", "archive settings outbox_archive_keep=168h --actor ann --reason law --yes", "archive run --dry-run",
	"archive run --yes", "archive status", "archive undo --id 1", "archive hold add --tenant 9 --from 2030-01 --to 2030-02 --reason law!",
	"archive hold list", "archive hold release 1 --yes!", "archive hold list --all", "archive hold list",
	"archive export --all --to file://DIR/exports", "archive exports", "archive verify", "archive restore --month 2030-01",
	"archive run --job none",
}}

// volatile are the parts of an output that differ from run to run, and their replacements.
var volatile = []struct {
	pattern *regexp.Regexp
	by      string
}{
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`), "UUID"},
	{regexp.MustCompile(`tdg_[\w-]+|"(fingerprint|token)":"[^"]*"|fingerprint \w+`), "SECRET"},
	{regexp.MustCompile(`(?m)^[0-9a-f]+( +7 +n)`), "SECRET$1"},
	{regexp.MustCompile(`"(slug|path)":( ?)"[0-9a-z]*"`), `"$1":$2"PLACE"`},
	{regexp.MustCompile(`relay-[\w-]+`), "RELAY"},
	{regexp.MustCompile(`"owner":"[^"]*"`), `"owner":"OWNER"`},
	{regexp.MustCompile(`(?m)^time=.* level=INFO .*\n`), ""},
	{regexp.MustCompile(`(?m)^waiting for [\w ]+: .*\n`), ""}, // only if it takes longer than a moment
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:.]+Z`), "TIME"},
	{regexp.MustCompile(`"traceparent":"[^"]*",`), ""},
	{regexp.MustCompile(`-?\d[\d,.]*(e-\d+)?(ms|[smhµ]\b)*`), "N"},
	{regexp.MustCompile(` {2,}`), "  "},
	{regexp.MustCompile(` +\n`), "\n"},
}

func masked(text, dir, user string) string {
	text = strings.NewReplacer(dir, "DIR", `"`+user+`"`, `"USER"`, " "+user, " USER").Replace(text)
	for _, v := range volatile {
		text = v.pattern.ReplaceAllString(text, v.by)
	}
	return text
}

// TestCommandsPrintWhatTheyPrinted compares the outputs with outputFile. -update writes it.
func TestCommandsPrintWhatTheyPrinted(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	d := newDev(t, "DATABASE_URL="+db.URL)
	d.start(t)
	var comment struct {
		ID string `json:"comment_id"`
	}
	d.request(t, "PUT", "/v1/follows/7/42", "", nil, nil)
	d.request(t, "DELETE", "/v1/follows/7/42", "", nil, nil)
	d.request(t, "PUT", "/v1/follows/7/43", "", nil, nil)
	d.request(t, "POST", "/v1/posts/5/comments", `{"author_id":"7","body":"a comment"}`, http.Header{"Idempotency-Key": {"k"}}, &comment)
	d.request(t, "PUT", "/v1/posts/5/thread", `{"title":"a title"}`, nil, nil)
	d.verify(t)
	still := testkit.Postgres(t)
	execSQL(t, db.Pool(t, postgres.RoleSystem), `SELECT nextval('outbox_messages_id_seq'); INSERT INTO outbox_messages
		(id, tenant_id, aggregate_type, aggregate_id, event_type, payload, attempts, available_at, last_error)
		SELECT id, 2, 'post', id, 'later', '{}', 2, now() + interval '1 hour', 'no leader' FROM generate_series(9000001, 9000002) id`)
	publishedRows(t, still.Pool(t, postgres.RoleSystem), 300)

	dir := t.TempDir()
	file := filepath.Join(dir, "kinds.yaml")
	if err := os.WriteFile(file, []byte("edges: {play: {plural: plays, from: user, to: song, forward: plays, reverse: players}}\n"+
		"objects: {song: songs}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for i, commands := range goldenCommands {
		for _, line := range commands {
			command, textOnly := strings.CutSuffix(line, "!")
			forms := []string{"", " --json"}
			if textOnly {
				forms = forms[:1]
			}
			for _, form := range forms {
				args := strings.Fields(strings.NewReplacer("FILE", file, "DIR", dir, "COMMENT", comment.ID, "NAME", "n"+
					strings.TrimSpace(form)).Replace(command + form))
				env := map[string]string{"DATABASE_URL": still.URL}
				if i == 0 {
					args, env = append(args, "--data", d.dir), nil
				}
				code, stdout, stderr := run(t, env, "", args...)
				if strings.HasPrefix(command, "load") || strings.HasPrefix(command, "replay") {
					stderr = "" // progress
				}
				fmt.Fprintf(&b, "$ tidings %s%s\n%s%s= %d\n", command, form, masked(stdout, dir, osUser()),
					masked(stderr, dir, osUser()), code)
			}
		}
	}
	if *update {
		if err := os.WriteFile(outputFile, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(outputFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(b.String(), "\n")); diff != "" {
		t.Errorf("%s differs (-want +got):\n%s", outputFile, diff)
	}
}
