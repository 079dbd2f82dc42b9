package cli

import (
	"strings"
	"testing"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"pause", exitInput, `--consumer is missing: want one of followercounts, threadcache, archiver`},
		{"pause --consumer archive", exitInput, `there is no consumer "archive": want one of`},
		{"resume --consumer archive", exitInput, `there is no consumer "archive": want one of`},
		{"resume --consumer archiver", exitOK, "archiver was not paused."},
		{"pause --consumer archiver --actor ann --reason night", exitOK,
			"archiver is paused: its instances finish their batches within two seconds. `tidings resume --consumer archiver` resumes it"},
		{"pause --consumer archiver", exitOK, "archiver was already paused"},
		{"pause --consumer archiver --json", exitOK, `{"consumer":"archiver","paused":true,"changed":false}`},
	} {
		code, stdout, stderr := run(t, env, "", strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("%s: exit code %d, %s%s: want %d, %s", c.args, code, stdout, stderr, c.code, c.says)
		}
	}
	pool := db.Pool(t, postgres.RoleSystem)
	if all, err := consumers.Pauses(t.Context(), pool); err != nil || len(all) != 1 || all["archiver"].Actor != "ann" ||
		all["archiver"].Reason != "night" {
		t.Errorf("pauses: %+v, %v", all, err)
	}
	if code, stdout, _ := run(t, env, "", "resume", "--consumer", "archiver", "--json"); code != exitOK ||
		stdout != `{"consumer":"archiver","paused":false,"changed":true}`+"\n" {
		t.Errorf("resume: exit code %d, %s", code, stdout)
	}
	if all, err := consumers.Pauses(t.Context(), pool); err != nil || len(all) != 0 {
		t.Errorf("pauses: %+v, %v", all, err)
	}
}
