package broker

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"
)

// DeclareBootstraps creates the key-value bucket that records the exports of subscribers, with the
// replicas and the placement of a partition's stream. A key is the name of the durable consumers.
func DeclareBootstraps(ctx context.Context, js jetstream.JetStream, cfg Config, events Stream) (jetstream.KeyValue, error) {
	bucket := cfg.Stream + "-bootstrap"
	kv, err := js.KeyValue(ctx, bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket: bucket, Description: "Tidings: how far subscribers have read exports", Storage: jetstream.FileStorage,
			Replicas: max(events.Replicas, 1), Placement: Placement(events.Tags),
		})
		if errors.Is(err, jetstream.ErrBucketExists) {
			kv, err = js.KeyValue(ctx, bucket) // another process was faster
		}
	}
	if err != nil {
		return nil, fmt.Errorf("declare the record of exports, %s: %w", bucket, unanswered(js, err))
	}
	return kv, nil
}
