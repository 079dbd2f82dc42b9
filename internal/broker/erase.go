package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
)

// erasedBlock is how many sequences one key of the record of erasures covers, a bit each.
const erasedBlock = 8192

// erasedBucket is the key-value bucket that records erasures. A reader that meets a gap in a stream looks the missing sequences up
// there: what is not recorded is lost, and the reader stops.
func (c Config) erasedBucket() string { return c.Stream + "-erased" }

func erasedKey(stream string, block uint64) string { return fmt.Sprintf("%s.%d", stream, block) }

// RecordErased notes, before they are deleted, that messages of a stream are erased on purpose. Several processes may call it at
// once, and again.
func RecordErased(ctx context.Context, js jetstream.JetStream, cfg Config, stream string, seqs []uint64) error {
	if len(seqs) == 0 {
		return nil
	}
	kv, err := declareErased(ctx, js, cfg)
	if err != nil {
		return fmt.Errorf("declare the record of erasures: %w", unanswered(js, err))
	}
	blocks := make(map[uint64][]uint64)
	for _, seq := range seqs {
		blocks[seq/erasedBlock] = append(blocks[seq/erasedBlock], seq%erasedBlock)
	}
	for block, bits := range blocks {
		if err := setBits(ctx, js, kv, erasedKey(stream, block), bits); err != nil {
			return fmt.Errorf("record %d erasures of stream %s: %w", len(bits), stream, err)
		}
	}
	return nil
}

// declareErased makes the record's bucket, or gives the one that exists more replicas. Like a stream it never gets fewer, and stays where it is.
func declareErased(ctx context.Context, js jetstream.JetStream, cfg Config) (jetstream.KeyValue, error) {
	want := jetstream.KeyValueConfig{
		Bucket: cfg.erasedBucket(), Description: "Tidings: sequences that were erased from its streams", Storage: jetstream.FileStorage, Replicas: cfg.Replicas, Placement: Placement(cfg.Tags),
	}
	kv, err := js.KeyValue(ctx, want.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		if kv, err = js.CreateKeyValue(ctx, want); errors.Is(err, jetstream.ErrBucketExists) {
			kv, err = js.KeyValue(ctx, want.Bucket) // another process was faster
		}
	}
	if err != nil {
		return nil, err
	}
	status, err := kv.Status(ctx)
	if err != nil {
		return nil, err
	}
	if have, ok := status.(*jetstream.KeyValueBucketStatus); ok && have.StreamInfo().Config.Replicas < want.Replicas {
		want.Placement = have.StreamInfo().Config.Placement
		return js.UpdateKeyValue(ctx, want)
	}
	return kv, nil
}

// placeErased gives the record, if there is one, so many replicas as the streams have now, also fewer than it has, and their placement.
func (l Limits) placeErased(ctx context.Context, js jetstream.JetStream, cfg Config) error {
	if l.Replicas == nil && l.Tags == nil {
		return nil
	}
	stream, err := js.Stream(ctx, "KV_"+cfg.erasedBucket())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err == nil {
		sc := stream.CachedInfo().Config
		sc.Replicas, sc.Placement = l.over(cfg, sc).Replicas, l.placement(sc)
		_, err = js.UpdateStream(ctx, sc)
	}
	if err != nil {
		return fmt.Errorf("configure the record of erasures: %w", unanswered(js, err))
	}
	return nil
}

// setBits sets bits of a key's value by compare and swap: when somebody else recorded at the same moment it looks again.
func setBits(ctx context.Context, js jetstream.JetStream, kv jetstream.KeyValue, key string, bits []uint64) error {
	for {
		value, revision := make([]byte, erasedBlock/8), uint64(0)
		entry, err := get(ctx, js, "KV_"+kv.Bucket(), map[string]any{"last_by_subj": "$KV." + kv.Bucket() + "." + key})
		if err != nil {
			return err
		}
		if entry != nil {
			copy(value, entry.Data)
			revision = entry.Seq
		}
		for _, b := range bits {
			value[b/8] |= 1 << (b % 8)
		}
		if revision == 0 {
			_, err = kv.Create(ctx, key, value)
		} else {
			_, err = kv.Update(ctx, key, value, revision)
		}
		if err == nil || !conflict(err) || ctx.Err() != nil {
			return err
		}
	}
}

// conflict reports that somebody else wrote the key first. A replicated stream has a code of its own for that, which Create does not map.
func conflict(err error) bool {
	refused, is := errors.AsType[*jetstream.APIError](err)
	return errors.Is(err, jetstream.ErrKeyExists) || errors.Is(err, jetstream.ErrKeyRevisionMismatch) ||
		is && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant
}

// Erased reports whether all sequences of a stream from first to last are recorded as erased, as the record's leader has it.
func Erased(ctx context.Context, js jetstream.JetStream, cfg Config, stream string, first, last uint64) (bool, error) {
	var value []byte
	for seq := first; seq <= last; seq++ {
		if seq == first || seq%erasedBlock == 0 {
			var err error
			if value, err = readErased(ctx, js, cfg, stream, seq/erasedBlock); value == nil {
				return false, err
			}
		}
		if bit := seq % erasedBlock; value[bit/8]&(1<<(bit%8)) == 0 {
			return false, nil
		}
	}
	return true, nil
}

