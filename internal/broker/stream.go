package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
)

// Metadata keys of a partition's stream. Readers learn from them which slots it holds and which partitions came before it.
const (
	MetaSlots = "slots" // "0-31"
	MetaAfter = "after" // numbers of the partitions whose slots it took over, separated by blanks
	// MetaRepaired is there when the partition replaces one whose stream was lost: what the database still had of that is published again.
	MetaRepaired = "repaired"
)

// duplicateWindow is the server's minimum. Publishes are guarded by the stream's last sequence; a longer window costs memory for
// each message in it and protects from nothing more.
const duplicateWindow = 100 * time.Millisecond

var (
	// ErrStreamShape reports a stream of a partition's name that is not the events' and cannot become it. Give the streams
	// another name (NATS_STREAM), or remove the one that is in the way.
	ErrStreamShape = errors.New("broker: the stream has another shape")
	// ErrNoLeader reports a stream of which no leader with a quorum of its replicas is known now. Nothing that a replica says of
	// the stream then counts. Wait: an election takes seconds.
	ErrNoLeader = errors.New("broker: the stream waits for a leader")
)

// Partition says what one partition's stream is for.
type Partition struct {
	Number              int
	FirstSlot, LastSlot int   // the slots that it holds
	After               []int // the partitions whose slots it took over: their events come before its own
}

// Overlaps reports whether the two hold a slot in common.
func (p Partition) Overlaps(o Partition) bool {
	return p.FirstSlot <= o.LastSlot && o.FirstSlot <= p.LastSlot
}

// Stream is a partition's stream, as its leader described it.
type Stream struct {
	Partition
	Name        string
	Created     time.Time // to the microsecond
	First, Last uint64    // sequences; Last counts messages that were deleted since
	Messages    uint64
	Bytes       uint64    // that the messages take
	MaxBytes    int64     // that they may take; 0 is no limit of the stream's own
	Repaired    bool      // it came after a stream that was lost, so that not everything may be on the two
	MaxMessage  int       // bytes; 0 is no limit of the stream's own
	At          time.Time // when the leader said so, by its clock
	Leader      string    // name of the leading server; empty on one that is no cluster
	Tags        []string  // that the servers of its replicas have
	Replicas    int
	Current     int // of these, the leader included, how many have all that the leader has
}

// StreamName is the name of a partition's stream.
func (c Config) StreamName(partition int) string { return c.Stream + "-" + strconv.Itoa(partition) }

// Number reads a partition from its stream's name, if it is one's.
func (c Config) Number(name string) (int, bool) {
	rest, ok := strings.CutPrefix(name, c.Stream+"-")
	n, err := strconv.Atoi(rest)
	return n, ok && err == nil && n >= 0 && strconv.Itoa(n) == rest
}

// ReadStream returns what the leader says of a partition's stream: jetstream.ErrStreamNotFound when there is none, ErrNoLeader
// while nobody can say. What it says of a loss is to be taken with Doubt.
func ReadStream(ctx context.Context, js jetstream.JetStream, cfg Config, partition int) (Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	stream, err := js.Stream(ctx, cfg.StreamName(partition))
	if err != nil {
		return Stream{}, fmt.Errorf("look up stream %s: %w", cfg.StreamName(partition), unanswered(js, err))
	}
	return describe(cfg, stream.CachedInfo())
}

// maxReads bounds how many streams are asked about at once.
const maxReads = 8

// Streams returns the streams of all partitions by number, closed ones included as long as the broker has them. An error is about
// those that are left out (ErrNoLeader), or about all.
func Streams(ctx context.Context, js jetstream.JetStream, cfg Config) ([]Stream, error) {
	var mu sync.Mutex
	var all []Stream
	var errs []error
	var g errgroup.Group
	g.SetLimit(maxReads)
	names := js.StreamNames(ctx, jetstream.WithStreamListSubject(cfg.Prefix+".>"))
	for name := range names.Name() {
		n, ok := cfg.Number(name)
		if !ok {
			continue
		}
		g.Go(func() error {
			s, err := ReadStream(ctx, js, cfg, n)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				all = append(all, s)
			case !errors.Is(err, jetstream.ErrStreamNotFound): // else it was deleted meanwhile
				errs = append(errs, err)
			}
			return nil
		})
	}
	_ = g.Wait() // nobody returns one
	if err := names.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, fmt.Errorf("list the streams of %s.>: %w", cfg.Prefix, unanswered(js, err))
	}
	slices.SortFunc(all, func(a, b Stream) int { return a.Number - b.Number })
	return all, errors.Join(errs...)
}

