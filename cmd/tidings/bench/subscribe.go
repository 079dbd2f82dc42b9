package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/subscribe"
)

// subscribeOptions are the flags of `tidings bench subscribe`.
type subscribeOptions struct {
	projectOptions
	concurrency int
	works       time.Duration
}

func subscribeCommand() *cobra.Command {
	o := subscribeOptions{projectOptions: projectOptions{partitions: 1}}
	cmd := &cobra.Command{
		Use: "subscribe", Args: cobra.NoArgs,
		Short: "Measure a handler of package subscribe on a stream of follows",
		Long: `Subscribe fills a stream with follow events of --users followees. It times subscribe.Handle from its
start until Handle has acknowledged the last event: once without options, and once with InOrder.
This process is the subscriber.

duplicates counts events that the function got twice. inversions counts events of a followee that
the function got after a later one.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.events < 1 || o.users < 1 || o.concurrency < 1 || o.sync != syncAlways && o.sync != syncDefault {
				return errors.New("want --events, --users and --concurrency of 1 or more, --broker-sync always or default")
			}
			return onEach(cmd, o.sync, []string{"subscribe", "subscribe-in-order"}, o.run)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.events, "events", 200_000, "events on the stream")
	f.IntVar(&o.users, "users", 100_000, "users on each side")
	f.IntVar(&o.concurrency, "concurrency", 64, "parallel calls of the function")
	f.DurationVar(&o.works, "works", 0, "how long a call takes")
	f.StringVar(&o.sync, "broker-sync", syncDefault, syncReading)
	f.DurationVar(&o.within, "within", 10*time.Minute, giveUp)
	return cmd
}

// handled records the events that the function got.
type handled struct {
	mu                     sync.Mutex
	last                   map[event.ID]uint64 // sequence, by followee
	seen                   map[uint64]bool
	duplicates, inversions int
	all                    int
	done                   chan struct{}
}

func (h *handled) note(e *subscribe.Event[event.Edge]) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.seen[e.Seq]:
		h.duplicates++
		return
	case h.last[e.Data.To] > e.Seq:
		h.inversions++
	}
	h.seen[e.Seq], h.last[e.Data.To] = true, e.Seq
	if len(h.seen) == h.all {
		close(h.done)
	}
}

func (o subscribeOptions) run(ctx context.Context, s *servers, name string) error {
	opts := []subscribe.Option{subscribe.Concurrency(o.concurrency)}
	if name == "subscribe-in-order" {
		opts = append(opts, subscribe.InOrder())
	}
	if err := s.declare(ctx, 1); err != nil {
		return err
	}
	s.say("publishing %d events", o.events)
	if _, err := o.fill(ctx, s, projectCases(int64(o.users))["random"]); err != nil {
		return err
	}
	s.say("handling")
	h := &handled{last: make(map[event.ID]uint64), seen: make(map[uint64]bool), all: o.events, done: make(chan struct{})}
	took, err := o.time(ctx, s.js, h, opts)
	if err != nil {
		return err
	}
	r := result{Case: name, Duplicates: &h.duplicates, Inversions: &h.inversions}
	r.rate(o.events, took)
	return s.print(&r)
}

// time returns how long Handle takes until all events are acknowledged.
func (o subscribeOptions) time(ctx context.Context, js jetstream.JetStream, h *handled, opts []subscribe.Option) (time.Duration, error) {
	run, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	start := time.Now()
	go func() {
		ended <- subscribe.Handle(run, js.Conn(), "bench", "follow.*", func(ctx context.Context, e subscribe.Event[event.Edge]) error {
			if o.works > 0 {
				if err := work.Sleep(ctx, o.works); err != nil {
					return err
				}
			}
			h.note(&e)
			return nil
		}, opts...)
	}()
	late := time.NewTimer(o.within)
	defer late.Stop()
	select {
	case <-h.done:
	case err := <-ended:
		return 0, errors.Join(err, errors.New("the subscriber ended early"))
	case <-late.C:
		return 0, fmt.Errorf("not done after %s", o.within)
	}
	if err := await(ctx, time.Millisecond, o.within, func() (bool, error) { // until NATS has the last acknowledgment
		c, err := js.Consumer(ctx, "EVENTS-0", "bench-follow")
		if err != nil {
			return false, err
		}
		i := c.CachedInfo()
		return i.NumPending == 0 && i.NumAckPending == 0, nil
	}); err != nil {
		return 0, err
	}
	took := time.Since(start)
	stop()
	return took, <-ended
}
