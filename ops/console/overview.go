package console

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/samples"
	"github.com/tidings/tidings/ops/status"
)

type overviewPage struct {
	*observed         // nil for a tenant's token
	Boxes     []box   // the parts of the system
	Arrows    []arrow // between them
	Width     int
	Height    int
	Says      string // the picture in words

	day  *samples.Day
	hour samples.Window
}

// box is a part of the system in the picture.
type box struct {
	X, Y, W, H           int
	Title, Value, Detail string
	Level                string   // ok, warn or bad
	URL                  string   // of the page that shows more
	Line                 []string // polylines of the last hour
}

// MidX is the horizontal center of the box's text. Y1 to Y3 are the baselines of its three lines of
// text.
func (b box) MidX() int { return b.X + b.W/2 }
func (b box) Y1() int   { return b.Y + 24 }
func (b box) Y2() int   { return b.Y + 48 }
func (b box) Y3() int   { return b.Y + 68 }

type arrow struct{ X1, Y1, X2, Y2 int }

const (
	boxWidth  = 184
	boxHeight = 112
	boxGap    = 36
	boxRow    = 128
	boxRunes  = 24 // of a line, in a wide font
)

// fit cuts a line of a box to its width; a tooltip has the whole line.
func fit(s string) string {
	if runes := []rune(s); len(runes) > boxRunes {
		return string(runes[:boxRunes-1]) + "…"
	}
	return s
}

func (c *Console) overviewData(ctx context.Context, v *view) (any, error) {
	if !v.who.System() {
		return overviewPage{}, nil
	}
	now, err := c.observer.state(ctx, false)
	if err != nil {
		return nil, err
	}
	if err := c.refreshDay(ctx, now.State); err != nil {
		return nil, err
	}
	p := overviewPage{observed: now, day: c.day, hour: c.lastHour()}
	p.draw()
	return p, nil
}

// draw draws the picture: the API, the outbox, the relay, the streams, and each consumer with its
// projection.
func (p *overviewPage) draw() {
	height := max(1, len(p.State.Consumers)) * boxRow
	middle := (height-boxRow)/2 + 8
	for i, b := range []box{p.apiBox(), p.outboxBox(), p.relayBox(), p.streamsBox()} {
		p.place(&b, i*(boxWidth+boxGap)+2, middle, [...]string{samples.Written, samples.Pending, samples.Published, samples.Stored}[i])
		if i > 0 {
			p.Arrows = append(p.Arrows, arrow{p.Boxes[i-1].X + boxWidth, middle + boxHeight/2, b.X - 2, middle + boxHeight/2})
		}
		p.Boxes = append(p.Boxes, b)
	}
	from := p.Boxes[len(p.Boxes)-1]
	for i, k := range p.State.Consumers {
		b := p.consumerBox(k)
		if p.Rates != nil && k.Unknown == "" && k.Paused == nil {
			b.Detail = fmt.Sprintf("%.0f/s", p.Rates.Applied[k.Consumer])
		}
		if grows := (consumerRow{Consumer: k, Trend: p.day.Trend(k.Consumer)}).Grows(); grows != "" {
			b.Detail = grows
		}
		p.place(&b, from.X+boxWidth+boxGap, i*boxRow+8, samples.Behind+k.Consumer)
		p.Boxes = append(p.Boxes, b)
		p.Arrows = append(p.Arrows, arrow{from.X + boxWidth, from.Y + boxHeight/2, b.X - 2, b.Y + boxHeight/2})
	}
	p.Width, p.Height = 5*boxWidth+4*boxGap+4, height
	var says []string
	for _, b := range p.Boxes {
		says = append(says, strings.TrimSpace(b.Title+": "+b.Value+" "+b.Detail))
	}
	p.Says = strings.Join(says, "; ")
}

// place sets the place of a box, and its line.
func (p *overviewPage) place(b *box, x, y int, figure string) {
	b.X, b.Y, b.W, b.H = x, y, boxWidth, boxHeight
	values := p.day.Largest(figure, p.hour)
	if figure == samples.Written || figure == samples.Published {
		values = p.day.Rates(figure, p.hour)
	}
	b.Line = spark(values, plot{float64(x + 10), float64(y + 80), boxWidth - 20, boxHeight - 88})
}

func (p *overviewPage) apiBox() box {
	b := box{Title: "API", Value: "–", Detail: "writes", Level: "ok", URL: root + "event"}
	if p.Rates != nil && p.Wrote >= 0 {
		b.Value = fmt.Sprintf("%.0f/s", p.Wrote)
	}
	return b
}

func (p *overviewPage) outboxBox() box {
	o := p.State.Outbox
	if o == nil {
		return box{Title: "Truth and outbox", Value: "unknown", Level: "bad", URL: root + "doctor"}
	}
	b := box{Title: "Truth and outbox", Value: words.Capped(int64(o.Pending), o.PendingMax) + " pending",
		Detail: "oldest due " + span(o.LagSeconds), Level: p.level("outbox"), URL: root + "partitions"}
	if o.DLQDepth > 0 {
		b.Detail, b.URL = words.Of(int64(o.DLQDepth), "dead letter"), address("dead-letters", "source", "outbox")
	}
	return b
}

func (p *overviewPage) relayBox() box {
	b := box{Title: "Relay", Value: "–", Detail: "nobody runs it", Level: "bad", URL: root + "partitions"}
	holders := map[string]bool{}
	for _, s := range p.State.Partitions {
		if s.Relay != "" {
			holders[s.Relay] = true
		}
	}
	if p.State.IsUnavailable(status.ServerNATS) {
		b.Detail, b.Level = "waits for NATS", "warn"
	} else if len(holders) > 0 {
		b.Detail, b.Level = words.Of(int64(len(holders)), "process"), p.level("relay")
		if len(holders) > 1 {
			b.Detail = fmt.Sprint(len(holders), " processes")
		}
	}
	if p.Rates != nil {
		b.Value = fmt.Sprintf("%.0f/s", p.Rates.Published)
	}
	return b
}

func (p *overviewPage) streamsBox() box {
	if p.State.IsUnavailable(status.ServerNATS) {
		return box{Title: "Streams", Value: "unavailable", Level: "bad", URL: root + "partitions"}
	}
	open, messages, places := 0, uint64(0), []string{status.ServerNATS}
	for _, s := range p.State.Partitions {
		messages, places = messages+s.Messages, append(places, s.Stream, fmt.Sprint("partition ", s.Partition))
		if s.State == status.Open {
			open++
		}
	}
	return box{Title: "Streams", Value: words.Of(int64(messages), "message"), Detail: words.Of(int64(open), "partition"),
		Level: p.level(places...), URL: root + "partitions"}
}

func (o *observed) consumerBox(k status.Consumer) box {
	b := box{Title: k.Consumer, Value: words.Of(k.Messages, "message") + " behind", Level: o.level(k.Consumer),
		URL: root + "consumers#c-" + k.Consumer}
	switch {
	case k.Unknown != "":
		b.Value = "lag unknown"
		if b.Level == "ok" {
			b.Level = "warn"
		}
	case k.Messages == 0 && unpublished(k):
		b.Value = "waits for the outbox"
	case k.Messages == 0:
		b.Value = "up to date"
	}
	if k.Paused != nil {
		b.Value, b.Detail = "paused", b.Value
	}
	return b
}

// unpublished reports whether the consumer has applied all events of the streams, while the outbox
// has kept others back for long.
func unpublished(k status.Consumer) bool {
	return k.AsOf != nil && time.Since(*k.AsOf) > doctor.LateSeconds*time.Second
}
