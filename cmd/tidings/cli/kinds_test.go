package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/kindfile"
)

func TestKindsAreAppliedListedAndShown(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	file := filepath.Join(t.TempDir(), "kinds.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const plays = `objects: {song: songs}
edges:
  play: {plural: plays, from: user, to: song, forward: plays, reverse: players, attributes: {mood: {enum: [calm, loud], filter: true}}}
`
	write(plays)
	const added = "edges.play: added\nobjects.song: added\n"
	for _, c := range []struct {
		args           string
		code           int
		stdout, stderr string // stdout begins, stderr contains
	}{
		{"kinds diff FILE", exitOK, added, ""},
		{"kinds apply FILE --dry-run", exitOK, added + "Nothing was changed (--dry-run).\n", ""},
		{"kinds show play", exitError, "", "there is no kind \"play\": `tidings kinds list` lists all of them"},
		{"kinds apply FILE --actor ann --reason music", exitOK,
			added + "These kinds are in force. All processes use them within 5 seconds. " +
				"`tidings kinds history` lists this change as version 100000000003.\n", ""},
		{"kinds apply FILE", exitOK, "The file has the kinds in force. Nothing was changed.\n", ""},
		{"kinds diff FILE", exitOK, "The file has the kinds in force. Nothing was changed.\n", ""},
		{"kinds apply FILE --json", exitOK, `{"changes":[],"version":100000000003,"dry_run":false}` + "\n", ""},
		{"kinds show play", exitOK, "objects:\n  song: songs\n  user: users\nedges:\n  play:\n    plural: plays\n    from: user\n    to: " +
			"song\n    ends: [user_id, song_id]\n", ""},
		{"kinds apply", exitInput, "", "got 0 arguments, want `tidings kinds apply FILE`"},
		{"kinds apply FILE.no", exitInput, "", "no such file"},
		{"kinds apply FILE --actor \x01", exitInput, "", "--actor must be"},
	} {
		args := strings.Fields(strings.ReplaceAll(c.args, "FILE", file))
		code, stdout, stderr := run(t, env, "", args...)
		if code != c.code || !strings.HasPrefix(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
			t.Errorf("%s: exit code %d, %q, %q: want %d, %q, %q", c.args, code, stdout, stderr, c.code, c.stdout, c.stderr)
		}
	}

	// The output of show is a valid file.
	_, shown, _ := run(t, env, "", "kinds", "show", "play")
	if code, stdout, stderr := run(t, env, shown, "kinds", "diff", "-"); code != exitOK ||
		!strings.HasPrefix(stdout, "The file has the kinds in force.") {
		t.Errorf("exit code %d, %s%s", code, stdout, stderr)
	}

	// With edges to children it shows the children.
	_, shown, _ = run(t, env, "", "kinds", "show", "vote")
	if _, err := kindfile.Extend(kinds.Builtin(), []byte(shown)); err != nil || !strings.Contains(shown, "  comment:\n") ||
		!strings.Contains(shown, "  post: posts\n") || strings.Contains(shown, "like") {
		t.Errorf("%v in %s", err, shown)
	}

	code, stdout, _ := run(t, env, "", "kinds", "list")
	if code != exitOK || !strings.Contains(stdout, "membership    edge   memberships    user → group") ||
		!strings.Contains(stdout, "  file\n") {
		t.Errorf("exit code %d, %s", code, stdout)
	}
	_, stdout, _ = run(t, env, "", "kinds", "list", "--json")
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	var review listedKind
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &review); err != nil || len(lines) != 10 || review.Parent != "product" ||
		!review.BuiltIn || strings.Join(review.Has, " ") != "moderated one_per_author rating" {
		t.Errorf("%d lines, %+v, %v", len(lines), review, err)
	}

	// A file with mistakes, reported by line; a refused change, with the reason.
	write("edges:\n  play: {plural: plays, from: user, to: tune, forward: plays, reverse: players}\n  like: {plural: loves}\n")
	code, _, stderr := run(t, env, "", "kinds", "apply", file)
	if want := "kinds.yaml is not a file of kinds:\nline 2: edges.play.to: the object \"tune\" does not exist: add it to objects\n" +
		"line 3: " +
		"edges.like.plural: likes is built in and cannot be changed to loves, because clients have it compiled in\n"; code != exitInput ||
		!strings.Contains(stderr, want) {
		t.Errorf("exit code %d, %s", code, stderr)
	}
	if _, err := db.Pool(t, postgres.RoleSystem).Exec(t.Context(),
		`INSERT INTO plays (tenant_id, user_id, song_id) VALUES (1, 2, 3)`); err != nil {
		t.Fatal(err)
	}
	write("{}")
	code, _, stderr = run(t, env, "", "kinds", "apply", file)
	if want := "is refused, and nothing was changed:\nedges.play: removed: refused, because play has rows in edges. Instead, leave " +
		"the kind in the file\n"; code != exitError || !strings.Contains(stderr, want) {
		t.Errorf("exit code %d, %s", code, stderr)
	}
	if _, stdout, _ := run(t, env, "", "kinds", "diff", file); !strings.Contains(stdout,
		"edges.play: removed (possible only if no row of play prevents it; otherwise, "+
			"leave the kind in the file)\n") {
		t.Errorf("%s", stdout)
	}

	code, stdout, _ = run(t, env, "", "kinds", "history")
	if code != exitOK || !strings.HasPrefix(stdout, "Version 100000000003, ") ||
		!strings.Contains(stdout, ", ann: music\n  edges.play: added\n  objects.song: added\n") {
		t.Errorf("exit code %d, %s", code, stdout)
	}
	var v kindsVersion
	if _, stdout, _ = run(t, env, "", "kinds", "history", "--json"); json.Unmarshal([]byte(stdout), &v) != nil || v.Actor != "ann" ||
		v.Reason != "music" || len(v.Changes) != 2 {
		t.Errorf("%s", stdout)
	}
}

func TestAListOfKindsMarksThoseThatAFileChanges(t *testing.T) {
	got := map[string][2]bool{}
	for _, k := range listed(testkit.Kinds(t, `
edges:
  follow: {partitions: 16}
  play: {plural: plays, from: user, to: post, forward: plays, reverse: players}
children: {comment: {}, review: {moderated: true, attributes: {mood: {type: string}}}}
`)) {
		got[k.Name] = [2]bool{k.BuiltIn, k.Changed}
	}
	for name, want := range map[string][2]bool{"follow": {true, true}, "play": {}, "like": {true, false}, "comment": {true, false},
		"review": {true, true}} {
		if got[name] != want {
			t.Errorf("%s: built in, changed are %v, want %v", name, got[name], want)
		}
	}
}
