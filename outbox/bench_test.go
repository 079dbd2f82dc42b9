package outbox

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// benchTable is a database with the current outbox, or with a former index of pending rows that
// each mark changes (docs/adr/0011-heap-only-marks.md). Vacuum is off, so that it runs beside
// neither.
func benchTable(b *testing.B, indexed bool) *pgxpool.Pool {
	b.Helper()
	pool := testkit.Postgres(b).Pool(b, postgres.RoleOwner)
	smallRanges(b, pool, 2, 50_000_000)
	if indexed {
		if _, err := pool.Exec(b.Context(), `ALTER TABLE outbox_messages_1 SET (fillfactor = 90);
			CREATE INDEX ON outbox_messages (slot, id) WHERE processed_at IS NULL AND NOT delayed;
			CREATE INDEX ON outbox_messages (attempts) WHERE processed_at IS NULL AND attempts > 0`); err != nil {
			b.Fatal(err)
		}
	}
	return pool
}

const benchEvents = 40_000

// benchInsertSQL inserts 20 events of comments, of about 300 bytes each.
const benchInsertSQL = `
INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id)
SELECT 1, 'comment', 9007199254740993, 'created', '{"comment_id": "0196b2d4-7c00-7000-8000-000000000001",
  "post_id": "9007199254740993", "author_id": "7", "path": "0632f8a0000000abcd2344/0632f8a0000001abcd2345",
  "body": "about as long as comments are on the whole, said the one who has read them", "version": 2,
  "actor": "user:7", "created_at": "2026-05-01T12:30:00Z"}', '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'
  FROM generate_series(1, 20) g`

func benchInsert(b *testing.B, pool *pgxpool.Pool) {
	b.Helper()
	for range benchEvents / 20 {
		if _, err := pool.Exec(b.Context(), benchInsertSQL); err != nil {
			b.Fatal(err)
		}
	}
}

func walBytes(b *testing.B, pool *pgxpool.Pool) (n float64) {
	b.Helper()
	if err := pool.QueryRow(b.Context(), `SELECT pg_current_wal_insert_lsn() - '0/0'`).Scan(&n); err != nil {
		b.Fatal(err)
	}
	return n
}

// BenchmarkInsert and BenchmarkMark insert benchEvents rows, and mark them in batches of 500. Run
// with -benchtime 1x -count 5.
func BenchmarkInsert(b *testing.B) {
	for name, indexed := range map[string]bool{"heap-only": false, "pending-index": true} {
		b.Run(name, func(b *testing.B) {
			pool := benchTable(b, indexed)
			before, n := walBytes(b, pool), 0
			for b.Loop() {
				benchInsert(b, pool)
				n += benchEvents
			}
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "rows/s")
			b.ReportMetric((walBytes(b, pool)-before)/float64(n), "WAL-bytes/row")
		})
	}
}

func BenchmarkMark(b *testing.B) {
	for name, c := range map[string]struct{ indexed, held bool }{
		"heap-only": {false, false}, "pending-index": {true, false}, "heap-only,snapshot-held": {false, true},
		"pending-index,snapshot-held": {true, true},
	} {
		b.Run(name, func(b *testing.B) {
			pool := benchTable(b, c.indexed)
			if err := Bind(b.Context(), pool, 0, "EVENTS-0", made); err != nil {
				b.Fatal(err)
			}
			var tail uint64
			var bytes float64
			for b.Loop() {
				b.StopTimer()
				benchInsert(b, pool)
				release := func() error { return nil }
				if c.held {
					release = holdSnapshot(b, pool)
				}
				before := walBytes(b, pool)
				b.StartTimer()
				tail = markAll(b, pool, tail)
				b.StopTimer()
				bytes += walBytes(b, pool) - before
				if err := release(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(tail)/b.Elapsed().Seconds(), "rows/s")
			b.ReportMetric(bytes/float64(tail), "WAL-bytes/row")
		})
	}
}

// BenchmarkLife takes events from their insert to the archive. It counts the bytes that each step
// writes to the log, and the final size of tables and indexes. Run with -benchtime 1x.
func BenchmarkLife(b *testing.B) {
	for b.Loop() {
		pool := benchTable(b, false)
		if err := Bind(b.Context(), pool, 0, "EVENTS-0", made); err != nil {
			b.Fatal(err)
		}
		sum, last := 0.0, walBytes(b, pool)
		report := func(step string) {
			now := walBytes(b, pool)
			b.ReportMetric((now-last)/benchEvents, step+"-WAL-bytes/row")
			sum, last = sum+now-last, now
		}
		benchInsert(b, pool)
		report("insert")
		markAll(b, pool, 0)
		report("mark")
		if _, err := pool.Exec(b.Context(),
			`UPDATE outbox_partitions SET floor_id = 50000000; SELECT outbox_range_archive(1, 0)`); err != nil {
			b.Fatal(err)
		}
		report("archive")
		if _, err := pool.Exec(b.Context(), `SELECT outbox_range_index(1)`); err != nil {
			b.Fatal(err)
		}
		report("index")
		var bytes float64
		if err := pool.QueryRow(b.Context(), `SELECT pg_total_relation_size('outbox_messages_1')`).Scan(&bytes); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(bytes/benchEvents, "relation-bytes/row")
		b.ReportMetric((bytes+sum)/benchEvents, "disk-bytes/row")
	}
}

// markAll marks all pending rows after tail, which is also the last id.
func markAll(b *testing.B, pool *pgxpool.Pool, tail uint64) uint64 {
	b.Helper()
	rows, _ := pool.Query(b.Context(), `SELECT id, event_id::text, 0 FROM outbox_messages WHERE id > $1 ORDER BY id`, tail)
	pending, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Published])
	if err != nil {
		b.Fatal(err)
	}
	for len(pending) > 0 {
		n := min(500, len(pending))
		mark := markOf(tail, tail+uint64(n), pending[:n]...)
		for i := range mark.Rows {
			tail++
			mark.Rows[i].Seq = tail
		}
		if _, err := Exchange(b.Context(), pool, Round{Mark: mark}); err != nil {
			b.Fatal(err)
		}
		pending = pending[n:]
	}
	return tail
}

// holdSnapshot keeps the current row versions from removal until it is released.
func holdSnapshot(b *testing.B, pool *pgxpool.Pool) (release func() error) {
	b.Helper()
	tx, err := pool.BeginTx(b.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		b.Fatal(err)
	}
	if _, err := tx.Exec(b.Context(), `SELECT count(*) FROM outbox_messages`); err != nil {
		b.Fatal(err)
	}
	return func() error { return tx.Rollback(context.WithoutCancel(b.Context())) }
}
