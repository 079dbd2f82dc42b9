package outbox

import (
	"cmp"
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

const insertSQL = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) `

// everyWay are statements that write an outbox row of aggregate 1 first of all in their transaction.
var everyWay = map[string]struct {
	before, insert, after string
}{
	"VALUES":        {insert: insertSQL + `VALUES (1, 'post', 1, 'created', '{}')`},
	"several rows":  {insert: insertSQL + `VALUES (1, 'post', 1, 'created', '{}'), (1, 'post', 1, 'edited', '{}')`},
	"INSERT SELECT": {insert: insertSQL + `SELECT 1, 'post', 1, 'created', '{}' FROM generate_series(1, 3) n ORDER BY n DESC`},
	"ON CONFLICT":   {insert: insertSQL + `VALUES (1, 'post', 1, 'created', '{}') ON CONFLICT DO NOTHING`},
	"WITH":          {insert: `WITH w AS (` + insertSQL + `VALUES (1, 'post', 1, 'created', '{}') RETURNING id) SELECT * FROM w`},
	"all columns":   {insert: `INSERT INTO outbox_messages VALUES (DEFAULT, 1, 'post', 1, 'created', 1, '{}')`},
	"COPY":          {}, // by the driver
	"a savepoint":   {before: `SAVEPOINT s`, insert: insertSQL + `VALUES (1, 'post', 1, 'created', '{}')`, after: `RELEASE s`},
	"two phases":    {insert: insertSQL + `VALUES (1, 'post', 1, 'created', '{}')`, after: `PREPARE TRANSACTION 'floor'`},
}

// write begins a transaction on conn and writes a row in the way.
func write(ctx context.Context, conn *pgx.Conn, way string) error {
	w := everyWay[way]
	if _, err := conn.Exec(ctx, "BEGIN; "+w.before); err != nil {
		return err
	}
	var err error
	if way == "COPY" {
		_, err = conn.CopyFrom(ctx, pgx.Identifier{"outbox_messages"}, []string{"tenant_id", "aggregate_type", "aggregate_id", "event_type", "payload"},
			pgx.CopyFromRows([][]any{{1, "post", 1, "created", "{}"}}))
	} else {
		_, err = conn.Exec(ctx, w.insert)
	}
	if err == nil && w.after != "" {
		_, err = conn.Exec(ctx, w.after)
	}
	return err
}

func commit(ctx context.Context, conn *pgx.Conn, way string) error {
	_, err := conn.Exec(ctx, map[bool]string{true: `COMMIT PREPARED 'floor'`, false: `COMMIT`}[way == "two phases"])
	return err
}

// connect returns a connection of its own, which acts as the owner: row-level security keeps others from COPY.
func connect(t *testing.T, db *testkit.DB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// TestAWriterHasItsTransactionsIDBeforeItsRowsID stops each writer where it takes its row's id: a change of the sequence that is not
// committed makes it wait there. The server shows whether it has a transaction id by then.
func TestAWriterHasItsTransactionsIDBeforeItsRowsID(t *testing.T) {
	db := testkit.PostgresProcess(t).DB(t)
	owner := db.Pool(t, postgres.RoleOwner)
	for way := range everyWay {
		t.Run(way, func(t *testing.T) {
			conn := connect(t, db)
			held, err := owner.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = held.Rollback(context.WithoutCancel(t.Context())) }() // ErrTxClosed, but after a failure
			if _, err := held.Exec(t.Context(), `ALTER SEQUENCE outbox_messages_id_seq CACHE 1`); err != nil {
				t.Fatal(err)
			}
			written := make(chan error, 1)
			go func() { written <- write(t.Context(), conn, way) }()
			var has bool
			testkit.Eventually(t, 10*time.Second, "the writer to take its row's id", func() (bool, error) {
				var waits bool
				err := owner.QueryRow(t.Context(), `
					SELECT coalesce(bool_or(wait_event_type = 'Lock' AND pid IN (SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'outbox_messages_id_seq'::regclass)), false),
					       coalesce(bool_or(backend_xid IS NOT NULL), false)
					  FROM pg_stat_activity WHERE pid = $1`, conn.PgConn().PID()).Scan(&waits, &has)
				return waits, err
			})
			if !has {
				t.Error("it has no transaction id yet")
			}
			if err := held.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := cmp.Or(<-written, commit(t.Context(), conn, way)); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// floors are a database's, on a server where nobody else writes.
type floors struct {
	t    *testing.T
	db   *testkit.DB
	pool *pgxpool.Pool
}

func newFloors(t *testing.T) floors {
	t.Helper()
	db := testkit.PostgresProcess(t).DB(t)
	return floors{t: t, db: db, pool: db.Pool(t, postgres.RoleSystem)}
}

// raise raises the floors often enough to raise them as far as they can rise.
func (f floors) raise() {
	f.t.Helper()
	for range 3 {
		if err := RaiseFloors(f.t.Context(), f.pool, everything()); err != nil {
			f.t.Fatal(err)
		}
	}
	if found, err := BelowFloor(f.t.Context(), f.pool, everything()); err != nil || len(found) > 0 {
		f.t.Errorf("below the floors: %+v, %v", found, err)
	}
}

// all returns the least and the greatest floor.
func (f floors) all() (least, greatest int64) {
	f.t.Helper()
	if err := f.pool.QueryRow(f.t.Context(), `SELECT min(floor), max(floor) FROM outbox_partitions`).Scan(&least, &greatest); err != nil {
		f.t.Fatal(err)
	}
	return least, greatest
}

// claimable returns the ids that a claim finds, and publishes them when it is told to.
func (f floors) claimable(publish bool) (ids []int64) {
	f.t.Helper()
	batches, err := Claim(f.t.Context(), f.pool, everything(), 100, 1<<20, 1<<20)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, b := range batches {
		for _, r := range b.Rows {
			ids = append(ids, r.OutboxID)
		}
	}
	if publish {
		f.exec(`UPDATE outbox_messages SET processed_at = now() WHERE id = ANY($1)`, ids)
	}
	return ids
}

func (f floors) exec(sql string, args ...any) {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), sql, args...); err != nil {
		f.t.Fatal(err)
	}
}

func TestAFloorRisesOnlyPastWhatCanNoLongerAppear(t *testing.T) {
	for way := range everyWay {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			f := newFloors(t)
			f.raise()
			if _, greatest := f.all(); greatest != 0 {
				t.Errorf("the floors of an outbox that had no row rose to %d", greatest)
			}
			first := appendRows(t, f.pool, newEvent(1, `{}`))[0].OutboxID
			f.raise()
			if got := f.claimable(true); len(got) != 1 || got[0] != first {
				t.Fatalf("with row %d pending a claim finds %v", first, got)
			}

			conn := connect(t, f.db)
			if err := write(t.Context(), conn, way); err != nil {
				t.Fatal(err)
			}
			f.raise() // nothing has committed since
			other := appendRows(t, f.pool, newEvent(2, `{}`))[0].OutboxID
			if got := f.claimable(true); len(got) != 1 || got[0] != other {
				t.Fatalf("a claim finds %v: want row %d", got, other)
			}
			f.raise() // now something has
			if _, greatest := f.all(); greatest != first {
				t.Errorf("a floor is %d beside a writer that has not ended: want %d", greatest, first)
			}
			if err := commit(t.Context(), conn, way); err != nil {
				t.Fatal(err)
			}
			next := appendRows(t, f.pool, newEvent(1, `{}`))[0].OutboxID
			f.raise()
			if got := f.claimable(true); len(got) < 2 || got[0] != first+1 || got[len(got)-1] != next {
				t.Errorf("a claim finds %v: want the writer's rows from %d to the next of the aggregate, %d", got, first+1, next)
			}
			f.raise()
			if least, _ := f.all(); least != next {
				t.Errorf("with nothing pending a floor is %d: want %d", least, next)
			}
		})
	}
}

func TestRaisingTheFloorsOfAnIdleOutboxWritesNothing(t *testing.T) {
	f := newFloors(t)
	appendRows(t, f.pool, newEvent(1, `{}`))
	f.claimable(true)
	f.raise()
	next := func() (xid int64) {
		if err := f.pool.QueryRow(t.Context(), `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`).Scan(&xid); err != nil {
			t.Fatal(err)
		}
		return xid
	}
	before := next()
	f.raise()
	if after := next(); after != before {
		t.Errorf("it took %d transaction ids", after-before)
	}
}

func TestAFloorPassesOverPartitionsThatAreHeldAndWaitsForNone(t *testing.T) {
	f := newFloors(t)
	id := appendRows(t, f.pool, newEvent(1, `{}`))[0].OutboxID
	f.claimable(true)
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // ErrTxClosed, but after a failure
	// It has its transaction id by the lock alone, and wrote no row with it.
	if _, err := tx.Exec(t.Context(), `SELECT FROM outbox_partitions WHERE partition = 3 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := RaiseFloors(ctx, f.pool, everything()); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.raise()
	if least, _ := f.all(); least != id {
		t.Errorf("afterwards a floor is %d: want %d", least, id)
	}
}