// maxSilence is how long a replica may not have been heard by the leader and still count for its quorum. Replicas answer every second.
const maxSilence = 4 * time.Second

// unanswered makes an ErrNoLeader of an error that says that nobody could answer a request: the servers have no leader for it, or none
// answered over a connection that works.
func unanswered(js jetstream.JetStream, err error) error {
	refused, is := errors.AsType[*jetstream.APIError](err)
	if is && refused.Code == http.StatusServiceUnavailable || errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrNoStreamResponse) ||
		(errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout)) && js.Conn().IsConnected() {
		return fmt.Errorf("%w: %w", ErrNoLeader, err)
	}
	return err
}

// IsTransient reports an error that says nothing about a stream: no leader, no connection, no answer in time. The same request may succeed
// later.
func IsTransient(err error) bool {
	refused, is := errors.AsType[*jetstream.APIError](err)
	return is && refused.Code == http.StatusServiceUnavailable || slices.ContainsFunc([]error{
		ErrNoLeader, nats.ErrTimeout, nats.ErrNoResponders, nats.ErrDisconnected, nats.ErrConnectionClosed, nats.ErrConnectionReconnecting,
		nats.ErrReconnectBufExceeded, jetstream.ErrNoStreamResponse, jetstream.ErrNoHeartbeat, context.DeadlineExceeded,
	}, func(known error) bool { return errors.Is(err, known) })
}

// describe reads a stream's info, unless no leader with a quorum stands behind it.
func describe(cfg Config, info *jetstream.StreamInfo) (Stream, error) {
	c := info.Config
	s := Stream{Name: c.Name, Created: info.Created.UTC().Truncate(time.Microsecond), First: info.State.FirstSeq, Last: info.State.LastSeq,
		Messages: info.State.Msgs, Bytes: info.State.Bytes, MaxBytes: max(c.MaxBytes, 0), MaxMessage: max(int(c.MaxMsgSize), 0), At: info.TimeStamp, Tags: tagsOf(c), Replicas: c.Replicas, Current: 1}
	if cluster := info.Cluster; cluster != nil && cluster.Name != "" {
		s.Leader = cluster.Leader
		heard := 1
		for _, r := range cluster.Replicas {
			if !r.Offline && r.Active < maxSilence {
				heard++
			}
			if !r.Offline && r.Current {
				s.Current++
			}
		}
		if s.Leader == "" || 2*heard <= len(cluster.Replicas)+1 {
			return Stream{}, fmt.Errorf("%w: %s (leader %q)", ErrNoLeader, c.Name, s.Leader)
		}
	}
	n, ok := cfg.Number(c.Name)
	if !ok {
		return Stream{}, fmt.Errorf("%w: its name is %q", ErrStreamShape, c.Name)
	}
	s.Number = n
	s.Repaired = c.Metadata[MetaRepaired] != ""
	if _, err := fmt.Sscanf(c.Metadata[MetaSlots], "%d-%d", &s.FirstSlot, &s.LastSlot); err != nil {
		return Stream{}, fmt.Errorf("%w: the metadata of %s has no %s, so it was not made for these events", ErrStreamShape, c.Name, MetaSlots)
	}
	for _, f := range strings.Fields(c.Metadata[MetaAfter]) {
		before, err := strconv.Atoi(f)
		if err != nil {
			return Stream{}, fmt.Errorf("%w: %s in the metadata of %s is %.80q", ErrStreamShape, MetaAfter, c.Name, c.Metadata[MetaAfter])
		}
		s.After = append(s.After, before)
	}
	return s, nil
}

