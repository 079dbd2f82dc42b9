package relay

import (
	"context"

	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

// beat writes a heartbeat for each partition and interval until ctx ends. It needs no lease and no
// broker. So heartbeats enter the outbox even while no relay can publish, and their lag shows the
// outage. Other relays do the same, and the database lets only one of them write.
func (r *Relay) beat(ctx context.Context) {
	for failures := 0; r.cfg.Heartbeat > 0 && ctx.Err() == nil; {
		dbCtx, cancel := r.forDB(ctx)
		written, next, err := outbox.Heartbeat(dbCtx, r.pool, r.cfg.Heartbeat)
		cancel()
		if failures++; err == nil {
			failures = 0
		} else if next = work.Retry(failures); ctx.Err() == nil {
			r.metrics.errors.WithLabelValues(stageHeartbeat).Inc()
			r.log.WarnContext(ctx, "heartbeat not written; retrying", "wait", next, "err", err)
		}
		r.metrics.heartbeats.Add(float64(written))
		work.Sleep(ctx, next)
	}
}
