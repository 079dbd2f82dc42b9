package postgres

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// sizesTimeout bounds the queries of one scrape.
const sizesTimeout = 3 * time.Second

// sizesSQL adds up the partitions of each table of the schema.
//
// Index: none, the statistics of each table.   Locks: none.
const sizesSQL = `
SELECT /* postgres.sizes */ coalesce(pg_partition_root(s.relid), s.relid)::regclass::text, sum(s.n_live_tup)::float8,
       sum(s.n_dead_tup)::float8, sum(coalesce(pg_total_relation_size(s.relid), 0))::float8
  FROM pg_stat_user_tables s WHERE s.schemaname = current_schema() GROUP BY 1 ORDER BY 1`

// horizonSQL reads the transactions that prevent the removal of dead rows. Only members of
// pg_monitor see the age of another login's transaction. Everybody sees the oldest snapshot and the
// oldest slot.
//
// Index: none, a row per session and per slot.   Locks: none.
const horizonSQL = `
SELECT /* postgres.horizon */ pg_database_size(current_database())::float8,
       coalesce((SELECT max(greatest(age(backend_xmin), age(backend_xid))) FROM pg_stat_activity
                  WHERE datname = current_database() AND pid <> pg_backend_pid()), 0)::float8,
       coalesce((SELECT max(greatest(age(xmin), age(catalog_xmin))) FROM pg_replication_slots), 0)::float8,
       coalesce((SELECT max(age(transaction)) FROM pg_prepared_xacts), 0)::float8`

type sizesCollector struct {
	pool *pgxpool.Pool
	log  *slog.Logger

	live, dead, bytes, database, held *prometheus.Desc
}

// NewSizesCollector returns the sizes of the database and its tables, including partitions and
// indexes. It also returns their dead rows, and the transactions that prevent the removal of these.
// It reads them at each scrape. If one process has two databases, the caller must add a label that
// distinguishes them.
func NewSizesCollector(pool *pgxpool.Pool, log *slog.Logger) prometheus.Collector {
	table := []string{"table"}
	return &sizesCollector{
		pool: pool, log: log.With("component", "postgres"),
		live: prometheus.NewDesc("tidings_postgres_table_live_rows", "Rows of the table, by PostgreSQL's statistics.", table, nil),
		dead: prometheus.NewDesc("tidings_postgres_table_dead_rows",
			"Dead rows of the table that vacuum has not removed, by PostgreSQL's statistics.", table, nil),
		bytes:    prometheus.NewDesc("tidings_postgres_table_bytes", "Bytes of the table with its indexes.", table, nil),
		database: prometheus.NewDesc("tidings_postgres_database_bytes", "Bytes of the database.", nil, nil),
		held: prometheus.NewDesc("tidings_postgres_horizon_transactions",
			"Age, in transactions, of the oldest snapshot or open transaction for which vacuum must keep dead rows, by its holder: "+
				"session, slot (of a replica) or prepared transaction.", []string{"holder"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *sizesCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.live, c.dead, c.bytes, c.database, c.held} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *sizesCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), sizesTimeout)
	defer cancel()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	var name string
	var live, dead, bytes, database, session, slot, prepared float64
	rows, _ := c.pool.Query(ctx, sizesSQL)
	if _, err := pgx.ForEachRow(rows, []any{&name, &live, &dead, &bytes}, func() error {
		gauge(c.live, live, name)
		gauge(c.dead, dead, name)
		gauge(c.bytes, bytes, name)
		return nil
	}); err != nil {
		c.log.WarnContext(ctx, "sizes of tables left out of this scrape", "err", err)
		return
	}
	if err := c.pool.QueryRow(ctx, horizonSQL).Scan(&database, &session, &slot, &prepared); err != nil {
		c.log.WarnContext(ctx, "size of the database left out of this scrape", "err", err)
		return
	}
	gauge(c.database, database)
	gauge(c.held, session, "session")
	gauge(c.held, slot, "slot")
	gauge(c.held, prepared, "prepared")
}
