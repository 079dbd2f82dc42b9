package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Metadata keys of the stream.
const (
	MetaGeneration = "generation" // which life of the stream this is: a repair after lost data begins the next
	MetaPartitions = "partitions" // fixed for the life of a stream
)

// partitions is the number that the outbox table computes with and the event package knows.
const partitions = "32"

// duplicateWindow is the server's minimum. Publishes are guarded by the tail check; a longer window costs memory for each
// message in it and protects from nothing more.
const duplicateWindow = 100 * time.Millisecond

// ErrStreamShape reports a stream of the configured name that is not the events' and cannot become it. Give the stream
// another name (NATS_STREAM), or remove the one that is in the way.
var ErrStreamShape = errors.New("broker: the stream has another shape")

// EnsureStream declares the stream of cfg and returns it. It brings an existing stream up to date where that loses nothing. The stream
// keeps its metadata, any limits that cfg does not name, and replicas, age and size of which cfg asks for less: Less
// names them, and Configure is how to shrink on purpose. A stream of another shape is refused with ErrStreamShape. Several processes
// may call it at once.
func EnsureStream(ctx context.Context, js jetstream.JetStream, cfg Config) (jetstream.Stream, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	stream, err := js.Stream(ctx, cfg.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		stream, err = create(ctx, js, cfg.declare(jetstream.StreamConfig{Metadata: map[string]string{MetaGeneration: "1", MetaPartitions: partitions}}))
		if !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			if err != nil {
				return nil, fmt.Errorf("create stream %s: %w", cfg.Stream, err)
			}
			return stream, nil
		}
		stream, err = js.Stream(ctx, cfg.Stream) // another process was faster, with other settings
	}
	if err != nil {
		return nil, fmt.Errorf("look up stream %s: %w", cfg.Stream, err)
	}
	have := stream.CachedInfo().Config
	if reasons := cfg.mismatch(have); len(reasons) > 0 {
		return nil, fmt.Errorf("%w: %s: %s", ErrStreamShape, cfg.Stream, strings.Join(reasons, "; "))
	}
	return change(ctx, js, stream, func(have jetstream.StreamConfig) jetstream.StreamConfig { return cfg.grown(have).declare(have) })
}

// change updates the stream by what f makes of its configuration, which is read just before. JetStream has no conditional update: of two
// that overlap, one may be lost, so each reads again whether its own took, up to some times. Both then have what they want, and
// everything that neither touches, such as an operator's metadata, stays.
func change(ctx context.Context, js jetstream.JetStream, stream jetstream.Stream, f func(jetstream.StreamConfig) jetstream.StreamConfig) (jetstream.Stream, error) {
	for range 5 {
		info, err := stream.Info(ctx)
		if err != nil {
			return nil, fmt.Errorf("look up stream %s: %w", stream.CachedInfo().Config.Name, err)
		}
		have := info.Config
		have.Metadata = maps.Clone(have.Metadata)
		want := f(have)
		if equal(info.Config, want) {
			return stream, nil
		}
		if _, err = js.UpdateStream(ctx, want); err != nil {
			return nil, fmt.Errorf("update stream %s: %w", want.Name, err)
		}
	}
	return nil, fmt.Errorf("update stream %s: other processes change it all the time", stream.CachedInfo().Config.Name)
}

// SetMetadata makes one key of the stream's metadata what f makes of it, and leaves the others as they are. f may be called again with
// what it returned, and then returns the same.
func SetMetadata(ctx context.Context, js jetstream.JetStream, stream jetstream.Stream, key string, f func(old string) string) error {
	_, err := change(ctx, js, stream, func(have jetstream.StreamConfig) jetstream.StreamConfig {
		if have.Metadata == nil {
			have.Metadata = make(map[string]string)
		}
		have.Metadata[key] = f(have.Metadata[key])
		return have
	})
	return err
}

// Limits are what Configure sets. nil leaves a value as it is.
type Limits struct {
	Replicas *int
	MaxAge   *time.Duration // 0 for ever
	MaxBytes *int64         // -1 for no limit
}

// Configure sets the stream's limits, also to less than it has: copies are dropped, and messages beyond the age expire. A relay whose
// environment asks for more grows the stream again when it next connects.
func Configure(ctx context.Context, js jetstream.JetStream, cfg Config, l Limits) (jetstream.StreamConfig, error) {
	stream, err := js.Stream(ctx, cfg.Stream)
	if err != nil {
		return jetstream.StreamConfig{}, fmt.Errorf("look up stream %s: %w", cfg.Stream, err)
	}
	if err := l.over(cfg, stream.CachedInfo().Config).Validate(); err != nil {
		return jetstream.StreamConfig{}, err
	}
	stream, err = change(ctx, js, stream, func(have jetstream.StreamConfig) jetstream.StreamConfig {
		c := l.over(cfg, have)
		have.Replicas, have.MaxAge, have.MaxBytes = c.Replicas, c.MaxAge, c.MaxBytes
		return have
	})
	if err != nil {
		return jetstream.StreamConfig{}, err
	}
	return stream.CachedInfo().Config, nil
}

// over is c with the limits of have, and those of l over them.
func (l Limits) over(c Config, have jetstream.StreamConfig) Config {
	c.Replicas, c.MaxAge, c.MaxBytes = have.Replicas, have.MaxAge, have.MaxBytes
	if l.Replicas != nil {
		c.Replicas = *l.Replicas
	}
	if l.MaxAge != nil {
		c.MaxAge = *l.MaxAge
	}
	if l.MaxBytes != nil {
		c.MaxBytes = *l.MaxBytes
	}
	return c
}

