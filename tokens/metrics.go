package tokens

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// expiring is how long before its end a token counts as expiring. One that was made for less than four times as long counts in the last quarter of its life.
const expiring = 14 * 24 * time.Hour

// expiringSQL counts current tokens that expire soon.
// Index: api_tokens_expires_idx.   Locks: none.
const expiringSQL = `
SELECT /* tokens.expiring */ count(*) FROM api_tokens
 WHERE revoked_at IS NULL AND replaced_at IS NULL AND expires_at > now() AND expires_at < now() + @within::interval
   AND expires_at - now() < (expires_at - created_at) / 4`

// Expiring returns how many tokens expire soon, of those that work and that no other has replaced. pool acts as postgres.RoleSystem.
func Expiring(ctx context.Context, pool *pgxpool.Pool) (n int, err error) {
	if err := pool.QueryRow(ctx, expiringSQL, pgx.StrictNamedArgs{"within": expiring}).Scan(&n); err != nil {
		return 0, fmt.Errorf("count the tokens that expire soon: %w", err)
	}
	return n, nil
}

// scrapeTimeout bounds the query of one scrape.
const scrapeTimeout = 3 * time.Second

type collector struct {
	pool *pgxpool.Pool
	log  *slog.Logger
	desc *prometheus.Desc
}

// NewCollector returns the gauge of Expiring, read at each scrape, and left out of one in which the database does not answer. It names no tenant.
func NewCollector(pool *pgxpool.Pool, log *slog.Logger) prometheus.Collector {
	return collector{pool, log.With("component", "tokens"), prometheus.NewDesc("api_tokens_expiring",
		"Tokens that work, that no other has replaced, and that expire within 14 days and the last quarter of their life.", nil, nil)}
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	n, err := Expiring(ctx, c.pool)
	if err != nil {
		c.log.WarnContext(ctx, "tokens left out of this scrape", "err", err)
		return
	}
	ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(n))
}
