package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// PartitionCheck compares a partition with its stream.
type PartitionCheck struct {
	outbox.Partition
	Active bool           // not closed, and waits for no other partition
	Stream *broker.Stream // as its leader reports it; nil if the stream or its leader does not exist
	Err    error          // why no relay publishes: ErrStreamRefused or broker.ErrNoLeader; nil if no obstacle is known
}

const maxChecks = 8 // streams checked at once

// Check compares the stream of each partition with the database, as a relay does at its start. It
// returns the partitions by number, including closed ones, whose streams may be gone. On a cluster
// a loss counts only once the brokers have reported it for as long as broker.Doubt requires, so
// Check then takes 20 s.
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
		g.Go(func() error { return c.probe(ctx, pool, js, cfg) })
	}
	if err := g.Wait(); err != nil {
		return nil, err // a comparison that did not end says nothing
	}
	return checks, nil
}

// probe reads the partition's stream. It sets Err if the stream is gone, has no leader or was not
// made for events. It returns any other error, for example the end of ctx. A relay may have bound,
// closed or replaced the partition since c has it, so probe reads it again before it believes a
// disagreement.
func (c *PartitionCheck) probe(ctx context.Context, q outbox.Querier, js jetstream.JetStream, cfg broker.Config) error {
	_, err := broker.Confirm(ctx, js, func(ctx context.Context) (broker.Stream, bool, error) {
		for {
			stream, err := broker.ReadStream(ctx, js, cfg, c.Number)
			c.Stream = nil
			if err == nil {
				c.Stream = &stream
			} else if !errors.Is(err, jetstream.ErrStreamNotFound) && !errors.Is(err, broker.ErrNoLeader) &&
				!errors.Is(err, broker.ErrStreamShape) {
				return stream, false, err
			}
			if c.Err = c.compare(cfg, err); !errors.Is(c.Err, ErrStreamRefused) {
				return stream, false, nil
			}
			now, err := outbox.ReadPartition(ctx, q, c.Number)
			if err != nil || now.SameStream(c.Partition) {
				return stream, true, err
			}
			c.Partition = now
		}
	})
	return err
}

// compare returns why a relay would not publish to the stream. err is the error of reading it.
func (c *PartitionCheck) compare(cfg broker.Config, err error) error {
	var stream broker.Stream
	if c.Stream != nil {
		stream = *c.Stream
	}
	if c.Closed || c.Partition.Stream == "" && stream.Last == 0 && !errors.Is(err, broker.ErrStreamShape) {
		if errors.Is(err, broker.ErrNoLeader) {
			return err
		}
		return nil // an operator may have removed a closed stream, and an unbound partition has none yet
	}
	_, err = refuse(cfg.StreamName(c.Number), c.Partition, stream, err)
	return err
}

// refuse returns ErrStreamRefused and the reason if the stream, as its leader reports it, does not
// continue what the database knows of the partition. Otherwise it returns the error of reading the
// stream. lost reports that the stream seems to have lost data: a new leader may not know all of it
// yet.
func refuse(name string, p outbox.Partition, stream broker.Stream, err error) (lost bool, _ error) {
	const (
		repair  = "; run `tidings repair stream --dry-run`"
		restore = repair + ", or `tidings restore` if a database or a disk of NATS came back from a backup or a snapshot"
	)
	no := func(remedy, format string, args ...any) error { return refusal{fmt.Errorf(format+remedy, args...)} }
	switch {
	case errors.Is(err, broker.ErrMissing):
		return false, no("", "%w", err)
	case errors.Is(err, broker.ErrStreamShape):
		return false, no(repair, "%w", err)
	case p.Stream == "" && stream.Last > 0:
		return false, no(repair, "stream %s holds %s of another database", name, messages(int64(stream.Last)))
	case p.Stream == "" && err != nil:
		return false, err
	case p.Replaced():
		return false, no(repair, "a repair of partition %d was interrupted", p.Number)
	case p.Stream != name:
		return false, no(repair, "partition %d is on stream %s, not %s", p.Number, p.Stream, name)
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return true, no(repair, "stream %s is gone", name)
	case err != nil:
		return false, err
	case !stream.Created.Equal(p.Created):
		return true, no(restore, "stream %s was made at %s, the one known here at %s", name, stream.Created, p.Created)
	case stream.Last < p.Tail:
		return true, no(restore, "stream %s ends at %d, its marks at %d", name, stream.Last, p.Tail)
	}
	return false, nil
}
