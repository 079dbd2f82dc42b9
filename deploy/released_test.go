//go:build upgrade

package deploy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event/contracts"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// git runs git in a repository and returns its output.
func git(t *testing.T, repository string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-C", repository}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git %s: %v: %s", strings.Join(args, " "), err, &stderr)
	}
	return string(out)
}

// previous returns the commit of the previous release: the nearest tag of a release below the
// commit that is checked out. Before there is one, it's what deploy/upgrade/previous records.
func previous(t *testing.T, repository string) string {
	t.Helper()
	recorded, err := os.ReadFile(filepath.Join(repository, "deploy/upgrade/previous"))
	tag, untagged := exec.Command("git", "-C", repository, "describe", "--tags", "--abbrev=0", "--match=v*.*.*", "--exclude=*-*",
		"HEAD~1").Output()
	commit := strings.TrimSpace(string(tag))
	if untagged != nil {
		if err != nil {
			t.Fatal(err)
		}
		commit = strings.TrimSpace(string(recorded))
	}
	if exec.Command("git", "-C", repository, "cat-file", "-e", commit+"^{commit}").Run() != nil {
		t.Fatalf("this test builds the previous release, commit %s, which the repository's history lacks. Run it in a full clone: "+
			"`git fetch --unshallow --tags` completes a shallow one.", commit)
	}
	return commit
}

