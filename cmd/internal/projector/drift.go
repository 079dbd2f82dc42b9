package projector

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/cells"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
)

// VerifyConfig is the environment of the continuous comparison with the truth.
type VerifyConfig struct {
	Interval time.Duration `env:"VERIFY_INTERVAL, default=1m"` // between windows; 0: no comparison
	Window   int           `env:"VERIFY_WINDOW, default=1000"` // entities per window, 1..10000
}

// Validate reports all values out of bounds.
func (c VerifyConfig) Validate() error {
	if c.Interval < 0 || c.Window < 1 || c.Window > 10000 {
		return fmt.Errorf("VERIFY_INTERVAL is %s, VERIFY_WINDOW %d: want 0 or more, and 1..10000", c.Interval, c.Window)
	}
	return nil
}

// Drift compares a projection with the truth, window by window and round after round. A difference
// counts only if two comparisons of the window find it, the consumer has applied everything written
// before the first one in between, and the second one's is not one that later events explain.
type Drift struct {
	cfg                VerifyConfig
	truth, projections *pgxpool.Pool
	js                 jetstream.JetStream
	broker             broker.Config
	p                  projections.Projection
	log                *slog.Logger
	verified, drift    prometheus.Counter
	round              projections.Comparison // so far

	after      any       // the key before the window; nil: the first window
	next       any       // the key before the next window, from the first comparison
	waited     int       // intervals since the first comparison
	checked    int64     // entities of the window
	comparedAt time.Time // time of the first comparison, by the truth's clock
	settled    time.Time // time when everything written before the first comparison was on the stream; zero: not yet

	suspected map[projections.Difference]projections.Difference // the first comparison's differences, by unversioned; nil before it
}

// NewDrift returns the comparison of p. It starts nothing. The pools act as RoleReader and
// RoleConsumer, or as roles with more rights.
func NewDrift(cfg VerifyConfig, truth, projected *pgxpool.Pool, js jetstream.JetStream, b broker.Config, p projections.Projection,
	reg prometheus.Registerer, log *slog.Logger) (*Drift, error) {
	reg = prometheus.WrapRegistererWith(prometheus.Labels{"consumer": p.Name()}, reg)
	d := &Drift{
		cfg: cfg, truth: truth, projections: projected, js: js, broker: b, p: p, log: log.With("component", "verify", "consumer", p.Name()),
		verified: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_projection_verified_entities_total",
			Help: "Entities compared with the truth."}),
		drift: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_projection_differences_total",
			Help: "Differences from the truth that no pending event explains. Each round counts a lasting difference again."}),
	}
	for _, c := range []prometheus.Collector{d.verified, d.drift} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register the metrics of the comparison of %s: %w", p.Name(), err)
		}
	}
	return d, nil
}

// Run compares until ctx ends, and returns nil. It logs failures and tries again.
func (d *Drift) Run(ctx context.Context) error {
	if d.cfg.Interval == 0 {
		<-ctx.Done()
		return nil
	}
	for work.Sleep(ctx, d.cfg.Interval) == nil {
		if err := d.step(ctx); err != nil && ctx.Err() == nil {
			d.log.WarnContext(ctx, "comparison with the truth failed, will retry", "err", err)
		}
	}
	return nil
}

// clockSkew is the maximum difference between the clocks of database and broker.
const clockSkew = 2 * time.Second

// maxWaits is the number of intervals to wait for the second comparison.
const maxWaits = 10