// NotErased returns which of these sequences of a stream, in rising order, are not recorded as erased.
func NotErased(ctx context.Context, js jetstream.JetStream, cfg Config, stream string, seqs []uint64) (lost []uint64, err error) {
	var value []byte
	for i, seq := range seqs {
		if i == 0 || seq/erasedBlock != seqs[i-1]/erasedBlock {
			if value, err = readErased(ctx, js, cfg, stream, seq/erasedBlock); err != nil {
				return nil, err
			}
		}
		if bit := seq % erasedBlock; value == nil || value[bit/8]&(1<<(bit%8)) == 0 {
			lost = append(lost, seq)
		}
	}
	return lost, nil
}

// readErased reads a block of the record, from its leader; nil when nothing of it is recorded.
func readErased(ctx context.Context, js jetstream.JetStream, cfg Config, stream string, block uint64) ([]byte, error) {
	m, err := get(ctx, js, "KV_"+cfg.erasedBucket(), map[string]any{"last_by_subj": "$KV." + cfg.erasedBucket() + "." + erasedKey(stream, block)})
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("look up what was erased of stream %s: %w", stream, err)
	}
	if m == nil || len(m.Data) != erasedBlock/8 {
		return nil, nil
	}
	return m.Data, nil
}

// Doomed is a message to erase, by its sequence and its event id: a sequence alone may name another message of another stream.
type Doomed struct {
	Seq     uint64
	EventID string
}

// Erase takes messages off a stream and has the server overwrite them in its files, after it has recorded them (RecordErased). Messages
// that are not there, or are others, are left alone. It returns how many it erased. A server that encrypts its store does not overwrite.
// Cost: the server writes a message's file of up to 8 MiB anew for each.
func Erase(ctx context.Context, js jetstream.JetStream, cfg Config, name string, messages []Doomed) (n int, err error) {
	if len(messages) == 0 {
		return 0, nil
	}
	stream, err := js.Stream(ctx, name)
	if err != nil {
		return 0, fmt.Errorf("look up stream %s: %w", name, err)
	}
	var doomed []uint64
	for _, m := range messages {
		got, err := Next(ctx, js, name, m.Seq)
		if err != nil {
			return 0, err
		}
		if got != nil && got.Seq == m.Seq && got.Header.Get(event.HeaderID) == m.EventID {
			doomed = append(doomed, m.Seq)
		}
	}
	if err := RecordErased(ctx, js, cfg, name, doomed); err != nil { // before: afterwards nobody could tell
		return 0, err
	}
	for _, seq := range doomed {
		if err := stream.SecureDeleteMsg(ctx, seq); err != nil {
			if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				if got, gone := Next(ctx, js, name, seq); gone == nil && (got == nil || got.Seq != seq) {
					continue // it has expired meanwhile
				}
			}
			return n, fmt.Errorf("erase message %d of stream %s: %w", seq, name, err)
		}
		n++
	}
	return n, nil
}

// ErasedPerson is somebody whose erasure was asked for, as the record has it: only that, so that a truth that a restore took back to before it learns of it.
type ErasedPerson struct {
	TenantID  int64     `json:"tenant_id,string"`
	PersonID  int64     `json:"person_id,string"`
	Requested time.Time `json:"requested_at"`
}

// personKeys are the keys of persons in the record, under its subjects.
const personKeys = "person."

// RecordErasure notes that a person's erasure is asked for.
func RecordErasure(ctx context.Context, js jetstream.JetStream, cfg Config, p ErasedPerson) error {
	kv, err := declareErased(ctx, js, cfg)
	var value []byte
	if err == nil {
		value, err = json.Marshal(p)
	}
	if err == nil {
		_, err = kv.Put(ctx, fmt.Sprintf("%s%d.%d", personKeys, p.TenantID, p.PersonID), value)
	}
	if err != nil {
		return fmt.Errorf("record the erasure of person %d of tenant %d: %w", p.PersonID, p.TenantID, unanswered(js, err))
	}
	return nil
}

// ErasedPersons returns those in the record, in the order of their last requests.
func ErasedPersons(ctx context.Context, js jetstream.JetStream, cfg Config) (all []ErasedPerson, err error) {
	for seq := uint64(1); ; {
		m, err := get(ctx, js, "KV_"+cfg.erasedBucket(), map[string]any{"seq": seq, "next_by_subj": "$KV." + cfg.erasedBucket() + "." + personKeys + ">"})
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, fmt.Errorf("read which persons are erased: %w", err)
		}
		if m == nil {
			return all, nil
		}
		var p ErasedPerson
		if err := json.Unmarshal(m.Data, &p); err != nil {
			return nil, fmt.Errorf("read which persons are erased, %s: %w", m.Subject, err)
		}
		all, seq = append(all, p), m.Seq+1
	}
}
