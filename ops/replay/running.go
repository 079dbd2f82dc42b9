package replay

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// runningSQL finds the consumers whose lock a session holds, and which have new tables: an erasure
// and a plan hold the lock, too, and an interrupted replay leaves its tables.
//
// Index: none, the locks and the schemas of the cluster.   Locks: none.
const runningSQL = `
SELECT /* replay.running */ n FROM unnest(@consumers::text[]) AS c(n)
 WHERE EXISTS (SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
                WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
                  AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('tidings replay ' || n, 0))
   AND EXISTS (SELECT FROM pg_namespace WHERE starts_with(nspname, @prefix || n || '_'))
 ORDER BY n`

// Running returns the consumers of these that are being replayed, by whatever process.
func Running(ctx context.Context, projections *pgxpool.Pool, consumers []string) ([]string, error) {
	rows, _ := projections.Query(ctx, runningSQL, pgx.StrictNamedArgs{"consumers": consumers, "prefix": schemaPrefix})
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("read which replays run: %w", err)
	}
	return all, nil
}