func tagsOf(c jetstream.StreamConfig) []string {
	if c.Placement == nil {
		return nil
	}
	return c.Placement.Tags
}

// Stored is a message as the stream's leader has it.
type Stored struct {
	Seq     uint64
	Subject string
	Header  nats.Header
	Data    []byte
	Time    time.Time // when it was stored, by the server's clock
}

// getTimeout bounds one request for a message. A stream without a leader does not answer at all.
const getTimeout = 5 * time.Second

// Next returns the stream's first message at seq or above, from its leader, or nil when there is none: ErrNoLeader while there is no
// leader. A direct get could be answered by a replica that has not heard of the message yet.
func Next(ctx context.Context, js jetstream.JetStream, stream string, seq uint64) (*Stored, error) {
	return get(ctx, js, stream, map[string]any{"seq": max(seq, 1), "next_by_subj": ">"})
}

// EventAt returns the id of the event that the stream has at seq, from its leader; "" where it has none: the message is gone, ends the stream, or no
// relay wrote it.
func EventAt(ctx context.Context, js jetstream.JetStream, stream string, seq uint64) (id string, err error) {
	m, err := Next(ctx, js, stream, seq)
	if err != nil || m == nil || m.Seq != seq || !event.Ours(m.Header) {
		return "", err
	}
	return m.Header.Get(event.HeaderID), nil
}

// Last returns the stream's last message of a subject filter, from its leader, or nil when there is none.
func Last(ctx context.Context, js jetstream.JetStream, stream, filter string) (*Stored, error) {
	return get(ctx, js, stream, map[string]any{"last_by_subj": filter})
}

// Closed reports whether the stream ends with a closing message, by its leader.
func Closed(ctx context.Context, js jetstream.JetStream, s Stream) (bool, error) {
	if s.Last == 0 {
		return false, nil
	}
	m, err := Next(ctx, js, s.Name, s.Last)
	return m != nil && event.Closes(m.Subject, m.Header), err
}

// get asks a stream's leader for one message; nil when there is none.
func get(ctx context.Context, js jetstream.JetStream, stream string, query map[string]any) (*Stored, error) {
	request, err := json.Marshal(query)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, getTimeout)
	defer cancel()
	m, err := js.Conn().RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+stream, request)
	if err != nil {
		return nil, fmt.Errorf("read a message of stream %s: %w", stream, unanswered(js, err))
	}
	var answer struct {
		Message *struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		return nil, fmt.Errorf("read a message of stream %s: %w", stream, err)
	}
	switch e := answer.Error; {
	case e != nil && e.ErrorCode == jetstream.JSErrCodeStreamNotFound:
		return nil, fmt.Errorf("read a message of stream %s: %w", stream, jetstream.ErrStreamNotFound)
	case e != nil && e.Code == http.StatusNotFound:
		return nil, nil
	case e != nil:
		return nil, fmt.Errorf("read a message of stream %s: %w", stream, unanswered(js, e))
	case answer.Message == nil:
		return nil, fmt.Errorf("read a message of stream %s: an answer without a message", stream)
	}
	got := &Stored{Seq: answer.Message.Seq, Subject: answer.Message.Subject, Data: answer.Message.Data, Time: answer.Message.Time}
	if len(answer.Message.Header) > 0 {
		if got.Header, err = nats.DecodeHeadersMsg(answer.Message.Header); err != nil {
			return nil, fmt.Errorf("read the headers of message %d of stream %s: %w", got.Seq, stream, err)
		}
	}
	return got, nil
}

