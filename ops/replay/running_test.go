package replay

import (
	"slices"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestARunningReplayIsSeen has a lock without tables, tables without a lock, and both.
func TestARunningReplayIsSeen(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	owner, system := db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleSystem)
	conn, err := owner.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	do := func(sql string, args ...any) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	for _, one := range []struct {
		lock, schema string
		want         []string
	}{{"followercounts", "", nil}, {"", "tidings_replay_archiver_x", nil},
		{"", "tidings_replay_followercounts_x", []string{"followercounts"}}, {"archiver", "", []string{"archiver", "followercounts"}}} {
		if one.lock != "" {
			do(lockSQL, one.lock)
		}
		if one.schema != "" {
			do(`CREATE SCHEMA ` + one.schema)
		}
		got, err := Running(t.Context(), system, []string{"threadcache", "archiver", "followercounts"})
		if err != nil || !slices.Equal(got, one.want) {
			t.Errorf("with the lock %q and the schema %q: %v, %v; want %v", one.lock, one.schema, got, err, one.want)
		}
	}
	do(unlockSQL)
	if got, err := Running(t.Context(), system, []string{"archiver"}); err != nil || len(got) != 0 {
		t.Errorf("after the end: %v, %v", got, err)
	}
}
