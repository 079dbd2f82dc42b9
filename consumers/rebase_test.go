package consumers_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestARebaseLeavesConsumersThatHaveSomethingLeftToRead: of a stream that has lost its end they read the rest first. The rest is not published again.
func TestARebaseLeavesConsumersThatHaveSomethingLeftToRead(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id)
		VALUES ('behind', 'EVENTS-0', 4), ('there', 'EVENTS-0', 5), ('ahead', 'EVENTS-0', 9), ('ahead', 'EVENTS-1', 2)`); err != nil {
		t.Fatal(err)
	}
	for range 2 { // again changes nothing
		if err := consumers.Rebase(t.Context(), pool, "EVENTS-0", 5, broker.Stream{Name: "EVENTS-2", Created: time.Unix(1, 0)}); err != nil {
			t.Fatal(err)
		}
	}
	rows, _ := pool.Query(t.Context(), `SELECT consumer_name || ' ' || partition_key || ' ' || last_processed_id || ' ' || closed FROM consumer_offsets ORDER BY 1`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"ahead EVENTS-0 9 true", "ahead EVENTS-1 2 false", "ahead EVENTS-2 0 false", "behind EVENTS-0 4 false", "there EVENTS-0 5 true", "there EVENTS-2 0 false"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
