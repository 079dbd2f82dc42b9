package postgres

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// Blocked is a session of Tidings that waits for a lock, and a session that holds the lock or waits
// ahead of it.
type Blocked struct {
	PID         int     `json:"pid"`
	Application string  `json:"application"`
	Seconds     float64 `json:"seconds"` // of the wait so far
	By          Blocker `json:"by"`
}

// Blocker is a session that blocks others.
type Blocker struct {
	PID         int     `json:"pid"` // 0: a prepared transaction
	User        string  `json:"user"`
	Application string  `json:"application"`
	Hidden      bool    `json:"hidden,omitempty"` // the following fields are hidden: this login is not a member of pg_monitor
	State       string  `json:"state,omitempty"`
	Transaction float64 `json:"transaction_seconds,omitempty"` // since its transaction began
	Query       float64 `json:"query_seconds,omitempty"`       // since its last statement began
}

// String describes the wait, names the blocker, and says how to end it.
func (b Blocked) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "session %d (%s) has waited %s for a lock of ", b.PID, b.Application, age(b.Seconds))
	if b.By.PID == 0 {
		return s.String() + "a prepared transaction: see pg_prepared_xacts"
	}
	fmt.Fprintf(&s, "session %d, user %q, application %q", b.By.PID, b.By.User, b.By.Application)
	switch {
	case b.By.Hidden:
		s.WriteString("; the age of its transaction is hidden: GRANT pg_monitor to the login of this connection to see it")
	default:
		fmt.Fprintf(&s, ", %s; its transaction began %s ago and its last statement %s ago", b.By.State,
			age(b.By.Transaction), age(b.By.Query))
	}
	fmt.Fprintf(&s, "; ask its owner, or end it: SELECT pg_terminate_backend(%d)", b.By.PID)
	return s.String()
}

func age(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}

// blockedSQL finds the sessions of Tidings in this database that wait for a lock, and the sessions
// that block them. Every login sees locks, but not the ages of other sessions.
//
// Index: none, the lock table and a row per session. Locks: for a moment the lock manager's own,
// once per waiting session.
const blockedSQL = `
WITH waits AS MATERIALIZED (SELECT pid, min(waitstart) AS since FROM pg_locks WHERE NOT granted GROUP BY pid)
SELECT /* postgres.blocked */ w.pid, a.application_name, coalesce(extract(epoch FROM clock_timestamp() - w.since), 0)::float8,
       by.pid, coalesce(b.usename::text, ''), coalesce(b.application_name, ''),
       b.pid IS NOT NULL AND b.backend_start IS NULL, coalesce(b.state, ''),
       coalesce(extract(epoch FROM clock_timestamp() - b.xact_start), 0)::float8,
       coalesce(extract(epoch FROM clock_timestamp() - b.query_start), 0)::float8
  FROM waits w JOIN pg_stat_activity a USING (pid)
 CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS by(pid) LEFT JOIN pg_stat_activity b ON b.pid = by.pid
 WHERE a.datname = current_database() AND a.application_name LIKE 'tidings %'
 ORDER BY w.since NULLS LAST, w.pid, by.pid LIMIT 1000`

// ReadBlocked returns the waiting sessions of Tidings and their blockers, the longest wait first.
// It reads as the login. A login sees the details of other logins' sessions only as a member of
// pg_monitor; otherwise Blocker.Hidden is true.
func ReadBlocked(ctx context.Context, pool *pgxpool.Pool) (all []Blocked, err error) {
	var b pgx.Batch
	b.Queue(`SELECT set_config('role', 'none', true)`)
	b.Queue(blockedSQL).Query(func(rows pgx.Rows) (err error) {
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (b Blocked, err error) {
			return b, row.Scan(&b.PID, &b.Application, &b.Seconds, &b.By.PID, &b.By.User, &b.By.Application, &b.By.Hidden, &b.By.State,
				&b.By.Transaction, &b.By.Query)
		})
		return err
	})
	if err := pool.SendBatch(ctx, &b).Close(); err != nil {
		return nil, fmt.Errorf("read the sessions that wait for a lock: %w", err)
	}
	return all, nil
}

const (
	blockedTimeout = 3 * time.Second // for one scrape
	blockedLong    = 5               // seconds after which a wait is logged
)

type blockedCollector struct {
	pool *pgxpool.Pool
	log  *slog.Logger
	desc *prometheus.Desc
}

// NewBlockedCollector returns the metric tidings_postgres_blocked_sessions, read at each scrape.
// Each scrape also logs the blockers of sessions of Tidings that have waited for more than 5 s.
func NewBlockedCollector(pool *pgxpool.Pool, log *slog.Logger) prometheus.Collector {
	return &blockedCollector{pool, log.With("component", "postgres"),
		prometheus.NewDesc("tidings_postgres_blocked_sessions", "Sessions of Tidings that wait for a lock in this database.", nil, nil)}
}

// Describe implements prometheus.Collector.
func (c *blockedCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c *blockedCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), blockedTimeout)
	defer cancel()
	all, err := ReadBlocked(ctx, c.pool)
	if err != nil {
		c.log.WarnContext(ctx, "tidings_postgres_blocked_sessions left out of this scrape", "err", err)
		return
	}
	waiting, named := make(map[int]bool), make(map[int]bool)
	for _, b := range all {
		waiting[b.PID] = true
		if b.Seconds > blockedLong && !named[b.By.PID] { // a blocker of several sessions is logged once
			named[b.By.PID] = true
			c.log.WarnContext(ctx, "a session waits for a lock", "pid", b.PID, "blocked_by", b.By.PID, "detail", b.String())
		}
	}
	ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(len(waiting)))
}
