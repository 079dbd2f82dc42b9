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

// expiring is the time before its end in which a token counts as expiring, but never more than the
// last quarter of its life.
const expiring = 14 * 24 * time.Hour

// expiringSQL counts current tokens that expire soon. Index: api_tokens_expires_idx. Locks: none.
const expiringSQL = `
SELECT /* tokens.expiring */ count(*) FROM api_tokens
 WHERE revoked_at IS NULL AND replaced_at IS NULL AND expires_at > now() AND expires_at < now() + @within::interval
   AND expires_at - now() < (expires_at - created_at) / 4`

// Expiring returns the number of tokens that expire soon. It counts valid tokens that no other
// token has replaced. pool acts as postgres.RoleSystem.
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

// NewCollector returns a gauge of Expiring, which it reads at each scrape. If the database does not
// answer, the gauge is missing from that scrape. The gauge has no label of a tenant.
func NewCollector(pool *pgxpool.Pool, log *slog.Logger) prometheus.Collector {
	return collector{pool, log.With("component", "tokens"), prometheus.NewDesc("tidings_api_tokens_expiring",
		"Valid tokens without a replacement that expire within 14 days and are in the last quarter of their "+
			"lifetime.", nil, nil)}
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	n, err := Expiring(ctx, c.pool)
	if err != nil {
		c.log.WarnContext(ctx, "gauge of expiring tokens left out of this scrape", "err", err)
		return
	}
	ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(n))
}
