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

// erasedBlock is the number of sequences per key of the record of erasures, one bit each.
const erasedBlock = 8192

// erasedBucket returns the key-value bucket that records erasures. A reader that finds a gap in a
// stream searches the missing sequences there. A sequence without a record is lost, and the reader
// stops.
func (c Config) erasedBucket() string { return c.Stream + "-erased" }

func erasedKey(stream string, block uint64) string { return fmt.Sprintf("%s.%d", stream, block) }

// RecordErased records that messages of a stream are erased on purpose. Call it before you delete
// them. Several processes may call it at once, and repeatedly.
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

func (c Config) erasedConfig() jetstream.KeyValueConfig {
	return jetstream.KeyValueConfig{
		Bucket: c.erasedBucket(), Description: "Tidings: sequences that were erased from its streams", Storage: jetstream.FileStorage,
		Replicas: c.Replicas, Placement: Placement(c.Tags),
	}
}

// declareErased creates the record's bucket, or raises the replicas of an existing one. Like a
// stream, the bucket never gets fewer, and keeps its placement.
func declareErased(ctx context.Context, js jetstream.JetStream, cfg Config) (jetstream.KeyValue, error) {
	want := cfg.erasedConfig()
	kv, err := js.KeyValue(ctx, want.Bucket)
	if cfg.Unmanaged {
		if errors.Is(err, jetstream.ErrBucketNotFound) {
			err = missing("bucket " + want.Bucket)
		}
		return kv, err
	}
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

// placeErased gives the record of erasures, if it exists, the replicas and placement of the
// streams.
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
		sc.Replicas, sc.Placement = l.overriding(cfg, sc).Replicas, l.placement(sc)
		_, err = js.UpdateStream(ctx, sc)
	}
	if err != nil {
		return fmt.Errorf("configure the record of erasures: %w", unanswered(js, err))
	}
	return nil
}

// setBits sets bits of a key's value by compare and swap. If another process writes at the same
// moment, it reads again.
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
		if err == nil || !IsConflict(err) || ctx.Err() != nil {
			return err
		}
	}
}

// IsConflict reports that another process wrote the key first. A replicated stream has its own code
// for that, which Create does not map.
func IsConflict(err error) bool {
	refused, is := errors.AsType[*jetstream.APIError](err)
	return errors.Is(err, jetstream.ErrKeyExists) || errors.Is(err, jetstream.ErrKeyRevisionMismatch) ||
		is && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant
}

// Erased reports whether the record's leader has all sequences of a stream from first to last.
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

// NotErased returns the sequences of seqs that the record lacks. seqs must ascend.
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

// readErased reads a block of the record from its leader, or nil if the block has no record.
func readErased(ctx context.Context, js jetstream.JetStream, cfg Config, stream string, block uint64) ([]byte, error) {
	subject := "$KV." + cfg.erasedBucket() + "." + erasedKey(stream, block)
	m, err := get(ctx, js, "KV_"+cfg.erasedBucket(), map[string]any{"last_by_subj": subject})
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("read the erased sequences of stream %s: %w", stream, err)
	}
	if m == nil || len(m.Data) != erasedBlock/8 {
		return nil, nil
	}
	return m.Data, nil
}

// ToErase is a message to erase. Its event id is necessary: a sequence may name another message on
// a recreated stream.
type ToErase struct {
	Seq     uint64
	EventID string
}

// Erase records messages as erased (RecordErased), deletes them from a stream, and makes the server
// overwrite them in its files. It skips messages that do not exist or have another event id, and
// returns the number erased. A server that encrypts its store does not overwrite.
//
// Cost: the server rewrites a file of up to 8 MiB for each message.
func Erase(ctx context.Context, js jetstream.JetStream, cfg Config, name string, messages []ToErase) (n int, err error) {
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
	if err := RecordErased(ctx, js, cfg, name, doomed); err != nil { // first: after the deletion nothing proves the erasure
		return 0, err
	}
	for _, seq := range doomed {
		if err := stream.SecureDeleteMsg(ctx, seq); err != nil {
			if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				if got, gone := Next(ctx, js, name, seq); gone == nil && (got == nil || got.Seq != seq) {
					continue // expired meanwhile
				}
			}
			return n, fmt.Errorf("erase message %d of stream %s: %w", seq, name, err)
		}
		n++
	}
	return n, nil
}

