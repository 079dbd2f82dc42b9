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

// EnsureStream declares the stream of cfg and returns it. One that exists is brought up to date where that loses nothing, and
// keeps its generation and any limits that cfg does not name; one of another shape is refused with ErrStreamShape. Several
// processes may call it at once.
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
	want := cfg.declare(have)
	if equal(have, want) {
		return stream, nil
	}
	if stream, err = js.UpdateStream(ctx, want); err != nil {
		return nil, fmt.Errorf("update stream %s: %w", cfg.Stream, err)
	}
	return stream, nil
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
