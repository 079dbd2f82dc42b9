package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/ops/status"
)

func (p Process) streamConfigureCommand() *cobra.Command {
	var (
		replicas int
		tags     []string
		age      time.Duration
		size     int64
		l        broker.Limits
	)
	c := p.command(command{
		use:   "configure",
		short: "Set the replicas, placement, age and size of all streams, also below their current values",
		long: `Configure sets replicas, placement, age and size on the streams of all partitions. Give at least one
of --replicas, --placement-tags, --max-age and --max-bytes. The stream that records erasures gets as
many replicas as the others. The command also makes the servers refuse purges of streams that an
older release created.

Only this command lowers these values. A relay whose NATS_REPLICAS, NATS_MAX_AGE or NATS_MAX_BYTES
is lower leaves the streams unchanged and logs a warning. A relay whose values are higher raises
them again at its next start. So first lower them in the environment of every relay.

--placement-tags moves the streams to servers that have all these tags. The servers copy them in the
background, and relays and consumers continue. Relays and erasures use NATS_PLACEMENT_TAGS for new
streams, and never move existing ones. Change the replicas in one run of the command, and the tags
in another.

With a shorter age, older events expire at once. A consumer that has not read them stops, and needs
tidings replay.`,
		name: "stream", needs: needAll | orOutbox, destructive: true,
		check: func(s *session, _ []string) error {
			if s.changed("replicas") {
				l.Replicas = &replicas
			}
			if s.changed("placement-tags") {
				l.Tags = &tags
			}
			if s.changed("max-age") {
				l.MaxAge = &age
			}
			if s.changed("max-bytes") {
				l.MaxBytes = &size
			}
			if l == (broker.Limits{}) {
				return &usageError{errors.New("name at least one of --replicas, --placement-tags, --max-age and --max-bytes")}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			return s.configureStreams(ctx, l)
		},
	})
	c.Flags().IntVar(&replicas, "replicas", 0, "copies of each stream, 1 to 5")
	c.Flags().StringSliceVar(&tags, "placement-tags", nil,
		"tags that the servers of each stream must have, separated by commas; \"\" for none")
	c.MarkFlagsMutuallyExclusive("replicas", "placement-tags") // the servers change only one of them at a time
	c.Flags().DurationVar(&age, "max-age", 0, "how long events remain; 0 for no limit")
	c.Flags().Int64Var(&size, "max-bytes", 0, "size of each stream in bytes; -1 for no limit")
	return c
}

// configureStreams asks before it lowers a limit, and sets the limits on all streams.
func (s *session) configureStreams(ctx context.Context, l broker.Limits) (*report, error) {
	if err := s.ask(func(w io.Writer) error { return showShrink(ctx, w, s.system, l) }); err != nil {
		return nil, err
	}
	var all []broker.Configured
	if err := status.Retry(ctx, status.Patience,
		func() (err error) { all, err = broker.Configure(ctx, s.JetStream, s.Broker, l); return err }); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("there is no stream yet: a relay creates the first one")
	}
	return lists(all, func(w io.Writer) error {
		for _, now := range all {
			fmt.Fprintf(w, "Stream %s: replicas %d, placement tags %s, age %s (0s: no limit), size %d bytes (-1: no limit).\n",
				now.Stream, now.Replicas, orDefault(strings.Join(now.Tags, ","), "none"), now.MaxAge, now.MaxBytes)
		}
		return nil
	}), nil
}

// showShrink shows which limits of l are lower than the current ones of a stream.
func showShrink(ctx context.Context, w io.Writer, y *system, l broker.Limits) error {
	var shrunk []string
	if err := status.Retry(ctx, status.Patience, func() (err error) {
		shrunk, err = broker.Shrinks(ctx, y.JetStream, y.Broker, l)
		return err
	}); err != nil {
		return err
	}
	return textLines("NATS deletes everything beyond a limit at once:", shrunk...)(w)
}