// Declare makes a partition's stream, or brings the one that exists up to date where that loses nothing: it keeps its slots,
// any replicas, age or size beyond what cfg says (a process with another environment never shrinks it; Configure does), and its placement,
// for another one copies the whole stream (Configure moves it). One of another shape
// is refused with ErrStreamShape. Several processes may call it at once.
func Declare(ctx context.Context, js jetstream.JetStream, cfg Config, p Partition, log *slog.Logger) (Stream, error) {
	if err := cfg.Validate(); err != nil {
		return Stream{}, err
	}
	name := cfg.StreamName(p.Number)
	stream, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		stream, err = create(ctx, js, cfg.declare(jetstream.StreamConfig{Metadata: p.metadata(), Placement: Placement(cfg.Tags)}, p.Number))
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			stream, err = js.Stream(ctx, name) // another process was faster, with other settings
		}
	}
	if err != nil {
		return Stream{}, fmt.Errorf("declare stream %s: %w", name, unanswered(js, err))
	}
	have := stream.CachedInfo().Config
	if reasons := cfg.mismatch(have, p); len(reasons) > 0 {
		return Stream{}, fmt.Errorf("%w: %s: %s", ErrStreamShape, name, strings.Join(reasons, "; "))
	}
	var kept []string
	stream, err = change(ctx, js, stream, func(have jetstream.StreamConfig) jetstream.StreamConfig {
		want := cfg.declare(have, p.Number)
		kept = grow(&want, have)
		return want
	})
	if err != nil {
		return Stream{}, err
	}
	for _, limit := range kept {
		log.InfoContext(ctx, "the stream keeps a larger limit than this process is configured with; `tidings stream configure` lowers it", "stream", name, "limit", limit)
	}
	if s := stream.CachedInfo().Config; len(cfg.Tags) > 0 && !SameTags(cfg.Tags, tagsOf(s)) {
		log.InfoContext(ctx, "the stream keeps other placement tags than this process is configured with; `tidings stream configure` moves it", "stream", name, "tags", tagsOf(s))
	}
	return describe(cfg, stream.CachedInfo())
}

// Inspect compares a partition's stream with what Declare would make of it: refused is why Declare would not take it, and reset whether Declare would
// set limits again that somebody has changed. It changes nothing.
func Inspect(ctx context.Context, js jetstream.JetStream, cfg Config, p Partition) (refused []string, reset bool, err error) {
	stream, err := js.Stream(ctx, cfg.StreamName(p.Number))
	if err != nil {
		return nil, false, fmt.Errorf("look up stream %s: %w", cfg.StreamName(p.Number), unanswered(js, err))
	}
	have := stream.CachedInfo().Config
	want := cfg.declare(have, p.Number)
	grow(&want, have)
	return cfg.mismatch(have, p), !equal(want, have), nil
}

// change updates a stream by what f makes of its configuration, which is read just before, so that everything that f does not touch, such
// as an operator's metadata, stays. JetStream has no conditional update: of two that overlap one may be lost. So it reads again whether
// its own took, up to some times.
func change(ctx context.Context, js jetstream.JetStream, stream jetstream.Stream, f func(jetstream.StreamConfig) jetstream.StreamConfig) (jetstream.Stream, error) {
	name := stream.CachedInfo().Config.Name
	for range 5 {
		info, err := stream.Info(ctx)
		if err != nil {
			return nil, fmt.Errorf("look up stream %s: %w", name, unanswered(js, err))
		}
		have := info.Config
		have.Metadata = maps.Clone(have.Metadata)
		want := f(have)
		if equal(info.Config, want) {
			return stream, nil
		}
		if _, err = js.UpdateStream(ctx, want); err != nil {
			return nil, fmt.Errorf("update stream %s: %w", name, unanswered(js, err))
		}
	}
	return nil, fmt.Errorf("update stream %s: other processes change it all the time", name)
}

// Limits are what Configure sets. nil leaves a value as it is.
type Limits struct {
	Replicas *int
	Tags     *[]string      // of the servers to move it to; of none, it stays where it is, and later replicas go anywhere. Not together with Replicas
	MaxAge   *time.Duration // 0 for ever
	MaxBytes *int64         // of each stream; -1 for no limit
}

// Configured are the limits that a stream has.
type Configured struct {
	Stream   string        `json:"stream"`
	Replicas int           `json:"replicas"`
	Tags     []string      `json:"placement_tags,omitempty"`
	MaxAge   time.Duration `json:"max_age_ns"`
	MaxBytes int64         `json:"max_bytes"`
}

