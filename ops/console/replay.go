package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/replay"
)

const (
	planWait      = 3 * time.Second // limit for the plan that the form shows
	replayTimeout = 24 * time.Hour
)

func (c *Console) replayDeps() replay.Deps {
	return replay.Deps{URL: c.deps.OwnerURL, Postgres: c.deps.Postgres, Truth: c.deps.Truth, Kinds: c.deps.Kinds,
		JetStream: c.deps.JetStream, Broker: c.deps.Broker, Log: c.deps.Log}
}

// errNoOwner refuses a replay because the console has no login for it.
var errNoOwner = &problem{http.StatusConflict, "The console has no login that owns the projections' tables",
	"Nothing was done. Run `tidings replay`, or set CONSOLE_OWNER_DATABASE_URL."}

// prepareReplay describes what a replay reads and builds. It omits figures that it does not get
// within planWait.
func (c *Console) prepareReplay(ctx context.Context, _ *view, in url.Values) (subject, error) {
	p, err := c.projection(in.Get("consumer"))
	if err != nil {
		return subject{}, err
	}
	if c.deps.OwnerURL == "" {
		return subject{}, errNoOwner
	}
	s := subject{Target: p.Name(), Back: root + "consumers"}
	s.Says = []string{"New tables are built beside the live ones, which are dropped when the new ones take their place. " +
		"Writes, the consumer and its readers continue meanwhile.",
		"An interrupted replay changes nothing. Start it again."}
	if len(p.Tables()) == 0 {
		s.Says = []string{"The events are applied to the live tables again, which adds what is missing. An interrupted replay leaves " +
			"what it has added. Start it again."}
	}
	ctx, cancel := context.WithTimeout(ctx, planWait)
	defer cancel()
	plan, err := replay.Run(ctx, c.replayDeps(), p, replay.Options{From: replay.Auto, DryRun: true})
	switch {
	case errors.Is(err, replay.ErrRunning):
		return s, errReplayRuns
	case ctx.Err() != nil:
		s.Says = append(s.Says, "The servers did not answer within 3 seconds, so the plan has no figures.")
	case err != nil:
		s.Says = append(s.Says, "The plan has no figures: "+err.Error()+".")
	default:
		s.Says = append(s.Says, replayPlan(plan))
	}
	return s, nil
}

// errReplayRuns is replay.ErrRunning as a page.
var errReplayRuns = &problem{http.StatusConflict, "The replay is refused",
	strings.TrimPrefix(replay.ErrRunning.Error(), "replay: ") + ". Nothing was done."}

// replayPlan describes what a replay reads and builds.
func replayPlan(r replay.Report) string {
	tables := "It rebuilds no table."
	if len(r.Tables) > 0 {
		tables = "It rebuilds " + strings.Join(r.Tables, ", ") + "."
	}
	return fmt.Sprintf("It reads the %s: %s. The streams have %s. %s", r.From, r.Because, words.Of(int64(r.Messages), "message"), tables)
}

// doReplay rebuilds the consumer's projection and switches to the new tables.
func (c *Console) doReplay(ctx context.Context, d *doing) (string, error) {
	p, err := c.projection(d.Act.Target)
	if err != nil {
		return "", err
	}
	if c.deps.OwnerURL == "" {
		return "", errNoOwner
	}
	d.at("making the new tables")
	r, err := replay.Run(ctx, c.replayDeps(), p, replay.Options{From: replay.Auto, Progress: func(now replay.Progress) {
		d.at(now.Step)
		d.progress(now.Done, now.Total)
	}})
	stays := "Nothing has changed: the live tables are as they were. Start it again."
	switch {
	case len(p.Tables()) == 0:
		stays = "The live tables keep what it has added. Start it again."
	case r.SwitchTries > 0: // the answer to the commit of the switch may be lost
		stays = "The switch had begun, so the live tables are either the old ones or the new ones, complete in both cases. " +
			"Verify the consumer."
	}
	switch {
	case err == nil:
		return fmt.Sprintf("Replayed from the %s: %s applied in %s (%s/s). The live consumer waited for %s while the tables changed "+
			"places. It has %s now.", r.From, words.Of(r.Events, "event"), span(r.Seconds), words.Count(int64(r.EventsPerSecond)),
			span(r.SwitchSeconds), words.Of(r.DeadLetters, "dead letter")), nil
	case r.Switched:
		return "", fmt.Errorf("the new tables are live, but cleaning up after the replay failed; the next replay does it: %w", err)
	case errors.Is(err, replay.ErrRunning):
		return "", errReplayRuns
	case ctx.Err() != nil:
		return "", &problem{http.StatusConflict, "The replay was stopped before its end", stays}
	}
	return "", &problem{http.StatusConflict, "The replay failed", err.Error() + ". " + stays}
}