// DeadLetters returns the name of the stream on which subscribers keep the events that they could
// not handle.
func DeadLetters(stream string) string { return stream + "-dead" }

// HeaderDeadSubject is the header of a dead letter with the subject on which its event was
// published.
const HeaderDeadSubject = "Tidings-Dead-Subject"

// EraseLetters deletes the dead letters of subscribers that doomed selects by the subject, headers
// and payload of their event, and makes the server overwrite them. With dryRun it changes nothing.
// It returns the number deleted, or to delete.
//
// Cost: a request per letter.
func EraseLetters(ctx context.Context, js jetstream.JetStream, cfg Config, dryRun bool,
	doomed func(subject string, headers map[string][]string, data []byte) (bool, error)) (n int, err error) {
	name := DeadLetters(cfg.Stream)
	stream, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look up stream %s: %w", name, unanswered(js, err))
	}
	for seq := uint64(1); ; seq++ {
		m, err := Next(ctx, js, name, seq)
		if err != nil || m == nil {
			return n, err
		}
		seq = m.Seq
		is, err := doomed(m.Header.Get(HeaderDeadSubject), m.Header, m.Data)
		if err != nil {
			return n, fmt.Errorf("dead letter %d of stream %s: %w", seq, name, err)
		}
		if is && !dryRun {
			if err := stream.SecureDeleteMsg(ctx, seq); err != nil && !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) &&
				!errors.Is(err, jetstream.ErrMsgNotFound) { // handled or discarded meanwhile
				return n, fmt.Errorf("erase dead letter %d of stream %s: %w", seq, name, err)
			}
		}
		if is {
			n++
		}
	}
}

// ErasedPerson is a person whose erasure was requested. The record has only this, so that a truth
// restored to an earlier time learns of the request.
type ErasedPerson struct {
	TenantID  int64     `json:"tenant_id,string"`
	PersonID  event.ID  `json:"person_id"`
	Requested time.Time `json:"requested_at"`
}

// personKeys is the prefix of the persons' keys in the record.
const personKeys = "person."

// personKey is the key of a person. NATS refuses some characters of ids in a key, and a dot
// separates: any but A-Z a-z 0-9 - _ is an equals sign and two hexadecimal digits.
func personKey(tenant int64, person event.ID) string {
	key := fmt.Appendf(nil, "%s%d.", personKeys, tenant)
	for _, c := range []byte(person) {
		if c == '.' || c == '=' || c == '~' || c == ':' || c == '@' || c == '|' || c == '+' {
			key = fmt.Appendf(key, "=%02X", c)
		} else {
			key = append(key, c)
		}
	}
	return string(key)
}

// RecordErasure records that a person's erasure was requested.
func RecordErasure(ctx context.Context, js jetstream.JetStream, cfg Config, p ErasedPerson) error {
	kv, err := declareErased(ctx, js, cfg)
	var value []byte
	if err == nil {
		value, err = json.Marshal(p)
	}
	if err == nil {
		_, err = kv.Put(ctx, personKey(p.TenantID, p.PersonID), value)
	}
	if err != nil {
		return fmt.Errorf("record the erasure of person %s of tenant %d: %w", p.PersonID, p.TenantID, unanswered(js, err))
	}
	return nil
}

// ErasedPersons returns the persons in the record, in the order of their last requests.
func ErasedPersons(ctx context.Context, js jetstream.JetStream, cfg Config) (all []ErasedPerson, err error) {
	for seq := uint64(1); ; {
		m, err := get(ctx, js, "KV_"+cfg.erasedBucket(), map[string]any{"seq": seq,
			"next_by_subj": "$KV." + cfg.erasedBucket() + "." + personKeys + ">"})
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, fmt.Errorf("read the erased persons: %w", err)
		}
		if m == nil {
			return all, nil
		}
		var p ErasedPerson
		if err := json.Unmarshal(m.Data, &p); err != nil {
			return nil, fmt.Errorf("read the erased persons, %s: %w", m.Subject, err)
		}
		all, seq = append(all, p), m.Seq+1
	}
}
