package console

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/samples"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/projections"
)

type consumersPage struct {
	Rows        []consumerRow
	Unavailable []string // what is unavailable or locked
	Replays     bool     // the console has a login for replays
	External    []external
	MoreOf      []string // streams that have more of them
	NotListed   string   // why External is incomplete
}

// external is a subscriber's durable consumer.
type external struct {
	broker.Durable
	Level string
}

type consumerRow struct {
	status.Consumer
	Holders     []string
	Remedy      string   // the command that lets a consumer with lost events continue
	Line        []string // polylines of the last hour, in lineWidth x lineHeight
	Most        int64    // the largest value of the line, in messages
	Trend       samples.Trend
	Level, Says string
	Unpublished bool                    // the outbox keeps events back, so AsOf is old
	Drift       *projections.Comparison // the consumer's own comparison; nil: none yet
	Verified    *audit.Act              // the last Verify that ended; nil: none
	Replay      *underway               // a replay by this process; nil: none
}

// underway is the progress of an act of this process.
type underway struct {
	ActID       uuid.UUID
	Step        string
	Done, Total int64
}

const (
	lineWidth  = 240
	lineHeight = 40
)

// Acts of which the page shows more than a button.
const (
	actVerify = "consumer.verify"
	actResume = "consumer.resume"
	actReplay = "consumer.replay"
)

func (c *Console) consumersData(ctx context.Context, _ *view) (any, error) {
	now, err := c.observer.state(ctx, false)
	if err != nil {
		return nil, err
	}
	p := consumersPage{Unavailable: now.State.Missing(), Replays: c.deps.OwnerURL != "",
		MoreOf: now.State.MoreOf, NotListed: now.State.NotListed}
	for _, d := range now.State.External {
		level := "ok"
		if d.State == broker.Unserved || d.State == broker.Redelivers {
			level = "warn"
		}
		p.External = append(p.External, external{d, level})
	}
	if err := c.refreshDay(ctx, now.State); err != nil {
		return nil, err
	}
	hour, verified := c.lastHour(), map[string]audit.Act{}
	if !now.State.IsUnavailable(status.ServerTruth) {
		if verified, err = audit.Last(ctx, c.deps.Truth, actVerify, c.observer.src.Consumers); err != nil {
			return nil, err
		}
	}
	var compared []projections.Comparison
	if !now.State.IsUnavailable(status.ServerProjections) {
		if compared, err = projections.Comparisons(ctx, c.deps.Projections); err != nil {
			return nil, err
		}
	}
	for _, k := range now.State.Consumers {
		row := consumerRow{Consumer: k, Remedy: now.State.Remedy(k), Unpublished: unpublished(k), Replay: c.underway(actReplay, k.Consumer)}
		row.describe(now)
		if a, is := verified[k.Consumer]; is {
			row.Verified = &a
		}
		for _, one := range compared {
			if one.Consumer == k.Consumer && one.Cell == c.observer.src.Broker.Stream {
				row.Drift = &one
			}
		}
		row.Trend = c.day.Trend(k.Consumer)
		line := c.day.Largest(samples.Behind+k.Consumer, hour)
		row.Line, row.Most = spark(line, plot{0, 2, lineWidth, lineHeight - 4}), int64(largest(line))
		p.Rows = append(p.Rows, row)
	}
	return p, nil
}

// describe says who runs the consumer, and how it does.
func (row *consumerRow) describe(now *observed) {
	k := row.Consumer
	row.Level, row.Says = now.consumerBox(k).Level, "runs"
	for _, l := range now.State.Leases {
		if l.Kind == k.Consumer {
			row.Holders = append(row.Holders, l.Owner+": "+words.Ranges(l.Partitions))
		}
	}
	switch {
	case k.Paused != nil:
		row.Says = "paused"
	case len(k.Lost) > 0:
		row.Says = "lost events"
	case len(row.Holders) == 0:
		row.Level, row.Says = "bad", "nobody runs it"
	case slices.ContainsFunc(now.State.Unheld, func(u status.Unheld) bool { return u.Kind == k.Consumer }):
		row.Says = "runs for some partitions"
	case k.Unknown != "":
		row.Says = "lag unknown"
	case k.Seconds > doctor.LateSeconds:
		row.Says = "late"
	}
}

// underway returns the progress of this process with an act on a target, or nil if it does no such
// act.
func (c *Console) underway(act, target string) *underway {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range c.running {
		if d.Act.Name == act && d.Act.Target == target {
			d.mu.Lock()
			defer d.mu.Unlock()
			return &underway{d.Act.ActID, d.step, d.done, d.total}
		}
	}
	return nil
}

// Grows describes how the lag changes.
func (r consumerRow) Grows() string { return r.Trend.Says(r.Messages, age) }

// projection returns the projection of that name, which is also its consumer's.
func (c *Console) projection(name string) (projections.Projection, error) {
	i := slices.IndexFunc(c.deps.Fleet, func(p projections.Projection) bool { return p.Name() == name })
	if i < 0 {
		return nil, errNotFound
	}
	return c.deps.Fleet[i], nil
}

// prepareConsumer describes an act on a consumer.
func (c *Console) prepareConsumer(says ...string) func(context.Context, *view, url.Values) (subject, error) {
	return func(_ context.Context, _ *view, in url.Values) (subject, error) {
		p, err := c.projection(in.Get("consumer"))
		if err != nil {
			return subject{}, err
		}
		return subject{Target: p.Name(), Says: says, Back: root + "consumers"}, nil
	}
}

func (c *Console) doPause(ctx context.Context, d *doing) (string, error) {
	changed, err := consumers.Pause(ctx, c.deps.Projections, d.Act.Target, consumers.Paused{Actor: d.actor(), Reason: d.Act.Reason})
	if err == nil && !changed {
		return "It was paused already.", nil
	}
	return "Paused. Its instances finish their batches within two seconds.", err
}

func (c *Console) doResume(ctx context.Context, d *doing) (string, error) {
	changed, err := consumers.Resume(ctx, c.deps.Projections, d.Act.Target)
	if err == nil && !changed {
		return "It was not paused.", nil
	}
	return "Resumed.", err
}

// doVerify compares the consumer's projection with the truth.
func (c *Console) doVerify(ctx context.Context, d *doing) (string, error) {
	p, err := c.projection(d.Act.Target)
	if err != nil {
		return "", err
	}
	const named = 5
	r, err := verify.Run(ctx, verify.Deps{Sources: c.observer.src, Fleet: []projections.Projection{p}, Kinds: c.deps.Kinds.Now},
		verify.Options{Wait: pageTimeout, Limit: named})
	if err != nil {
		return "", err
	}
	compared := r.Projections[0]
	says := fmt.Sprintf("Compared %s: %s.", words.Of(compared.Checked, "row"), words.Of(compared.Different, "difference"))
	for _, diff := range compared.Differences {
		says += fmt.Sprintf(" Tenant %d, %s, %s: the truth has %s, the projection %s.", diff.TenantID, diff.Entity,
			diff.Field, diff.Want, diff.Got)
	}
	if !r.OK {
		says += " " + strings.Join(r.Why, "; ") + "."
	}
	return says, nil
}