// TestTheReleaseBeforeIsTheNearestTag tags releases in a repository of three commits.
func TestTheReleaseBeforeIsTheNearestTag(t *testing.T) {
	dir := t.TempDir()
	git(t, dir, "init", "--quiet")
	commit := func(previous string) string {
		if err := os.MkdirAll(filepath.Join(dir, "deploy/upgrade"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "deploy/upgrade/previous"), []byte(previous+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		git(t, dir, "add", "--all")
		git(t, dir, "-c", "user.name=test", "-c", "user.email=test@example.com", "commit", "--quiet", "--message=test")
		return strings.TrimSpace(git(t, dir, "rev-parse", "HEAD"))
	}
	check := func(of, want string) {
		t.Helper()
		if got := previous(t, dir); got != want {
			t.Errorf("the release before %s is %q, want %q", of, got, want)
		}
	}
	recorded := commit("none")
	commit(recorded)
	check("the first release", recorded)
	git(t, dir, "tag", "v0.1.0")
	git(t, dir, "tag", "v0.2.0-rc.1", "HEAD~1")
	check("the tag of the first release", recorded)
	commit(recorded + " ")
	check("the second release", "v0.1.0")
	git(t, dir, "tag", "v0.2.0")
	check("the tag of the second release", "v0.1.0")
}

// released returns the files of a folder in the previous release, by their paths.
func released(t *testing.T, folder string) map[string][]byte {
	t.Helper()
	commit, files := previous(t, ".."), map[string][]byte{}
	for name := range strings.Lines(git(t, "..", "ls-tree", "-r", "--name-only", commit, folder)) {
		name = strings.TrimSpace(name)
		files[name] = []byte(git(t, "..", "show", commit+":"+name))
	}
	if len(files) == 0 {
		t.Fatalf("the previous release has no files in %s", folder)
	}
	return files
}

// TestThisTreeKeepsTheFilesOfTheReleaseBefore checks that the migrations and the examples of
// published events of the previous release have not changed.
func TestThisTreeKeepsTheFilesOfTheReleaseBefore(t *testing.T) {
	before := released(t, "migrations/")
	maps.Copy(before, released(t, "event/testdata/"))
	same := 0
	for name, was := range before {
		if ext := path.Ext(name); ext != ".sql" && ext != ".json" {
			continue
		}
		same++
		is, err := os.ReadFile(filepath.Join("..", name))
		if err != nil || !bytes.Equal(is, was) && !hasHeadersOf(is, was) {
			t.Errorf("%s differs from the previous release (%v): restore it, and add a file with the next number", name, err)
		}
	}
	if same < 10 {
		t.Errorf("the test compared only %d migrations and events", same)
	}
}

// hasHeadersOf says whether a golden message equals an earlier one, but for additional headers.
func hasHeadersOf(is, was []byte) bool {
	var now, then map[string]any
	if json.Unmarshal(is, &now) != nil || json.Unmarshal(was, &then) != nil {
		return false
	}
	headers, _ := now["headers"].(map[string]any)
	before, _ := then["headers"].(map[string]any)
	maps.DeleteFunc(headers, func(name string, _ any) bool { _, is := before[name]; return !is })
	return reflect.DeepEqual(now, then)
}

// TestReadersOfTheReleaseBeforeReadWhatThisTreeWrites checks that the schemas of payloads and the
// AsyncAPI document have lost nothing since the previous release.
func TestReadersOfTheReleaseBeforeReadWhatThisTreeWrites(t *testing.T) {
	parse := func(name string, raw []byte) (doc map[string]any) {
		if err := json.Unmarshal(raw, &doc); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return doc
	}
	for name, raw := range released(t, "event/contracts/builtin/") {
		now, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Errorf("%s is gone: %v", name, err)
			continue
		}
		was, is := parse(name, raw), parse(name, now)
		if strings.Contains(name, "/schemas/") {
			for _, d := range contracts.Differences(was, is) {
				t.Errorf("%s: %s", name, d)
			}
			continue
		}
		for _, gone := range goneFrom("#", was, is) {
			t.Errorf("%s: %s", name, gone)
		}
	}
}

// compareSchemas checks that an upgraded database equals a new one. The previous release and then
// this tree migrate the first database; this tree alone migrates the second.
func (r *rollout) compareSchemas() {
	r.t.Helper()
	upgraded, fresh := testkit.EmptyPostgres(r.t), testkit.EmptyPostgres(r.t)
	r.by(r.before).run([]string{"DATABASE_URL=" + upgraded.URL}, "migrate")
	r.by(r.after).run([]string{"DATABASE_URL=" + upgraded.URL}, "migrate")
	r.by(r.after).run([]string{"DATABASE_URL=" + fresh.URL}, "migrate")
	was, is := describe(r.t, fresh), describe(r.t, upgraded)
	if diff := cmp.Diff(was, is); diff != "" || len(was) < 500 {
		r.t.Errorf("these of the %d lines that describe the schema differ (-fresh +upgraded):\n%s", len(was), diff)
	}
}

// describeSQL returns a line for each relation, column, index, constraint, trigger, policy, view
// and function of a schema.
const describeSQL = `
WITH here AS (SELECT oid FROM pg_namespace WHERE nspname = current_schema()),
     rel AS (SELECT c.* FROM pg_class c JOIN here ON here.oid = c.relnamespace)
SELECT line FROM (
  SELECT format('relation %s %s rls=%s options=%s rights=%s partition=%s',
      relname, relkind, relrowsecurity, reloptions, relacl::text, pg_get_expr(relpartbound, oid))
    FROM rel WHERE relkind <> 'i' AND relkind <> 'I'
  UNION ALL
  SELECT format('column %s.%s %s %s null=%s default=%s %s%s rights=%s',
      relname, row_number() OVER (PARTITION BY a.attrelid ORDER BY attnum), attname, format_type(atttypid, atttypmod),
      NOT attnotnull, pg_get_expr(adbin, adrelid), attgenerated, attidentity, attacl::text)
    FROM rel JOIN pg_attribute a ON attrelid = rel.oid AND attnum > 0 AND NOT attisdropped
    LEFT JOIN pg_attrdef d ON adrelid = attrelid AND adnum = attnum
    WHERE relkind IN ('r', 'p', 'v', 'm')
  UNION ALL
  SELECT format('index %s %s', relname, pg_get_indexdef(oid)) FROM rel WHERE relkind IN ('i', 'I')
  UNION ALL
  SELECT format('constraint %s %s %s', relname, conname, pg_get_constraintdef(k.oid))
    FROM rel JOIN pg_constraint k ON conrelid = rel.oid
  UNION ALL
  SELECT format('trigger %s', pg_get_triggerdef(g.oid)) FROM rel JOIN pg_trigger g ON tgrelid = rel.oid WHERE NOT tgisinternal
  UNION ALL
  SELECT format('policy %s %s %s %s using=%s check=%s', relname, polname, polcmd, polroles::regrole[],
      pg_get_expr(polqual, polrelid), pg_get_expr(polwithcheck, polrelid))
    FROM rel JOIN pg_policy ON polrelid = rel.oid
  UNION ALL
  SELECT format('view %s %s', relname, pg_get_viewdef(oid)) FROM rel WHERE relkind = 'v'
  UNION ALL
  SELECT format('function %s rights=%s', pg_get_functiondef(p.oid), proacl::text)
    FROM pg_proc p JOIN here ON here.oid = pronamespace WHERE prokind IN ('f', 'p')
) all_lines (line) ORDER BY 1`

// describe returns the lines of describeSQL for the database.
func describe(t *testing.T, db *testkit.DB) []string {
	t.Helper()
	rows, _ := db.Pool(t, postgres.RoleOwner).Query(context.Background(), describeSQL)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return lines
}
