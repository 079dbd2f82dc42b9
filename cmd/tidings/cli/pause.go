package cli

import (
	"fmt"
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
	var (
		data, consumer, actor, reason string
		asJSON                        bool
	)
	c := &cobra.Command{
		Use:   "pause --consumer NAME",
		Short: "Pause a consumer",
		Long: `Within two seconds every instance of the consumer finishes its batch and applies no more events,
also after a restart. No event is lost: the events wait on the stream, which keeps them for
NATS_MAX_AGE. The consumer's lag grows, and its alert fires.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkConsumer("--consumer", consumer, false); err != nil {
				return err
			}
			if err := setActor(&actor); err != nil {
				return err
			}
			pool, err := p.projectionsPool(c.Context(), data, "pause")
			if err != nil {
				return err
			}
			defer pool.Close()
			changed, err := consumers.Pause(c.Context(), pool, consumer, actor, reason)
			if err != nil {
				return err
			}
			text := "%s is paused: its instances finish their batches within two seconds. `tidings resume --consumer %[1]s` resumes it.\n"
			if !changed {
				text = "%s was already paused: see `tidings status`.\n"
			}
			return p.sayPaused(asJSON, pauseResult{consumer, true, changed}, text)
		},
	}
	addActor(c, &actor, &reason)
	addPauseFlags(c, &consumer, &asJSON, &data)
	return c
}

func (p Process) resumeCommand() *cobra.Command {
	var (
		data, consumer string
		asJSON         bool
	)
	c := &cobra.Command{
		Use:   "resume --consumer NAME",
		Short: "Resume a paused consumer",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := checkConsumer("--consumer", consumer, false); err != nil {
				return err
			}
			pool, err := p.projectionsPool(c.Context(), data, "resume")
			if err != nil {
				return err
			}
			defer pool.Close()
			changed, err := consumers.Resume(c.Context(), pool, consumer)
			if err != nil {
				return err
			}
			text := "%s is resumed.\n"
			if !changed {
				text = "%s was not paused.\n"
			}
			return p.sayPaused(asJSON, pauseResult{consumer, false, changed}, text)
		},
	}
	addPauseFlags(c, &consumer, &asJSON, &data)
	return c
}

func addPauseFlags(c *cobra.Command, consumer *string, asJSON *bool, data *string) {
	c.Flags().StringVar(consumer, "consumer", "", "the consumer: "+strings.Join(fleet.Names(), ", "))
	c.Flags().BoolVar(asJSON, "json", false, "print one JSON object")
	dataFlag(c, data)
}

func (p Process) sayPaused(asJSON bool, r pauseResult, text string) error {
	if asJSON {
		return p.writeJSON(r)
	}
	if _, err := fmt.Fprintf(p.Stdout, text, r.Consumer); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}