// grown is c with as much as have has where c asks for less. No limit is the most.
func (c Config) grown(have jetstream.StreamConfig) Config {
	c.Replicas = max(c.Replicas, have.Replicas)
	if c.MaxAge != 0 && (have.MaxAge == 0 || have.MaxAge > c.MaxAge) {
		c.MaxAge = have.MaxAge
	}
	if c.MaxBytes != -1 && (have.MaxBytes <= 0 || have.MaxBytes > c.MaxBytes) {
		c.MaxBytes = have.MaxBytes
	}
	return c
}

// Less names what a stream has more of than c asks for, both values: declaring the stream takes nothing of it away.
func (c Config) Less(have jetstream.StreamConfig) (all []string) {
	g := c.grown(have)
	if g.Replicas != c.Replicas {
		all = append(all, fmt.Sprintf("NATS_REPLICAS is %d, the stream has %d", c.Replicas, g.Replicas))
	}
	if g.MaxAge != c.MaxAge {
		all = append(all, fmt.Sprintf("NATS_MAX_AGE is %s, the stream has %s (0s: for ever)", c.MaxAge, g.MaxAge))
	}
	if g.MaxBytes != c.MaxBytes {
		all = append(all, fmt.Sprintf("NATS_MAX_BYTES is %d, the stream has %d (-1: no limit)", c.MaxBytes, g.MaxBytes))
	}
	return all
}

// errCodeStore is the server's code for a store that it could not create.
const errCodeStore = 10049

// create creates the stream. Right after an account's last stream was deleted the server still removes its folders in the
// background, and may do so under the new stream's feet; it then creates it when asked again.
func create(ctx context.Context, js jetstream.JetStream, sc jetstream.StreamConfig) (jetstream.Stream, error) {
	for try := 1; ; try++ {
		stream, err := js.CreateStream(ctx, sc)
		var refused *jetstream.APIError
		if try == 3 || !errors.As(err, &refused) || refused.ErrorCode != errCodeStore {
			return stream, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// declare returns base with everything set that the protocols rest on.
func (c Config) declare(base jetstream.StreamConfig) jetstream.StreamConfig {
	s := base
	s.Name = c.Stream
	s.Description = "Tidings events; published by the relay only"
	s.Subjects = []string{c.subjects()}
	s.Storage = jetstream.FileStorage
	s.Retention = jetstream.LimitsPolicy // readers come and go, and replay
	s.Discard = jetstream.DiscardNew     // full means refused: the outbox keeps what the stream cannot
	s.MaxAge = c.MaxAge
	s.MaxBytes = c.MaxBytes
	s.MaxMsgs = -1           // a limit by count would refuse or drop what age does not
	s.MaxMsgsPerSubject = -1 // would punch holes into a partition
	s.Replicas = c.Replicas
	s.Duplicates = duplicateWindow
	s.AllowAtomicPublish = true
	s.AllowDirect = true
	s.AllowRollup = false // a rollup purges
	s.NoAck = false
	// Plain subscribers get what is stored; Prefix.> itself also carries publishes that were refused.
	s.RePublish = &jetstream.RePublish{Source: c.Prefix + ".>", Destination: c.LivePrefix + ".>"}
	// DenyDelete stays off, because erasure deletes messages. DenyPurge stays off, because neither can ever be taken back and
	// a purge is the operator's only quick remedy against a full store; the tail check finds out about one.
	return s
}

// mismatch says what of have cannot become ours: the server refuses to change it, or changing it would lose events.
func (c Config) mismatch(have jetstream.StreamConfig) []string {
	var why []string
	add := func(format string, args ...any) { why = append(why, fmt.Sprintf(format, args...)) }
	if !slices.Equal(have.Subjects, []string{c.subjects()}) {
		add("its subjects are %q, not %q", have.Subjects, []string{c.subjects()})
	}
	if have.Storage != jetstream.FileStorage {
		add("its storage is %s, not file", have.Storage)
	}
	if have.Retention != jetstream.LimitsPolicy {
		add("its retention is %s, not limits", have.Retention)
	}
	if have.Mirror != nil || len(have.Sources) > 0 || have.SubjectTransform != nil {
		add("it mirrors, sources or transforms messages")
	}
	if have.Sealed {
		add("it is sealed")
	}
	if have.DenyDelete {
		add("it denies deletes, so nothing could be erased from it")
	}
	if have.AllowMsgCounter || have.AllowMsgSchedules {
		add("it holds counters or schedules")
	}
	if have.PersistMode == jetstream.AsyncPersistMode {
		add("it answers before it has stored a message")
	}
	if have.Metadata[MetaGeneration] == "" {
		add("its metadata has no %s, so it was not made for these events", MetaGeneration)
	}
	if p := have.Metadata[MetaPartitions]; p != partitions {
		add("its metadata says %q partitions, not %s", p, partitions)
	}
	return why
}

// equal compares what declare sets.
func equal(a, b jetstream.StreamConfig) bool {
	return a.Description == b.Description && a.Discard == b.Discard && a.MaxAge == b.MaxAge && a.MaxBytes == b.MaxBytes && a.MaxMsgs == b.MaxMsgs &&
		a.MaxMsgsPerSubject == b.MaxMsgsPerSubject && a.Replicas == b.Replicas && a.Duplicates == b.Duplicates &&
		a.AllowAtomicPublish == b.AllowAtomicPublish && a.AllowDirect == b.AllowDirect && a.AllowRollup == b.AllowRollup && a.NoAck == b.NoAck &&
		a.RePublish != nil && *a.RePublish == *b.RePublish && maps.Equal(a.Metadata, b.Metadata)
}
