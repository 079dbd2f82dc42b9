package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// PartitionCheck is a partition beside its stream.
type PartitionCheck struct {
	outbox.Partition
	Active bool           // not closed, and waits for no other partition
	Stream *broker.Stream // as its leader has it; nil when there is none, or no leader
	Err    error          // why no relay publishes: ErrStreamRefused, or broker.ErrNoLeader; nil when nothing is known to be in the way
}

const (
	maxChecks  = 8           // streams that are asked about at once
	checkAgain = time.Second // between looks at a replicated stream that may be lost
)

// Check compares the stream of each partition with what the database knows of it, as a relay does that begins. The partitions come by
// number, closed ones included, whose streams may be gone. On a cluster a stream is refused only when it
// is said to be lost for as long as broker.Doubt asks, so then Check takes 20 s.
func Check(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config) ([]PartitionCheck, error) {
	all, err := outbox.Partitions(ctx, pool) // before the streams: these only grow
	if err != nil {
		return nil, err
	}
	active := make(map[int]bool)
	for _, p := range outbox.Active(all) {
		active[p.Number] = true
	}
	checks := make([]PartitionCheck, len(all))
	var g errgroup.Group
	g.SetLimit(maxChecks)
	for i, p := range all {
		c := &checks[i]
		*c = PartitionCheck{Partition: p, Active: active[p.Number]}
		g.Go(func() error { return c.look(ctx, js, cfg) })
	}
	return checks, g.Wait()
}

// look reads the partition's stream. It returns what says nothing about the stream, such as the end of ctx.
func (c *PartitionCheck) look(ctx context.Context, js jetstream.JetStream, cfg broker.Config) error {
	var doubt broker.Doubt
	for {
		stream, err := broker.ReadStream(ctx, js, cfg, c.Number)
		c.Stream = nil
		if err == nil {
			c.Stream = &stream
		} else if !errors.Is(err, jetstream.ErrStreamNotFound) && !errors.Is(err, broker.ErrNoLeader) && !errors.Is(err, broker.ErrStreamShape) {
			return err
		}
		c.Err = c.compare(cfg, err)
		if !errors.Is(c.Err, ErrStreamRefused) || doubt.Sure(js) {
			return nil
		}
		if sleep(ctx, checkAgain); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// compare says why a relay would not publish to the stream, given the error of reading it.
func (c *PartitionCheck) compare(cfg broker.Config, err error) error {
	var stream broker.Stream
	if c.Stream != nil {
		stream = *c.Stream
	}
	if c.Closed || c.Partition.Stream == "" && stream.Last == 0 && !errors.Is(err, broker.ErrStreamShape) {
		if errors.Is(err, broker.ErrNoLeader) {
			return err
		}
		return nil // a closed one's may be removed, and one that no relay has met is still to be made
	}
	_, err = refuse(cfg.StreamName(c.Number), c.Partition, stream, err)
	return err
}

// refuse returns ErrStreamRefused with the reason why the stream of that name, as its leader has it, does not continue what the database knows of the
// partition; else the error of reading it. lost says that the stream seems to have lost something: a leader may be too young to know.
func refuse(name string, p outbox.Partition, stream broker.Stream, err error) (lost bool, _ error) {
	no := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrStreamRefused}, args...)...)
	}
	switch {
	case errors.Is(err, broker.ErrStreamShape):
		return false, no("%w", err)
	case p.Stream == "" && stream.Last > 0:
		return false, no("stream %s holds %d messages of another database", name, stream.Last)
	case p.Stream == "" && err != nil:
		return false, err
	case p.Replaced():
		return false, no("a repair of partition %d was interrupted", p.Number)
	case p.Stream != name:
		return false, no("partition %d is on stream %s, not %s", p.Number, p.Stream, name)
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return true, no("stream %s is gone", name)
	case err != nil:
		return false, err
	case !stream.Created.Equal(p.Created):
		return true, no("stream %s was made at %s, the one known here at %s", name, stream.Created, p.Created)
	case stream.Last < p.Tail:
		return true, no("stream %s ends at %d, its marks at %d", name, stream.Last, p.Tail)
	}
	return false, nil
}
