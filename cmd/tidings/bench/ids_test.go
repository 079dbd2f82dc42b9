package bench

import (
	"testing"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestAnIDIsTheSameInSQL compares the ids that the program makes with those of statements.
func TestAnIDIsTheSameInSQL(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleOwner)
	for _, form := range []idForm{integerIDs, uuidIDs, textIDs} {
		before := event.ID("")
		for _, n := range []int64{1, 42, 200_000_000, 1_000_000_000_500} {
			var got event.ID
			if err := pool.QueryRow(t.Context(), `SELECT `+form.sql("$1::bigint"), n).Scan(&got); err != nil {
				t.Fatal(err)
			}
			id := form.of(n)
			if _, err := event.ParseID(string(id)); err != nil || got != id {
				t.Errorf("%s %d: %s, in SQL %s: %v", form, n, id, got, err)
			}
			if id <= before && form != integerIDs {
				t.Errorf("%s comes after %s", before, id)
			}
			before = id
		}
	}
	if u := uuidIDs.of(7); !event.IsUUID(string(u)) || len(textIDs.of(7)) != 26 {
		t.Errorf("%s is no UUID, or %s has not 26 characters", u, textIDs.of(7))
	}
}
