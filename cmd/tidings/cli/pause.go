package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
)

// pauseResult is the output of pause and resume with --json.
type pauseResult struct {
	Consumer string `json:"consumer"`
	Paused   bool   `json:"paused"`  // now
	Changed  bool   `json:"changed"` // by this command
}

func (p Process) pauseCommand() *cobra.Command {
	var actor, reason string
	return p.pausing(command{
		use:   "pause --consumer NAME",
		short: "Pause a consumer",
		long: `Within two seconds every instance of the consumer finishes its batch and applies no more events,
even after a restart, until you run tidings resume. The events wait on the stream, so none is lost
before NATS_MAX_AGE has passed. The consumer's lag grows, and its alert fires.`,
		name: "pause", actor: &actor, reason: &reason,
	}, true, func(ctx context.Context, s *session, consumer string) (changed bool, text string, err error) {
		changed, err = consumers.Pause(ctx, s.Projections, consumer, consumers.Paused{Actor: actor, Reason: reason})
		if !changed {
			return changed, "%s was already paused: see `tidings status`.\n", err
		}
		return changed, "%s is paused: its instances finish their batches within two seconds. " +
			"`tidings resume --consumer %[1]s` resumes it.\n", err
	})
}

func (p Process) resumeCommand() *cobra.Command {
	return p.pausing(command{use: "resume --consumer NAME", short: "Resume a paused consumer", name: "resume"}, false,
		func(ctx context.Context, s *session, consumer string) (changed bool, text string, err error) {
			changed, err = consumers.Resume(ctx, s.Projections, consumer)
			if !changed {
				return changed, "%s was not paused.\n", err
			}
			return changed, "%s is resumed.\n", err
		})
}

// pausing makes a command that pauses or resumes a consumer by set, which also returns the format
// of the text.
func (p Process) pausing(d command, paused bool,
	set func(ctx context.Context, s *session, consumer string) (changed bool, text string, err error)) *cobra.Command {
	var consumer string
	d.needs, d.json = needProjections, oneObject
	d.check = func(*session, []string) error { return checkConsumer("--consumer", consumer, false) }
	d.run = func(ctx context.Context, s *session, _ []string) (*report, error) {
		changed, text, err := set(ctx, s, consumer)
		if err != nil {
			return nil, err
		}
		return reports(pauseResult{consumer, paused, changed}, sentence(text, consumer)), nil
	}
	c := p.command(d)
	c.Flags().StringVar(&consumer, "consumer", "", "the consumer: "+strings.Join(fleet.Names(), ", "))
	return c
}
