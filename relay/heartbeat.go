package relay

import (
	"context"

	"github.com/tidings/tidings/outbox"
)

// beat has a heartbeat written for each partition and interval until ctx ends. It needs no lease, and no broker: while nothing is published, heartbeats show
// that as everything else in the outbox does. Other relays do the same; the database sees to it that one writes.
func (r *Relay) beat(ctx context.Context) {
	for failures := 0; r.cfg.Heartbeat > 0 && ctx.Err() == nil; {
		dbCtx, cancel := r.forDB(ctx)
		written, next, err := outbox.Heartbeat(dbCtx, r.pool, r.cfg.Heartbeat)
		cancel()
		if failures++; err == nil {
			failures = 0
		} else if next = retryAfter(failures); ctx.Err() == nil {
			r.metrics.errors.WithLabelValues(stageHeartbeat).Inc()
			r.log.WarnContext(ctx, "relay heartbeat, trying again", "wait", next, "err", err)
		}
		r.metrics.heartbeats.Add(float64(written))
		sleep(ctx, next)
	}
}
