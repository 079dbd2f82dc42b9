package broker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

var (
	// ErrMissing reports that a stream, a bucket or a durable consumer does not exist, and that
	// this process does not create it (NATS_MANAGE=false).
	ErrMissing = errors.New("broker: NATS_MANAGE=false leaves it to its owner to create")
	// ErrUnmanaged refuses to change what NATS_MANAGE=false leaves to its owner.
	ErrUnmanaged = errors.New("broker: NATS_MANAGE=false: the streams and durable consumers belong to somebody else. Change them " +
		"where they are kept, or run the command with NATS_MANAGE=true and a login that may")
)

// missing returns an ErrMissing with the remedy.
func missing(what string) error {
	return fmt.Errorf("%s does not exist; `tidings stream plan` prints it: %w", what, ErrMissing)
}

// Plan is what JetStream must have. Declare and the other functions of this package create the
// same.
type Plan struct {
	Streams []PlannedStream
	Bucket  jetstream.KeyValueConfig // the record of erasures
	Dead    jetstream.StreamConfig   // the dead letters of subscribers with durable consumers
}

// PlannedStream is the stream of a partition.
type PlannedStream struct {
	jetstream.StreamConfig
	Closed bool // it gets no more events, and may go once every consumer and subscriber has read it
}

// NewPlan returns the plan for partitions. closed and repaired have numbers of theirs: those whose
// stream gets no more events, and those that replace a lost one.
func NewPlan(c Config, partitions []Partition, closed, repaired map[int]bool) Plan {
	plan := Plan{Bucket: c.erasedConfig(), Dead: c.dead(c.Replicas, c.Tags)}
	for _, p := range partitions {
		s := PlannedStream{StreamConfig: c.planned(p), Closed: closed[p.Number]}
		if repaired[p.Number] {
			s.Metadata[MetaRepaired] = "true"
		}
		plan.Streams = append(plan.Streams, s)
	}
	return plan
}

// planned returns the stream that Declare creates for a partition.
func (c Config) planned(p Partition) jetstream.StreamConfig {
	return c.declare(jetstream.StreamConfig{Metadata: p.metadata(), Placement: Placement(c.Tags)}, p.Number)
}

// BucketStream returns the stream that the client creates for the bucket of the plan. A bucket is a
// stream.
func (p Plan) BucketStream() jetstream.StreamConfig {
	b := p.Bucket
	return jetstream.StreamConfig{
		Name: "KV_" + b.Bucket, Description: b.Description, Subjects: []string{"$KV." + b.Bucket + ".>"}, Storage: b.Storage,
		Replicas: b.Replicas, Placement: b.Placement, MaxMsgsPerSubject: 1, MaxMsgs: -1, MaxBytes: -1, MaxMsgSize: -1, MaxConsumers: -1,
		Discard: jetstream.DiscardNew, Duplicates: 2 * time.Minute, AllowRollup: true, DenyDelete: true, AllowDirect: true,
	}
}

// unmet returns why relays refuse a stream that they may not change. Its owner chooses replicas,
// placement, age and size, and the window of duplicates, on which nothing depends.
func (c Config) unmet(have jetstream.StreamConfig, p Partition) []string {
	why, want := c.mismatch(have, p), c.planned(p)
	for _, rule := range []struct {
		met  bool
		name string
	}{
		{have.DenyPurge, "it allows purges (want deny_purge)"},
		{have.RePublish != nil && *have.RePublish == *want.RePublish,
			fmt.Sprintf("it does not republish %s to %s", want.RePublish.Source, want.RePublish.Destination)},
		{have.AllowAtomicPublish, "it refuses atomic batches (want allow_atomic)"},
		{have.Discard == want.Discard, "a full stream drops old events (want discard new)"},
		{have.MaxMsgs <= 0 && have.MaxMsgsPerSubject <= 0, "it limits the number of messages (want max_msgs and max_msgs_per_subject -1)"},
		{!have.AllowRollup, "it allows rollups, which purge (want allow_rollup_hdrs off)"},
		{!have.NoAck, "it acknowledges no publish (want no_ack off)"},
		{have.AllowDirect, "it refuses direct gets (want allow_direct)"},
	} {
		if !rule.met {
			why = append(why, rule.name)
		}
	}
	return why
}

// checked is Declare for a stream that belongs to somebody else.
func checked(ctx context.Context, js jetstream.JetStream, cfg Config, p Partition) (Stream, error) {
	name := cfg.StreamName(p.Number)
	stream, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return Stream{}, missing("stream " + name)
	}
	if err != nil {
		return Stream{}, fmt.Errorf("check stream %s: %w", name, unanswered(js, err))
	}
	if reasons := cfg.unmet(stream.CachedInfo().Config, p); len(reasons) > 0 {
		return Stream{}, fmt.Errorf("%w: %s: %s", ErrStreamShape, name, strings.Join(reasons, "; "))
	}
	s, err := describe(cfg, stream.CachedInfo())
	if err == nil && s.Last == 0 {
		err = keep(ctx, js, cfg, s)
	}
	return s, err
}

// HasErasedBucket returns ErrMissing if the record of erasures does not exist.
func HasErasedBucket(ctx context.Context, js jetstream.JetStream, cfg Config) error {
	_, err := js.Stream(ctx, "KV_"+cfg.erasedBucket())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return missing("bucket " + cfg.erasedBucket())
	}
	if err != nil {
		return fmt.Errorf("look up bucket %s: %w", cfg.erasedBucket(), unanswered(js, err))
	}
	return nil
}