// Configure sets the limits of all partitions' streams, also to less than they have: copies are dropped, and messages beyond the age
// expire. The record of erasures gets as many replicas, and the same placement. A relay whose environment asks for more grows a stream again
// when it next declares it. Servers copy a stream that moves in the background, and it is published and read meanwhile. After an error some
// streams may be changed: repeat it.
func Configure(ctx context.Context, js jetstream.JetStream, cfg Config, l Limits) (all []Configured, err error) {
	streams, err := Streams(ctx, js, cfg)
	if err != nil {
		return nil, err
	}
	for _, s := range streams {
		stream, err := js.Stream(ctx, s.Name)
		if err != nil {
			return all, fmt.Errorf("look up stream %s: %w", s.Name, unanswered(js, err))
		}
		if err := l.over(cfg, stream.CachedInfo().Config).Validate(); err != nil {
			return all, err
		}
		stream, err = change(ctx, js, stream, func(have jetstream.StreamConfig) jetstream.StreamConfig {
			c := l.over(cfg, have)
			have.Replicas, have.Placement, have.MaxAge, have.MaxBytes = c.Replicas, l.placement(have), c.MaxAge, c.MaxBytes
			return have
		})
		if err != nil {
			return all, err
		}
		now := stream.CachedInfo().Config
		all = append(all, Configured{Stream: now.Name, Replicas: now.Replicas, Tags: tagsOf(now), MaxAge: now.MaxAge, MaxBytes: now.MaxBytes})
	}
	return all, l.placeErased(ctx, js, cfg)
}

// Shrinks says what Configure would give streams less of than they have. It changes nothing.
func Shrinks(ctx context.Context, js jetstream.JetStream, cfg Config, l Limits) (all []string, err error) {
	streams, err := Streams(ctx, js, cfg)
	if err != nil {
		return nil, err
	}
	for _, s := range streams {
		stream, err := js.Stream(ctx, s.Name)
		if err != nil {
			return nil, fmt.Errorf("look up stream %s: %w", s.Name, unanswered(js, err))
		}
		have := stream.CachedInfo()
		want, held := l.over(cfg, have.Config), fmt.Sprintf("it holds %d messages, %d bytes", have.State.Msgs, have.State.Bytes)
		if want.Replicas < have.Config.Replicas {
			all = append(all, fmt.Sprintf("Stream %s: %d replicas instead of %d.", s.Name, want.Replicas, have.Config.Replicas))
		}
		if want.MaxAge > 0 && (have.Config.MaxAge == 0 || want.MaxAge < have.Config.MaxAge) {
			all = append(all, fmt.Sprintf("Stream %s: events stay for %s instead of %s (0s: for ever); %s.", s.Name, want.MaxAge, have.Config.MaxAge, held))
		}
		if want.MaxBytes > 0 && (have.Config.MaxBytes <= 0 || want.MaxBytes < have.Config.MaxBytes) {
			all = append(all, fmt.Sprintf("Stream %s: %d bytes at most instead of %d (-1: no limit); %s.", s.Name, want.MaxBytes, have.Config.MaxBytes, held))
		}
	}
	return all, nil
}

// over is c with the limits of have, and those of l over them.
func (l Limits) over(c Config, have jetstream.StreamConfig) Config {
	c.Replicas, c.Tags, c.MaxAge, c.MaxBytes = have.Replicas, tagsOf(have), have.MaxAge, have.MaxBytes
	if l.Replicas != nil {
		c.Replicas = *l.Replicas
	}
	if l.Tags != nil {
		c.Tags = *l.Tags
	}
	if l.MaxAge != nil {
		c.MaxAge = *l.MaxAge
	}
	if l.MaxBytes != nil {
		c.MaxBytes = *l.MaxBytes
	}
	return c
}

// placement is have's, or that of the tags of l.
func (l Limits) placement(have jetstream.StreamConfig) *jetstream.Placement {
	if l.Tags == nil {
		return have.Placement
	}
	return Placement(*l.Tags)
}