// step compares a window, or takes the next step toward the second comparison of it.
func (d *Drift) step(ctx context.Context) error {
	if d.suspected != nil {
		hasApplied, err := d.hasApplied(ctx)
		if err != nil {
			return err
		}
		if d.waited++; !hasApplied && d.waited < maxWaits {
			return nil
			// An event that waits for long must not keep the other windows from their comparison.
		} else if !hasApplied {
			return d.conclude(ctx, d.next)
		}
	}
	found := make(map[projections.Difference]bool)
	checked, next, err := d.p.Window(ctx, d.truth, d.projections, d.after, d.cfg.Window,
		func(diff projections.Difference) { found[diff] = true })
	if err != nil {
		return err
	}
	d.verified.Add(float64(checked))
	d.checked = checked
	if err := d.dropOtherCells(ctx, found); err != nil {
		return err
	}
	if len(found) > 0 {
		if err := d.dropParked(ctx, found); err != nil {
			return err
		}
	}
	if len(found) > 0 && d.suspected == nil {
		// After the comparison, so everything that it saw was written before now.
		_, now, err := outbox.Settled(ctx, d.truth, time.Time{})
		if err != nil {
			return err
		}
		d.suspected, d.comparedAt, d.next = make(map[projections.Difference]projections.Difference), now, next
		for diff := range found {
			d.suspected[unversioned(diff)] = diff
		}
		return nil
	}
	var differences []string
	for diff := range found {
		if first, is := d.suspected[unversioned(diff)]; is && lasting(first, diff) {
			differences = append(differences, diff.String())
		}
	}
	if n := len(differences); n > 0 {
		d.drift.Add(float64(n))
		d.round.Different += int64(n)
		const named = 20
		d.log.ErrorContext(ctx, "the projection differs from the truth", "count", n, "differences", differences[:min(n, named)],
			"runbook", "ProjectionDrift")
	}
	return d.conclude(ctx, next)
}

// unversioned returns the difference without the versions, which differ from one comparison to the
// next.
func unversioned(d projections.Difference) projections.Difference {
	d.WantVersion, d.GotVersion = 0, 0
	return d
}

// lasting reports whether no event explains a difference that both comparisons found. The consumer
// has applied the version that the first comparison saw in the truth.
func lasting(first, second projections.Difference) bool {
	switch want, got := second.WantVersion, second.GotVersion; {
	case got < first.WantVersion: // it was lost
		return true
	case got < want: // a later event is on its way
		return false
	case got > want: // the second comparison read the truth before a change, unless the projection was ahead at the first one, too
		return got == first.GotVersion
	}
	return true
}

// conclude records the window and moves to the one after the key after.
func (d *Drift) conclude(ctx context.Context, after any) error {
	if d.round.BeganAt.IsZero() {
		d.round = projections.Comparison{Consumer: d.p.Name(), Cell: d.broker.Stream, BeganAt: time.Now(), Different: d.round.Different}
	}
	d.round.Checked += d.checked
	round := d.round
	d.suspected, d.settled, d.waited, d.after = nil, time.Time{}, 0, after
	if after == nil {
		d.round = projections.Comparison{}
	}
	return projections.SaveComparison(ctx, d.projections, round, after == nil)
}

// hasApplied reports whether the consumer has applied everything written before the first
// comparison.
func (d *Drift) hasApplied(ctx context.Context) (bool, error) {
	if d.settled.IsZero() {
		settled, now, err := outbox.Settled(ctx, d.truth, d.comparedAt)
		if err != nil || !settled {
			return false, err
		}
		d.settled = now
	}
	lags, err := consumers.Lag(ctx, d.projections, d.js, d.broker, d.p.Name())
	if err != nil {
		return false, err
	}
	return lags[0].Messages == 0 || lags[0].AsOf.After(d.settled.Add(clockSkew)), nil
}

// dropOtherCells removes the differences of tenants of other cells.
func (d *Drift) dropOtherCells(ctx context.Context, found map[projections.Difference]bool) error {
	if len(found) == 0 {
		return nil
	}
	ours, err := cells.Read(ctx, d.projections, d.broker.Stream)
	maps.DeleteFunc(found, func(diff projections.Difference, _ bool) bool { return !ours.Has(diff.TenantID) })
	return err
}

// dropParked removes the differences that dead letters explain.
func (d *Drift) dropParked(ctx context.Context, found map[projections.Difference]bool) error {
	parked, err := consumers.AllParked(ctx, d.projections, d.p.Name())
	if err != nil {
		return err
	}
	dead, err := outbox.Dead(ctx, d.truth)
	if err != nil {
		return err
	}
	for diff := range found {
		if k := diff.Key; parked(k.TenantID, k.Type, k.Aggregate) || dead(k.TenantID, k.Type, k.Aggregate) {
			delete(found, diff)
		}
	}
	return nil
}
