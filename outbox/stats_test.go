package outbox

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func checkStats(t *testing.T, pool *pgxpool.Pool, what string, pending, delayed int, lag, undelivered float64) {
	t.Helper()
	s, err := ReadStats(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	near := func(got, want float64) bool { return got >= want && got < want+60 }
	if s.Pending != pending || s.Delayed != delayed || !near(s.LagSeconds, lag) || !near(s.Undelivered, undelivered) {
		t.Errorf("%s: %d pending, %d of them delayed, %.0f s of lag, %.0f s undelivered; want %d, %d, %.0f, %.0f", what,
			s.Pending, s.Delayed, s.LagSeconds, s.Undelivered, pending, delayed, lag, undelivered)
	}
}

// TestTheGaugesTellWhatIsLate: the lag is the age of due rows. Retried rows, and rows behind them,
// count as undelivered all the time.
func TestTheGaugesTellWhatIsLate(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	age := func(ids []int64, inserted, available string) {
		exec(t, pool, `UPDATE outbox_messages SET inserted_at = now() + $2::interval, available_at = now() + $3::interval
			WHERE id = ANY($1)`, ids, inserted, available)
	}
	checkStats(t, pool, "an empty outbox", 0, 0, 0, 0)
	appendRows(t, pool, newEvent("1", `1`), newEvent("2", `2`), newEvent("3", `3`), newEvent("3", `4`))
	checkStats(t, pool, "four rows of now", 4, 0, 0, 0)
	age([]int64{1, 2, 3, 4}, "1000 s", "1000 s")
	checkStats(t, pool, "four rows of a server whose clock was ahead of its successor's", 4, 0, 0, 0)
	age([]int64{1, 2, 3, 4}, "0 s", "0 s")
	age([]int64{2}, "-1000 s", "-1000 s") // not the first by id
	checkStats(t, pool, "one of them old", 4, 0, 1000, 1000)
	publishAll(t, pool, 2)
	age([]int64{1}, "-5000 s", "1000 s")
	checkStats(t, pool, "one whose writer asked for a later time", 3, 1, 0, 0)
	age([]int64{1}, "-5000 s", "-2000 s")
	checkStats(t, pool, "which has fallen due", 3, 1, 2000, 5000)
	age([]int64{1}, "-5000 s", "1000 s")
	exec(t, pool, `UPDATE outbox_messages SET attempts = 3 WHERE id = 1`)
	checkStats(t, pool, "one that is retried", 3, 1, 0, 5000)
	publishAll(t, pool, 1)

	age([]int64{3}, "-10 s", "1000 s")
	age([]int64{4}, "-3000 s", "-3000 s")
	if err := Park(t.Context(), pool, exchange(t, pool, Round{}).Held); err != nil {
		t.Fatal(err)
	}
	checkStats(t, pool, "one parked behind a row of a later time", 2, 2, 0, 3000)
	exec(t, pool, `UPDATE outbox_partitions SET floor_id = 4`)
	checkStats(t, pool, "which the floor has passed", 2, 2, 0, 3000)
}

// TestAScrapeWithoutTheDatabaseLeavesTheGaugesOut: a gauge that kept its last value would look
// healthy.
func TestAScrapeWithoutTheDatabaseLeavesTheGaugesOut(t *testing.T) {
	db := testkit.Postgres(t)
	gauges := func(pool *pgxpool.Pool) int { return testutil.CollectAndCount(NewCollector(pool, testkit.Logger(t))) }
	pool := db.Pool(t, postgres.RoleSystem)
	if n := gauges(pool); n != 10 {
		t.Errorf("%d gauges, want 10", n)
	}
	pool.Close()
	if n := gauges(pool); n != 0 {
		t.Errorf("%d gauges without the database", n)
	}
}