// grow keeps what have has more of, and names it.
func grow(want *jetstream.StreamConfig, have jetstream.StreamConfig) (kept []string) {
	if have.Replicas > want.Replicas {
		kept = append(kept, fmt.Sprintf("replicas: %d, NATS_REPLICAS is %d", have.Replicas, want.Replicas))
		want.Replicas = have.Replicas
	}
	if want.MaxAge > 0 && (have.MaxAge == 0 || have.MaxAge > want.MaxAge) {
		kept = append(kept, fmt.Sprintf("age: %s, NATS_MAX_AGE is %s", have.MaxAge, want.MaxAge))
		want.MaxAge = have.MaxAge
	}
	if want.MaxBytes > 0 && (have.MaxBytes <= 0 || have.MaxBytes > want.MaxBytes) {
		kept = append(kept, fmt.Sprintf("bytes: %d, NATS_MAX_BYTES is %d", have.MaxBytes, want.MaxBytes))
		want.MaxBytes = have.MaxBytes
	}
	return kept
}

// MarkRepaired notes on a partition's stream that it comes after one that was lost.
func MarkRepaired(ctx context.Context, js jetstream.JetStream, cfg Config, partition int) error {
	stream, err := js.Stream(ctx, cfg.StreamName(partition))
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", cfg.StreamName(partition), err)
	}
	_, err = change(ctx, js, stream, func(have jetstream.StreamConfig) jetstream.StreamConfig {
		if have.Metadata == nil {
			have.Metadata = make(map[string]string)
		}
		have.Metadata[MetaRepaired] = "true"
		return have
	})
	return err
}

func (p Partition) metadata() map[string]string {
	var after []string
	for _, n := range p.After {
		after = append(after, strconv.Itoa(n))
	}
	return map[string]string{MetaSlots: fmt.Sprintf("%d-%d", p.FirstSlot, p.LastSlot), MetaAfter: strings.Join(after, " ")}
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
func (c Config) declare(base jetstream.StreamConfig, partition int) jetstream.StreamConfig {
	s := base
	s.Name = c.StreamName(partition)
	s.Description = "Tidings events; published by the relay only"
	s.Subjects = []string{event.Subjects(c.Prefix, partition)}
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
	// Plain subscribers get the events that are stored, without the partition; Prefix.> itself also carries publishes that were refused.
	source, destination := event.LiveSubjects(c.Prefix, c.LivePrefix, partition)
	s.RePublish = &jetstream.RePublish{Source: source, Destination: destination}
	// DenyDelete stays off, because erasure deletes messages. DenyPurge stays off, because neither can ever be taken back and
	// a purge is the operator's only quick remedy against a full store; readers find out about one.
	return s
}

// mismatch says what of have cannot become ours: the server refuses to change it, or changing it would lose events.
func (c Config) mismatch(have jetstream.StreamConfig, p Partition) []string {
	var why []string
	add := func(format string, args ...any) { why = append(why, fmt.Sprintf(format, args...)) }
	if want := []string{event.Subjects(c.Prefix, p.Number)}; !slices.Equal(have.Subjects, want) {
		add("its subjects are %q, not %q", have.Subjects, want)
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
	for key, want := range p.metadata() {
		if got := have.Metadata[key]; got != want {
			add("its metadata says %s %q, not %q", key, got, want)
		}
	}
	return why
}

// equal compares what declare sets.
func equal(a, b jetstream.StreamConfig) bool {
	return a.Description == b.Description && a.Discard == b.Discard && a.MaxAge == b.MaxAge && a.MaxBytes == b.MaxBytes && a.MaxMsgs == b.MaxMsgs &&
		a.MaxMsgsPerSubject == b.MaxMsgsPerSubject && a.Replicas == b.Replicas && SameTags(tagsOf(a), tagsOf(b)) && a.Duplicates == b.Duplicates &&
		a.AllowAtomicPublish == b.AllowAtomicPublish && a.AllowDirect == b.AllowDirect && a.AllowRollup == b.AllowRollup && a.NoAck == b.NoAck &&
		a.RePublish != nil && *a.RePublish == *b.RePublish && maps.Equal(a.Metadata, b.Metadata)
}