func TestARowThatFallsDueTakesItsFloorBack(t *testing.T) {
	f := newFloors(t)
	f.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at) VALUES (1, 'post', 1, 'created', '{}', now() + interval '1 hour')`)
	appendRows(t, f.pool, newEvent(2, `{}`))
	f.claimable(true)
	f.raise()
	if least, _ := f.all(); least != 2 {
		t.Fatalf("a floor is %d: want 2", least)
	}
	f.exec(`UPDATE outbox_messages SET available_at = now(), inserted_at = now() - interval '1 hour' WHERE id = 1`)
	released, err := Release(t.Context(), f.pool, everything(), 10)
	if err != nil || len(released) != 1 {
		t.Fatalf("released %v, %v", released, err)
	}
	f.raise()
	if got := f.claimable(true); len(got) != 1 || got[0] != 1 {
		t.Errorf("a claim finds %v: want row 1", got)
	}
	f.raise()
	if least, _ := f.all(); least != 2 {
		t.Errorf("afterwards a floor is %d: want 2", least)
	}
}

func TestARowThatContradictsItsFloorIsFoundAndClaimed(t *testing.T) {
	f := newFloors(t)
	rows := appendRows(t, f.pool, newEvent(1, `{}`), newEvent(2, `{}`))
	f.claimable(true)
	f.raise()
	f.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE id = $1`, rows[0].OutboxID)
	if got := f.claimable(false); len(got) != 0 {
		t.Fatalf("a claim finds %v below the floor", got)
	}
	found, err := BelowFloor(t.Context(), f.pool, everything())
	if want := (Violation{Partition: rows[0].Partition, ID: rows[0].OutboxID, Floor: rows[1].OutboxID}); err != nil || len(found) != 1 || found[0] != want {
		t.Errorf("found %+v, %v: want %+v", found, err, want)
	}
	if got := f.claimable(false); len(got) != 1 {
		t.Errorf("afterwards a claim finds %v", got)
	}
	if found, err := BelowFloor(t.Context(), f.pool, everything()); err != nil || len(found) > 0 {
		t.Errorf("found again: %+v, %v", found, err)
	}
}
