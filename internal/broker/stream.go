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
	"github.com/tidings/tidings/internal/work"
)

// Metadata keys of a partition's stream. They tell readers the stream's slots and predecessors.
const (
	MetaSlots = "slots" // "0-31"
	MetaAfter = "after" // numbers of the partitions whose slots it took over, separated by blanks
	// MetaRepaired marks a partition that replaced one whose stream was lost. It first has the
	// events that the database still had of the lost stream.
	MetaRepaired = "repaired"
)

// duplicateWindow is the server's minimum. The stream's last sequence guards publishes, so a longer
// window adds no protection. It costs memory for each message in it.
const duplicateWindow = 100 * time.Millisecond

var (
	// ErrStreamShape reports a stream with a partition's name that was not made for events and
	// cannot become theirs. Change the name of the streams (NATS_STREAM), or remove that stream.
	ErrStreamShape = errors.New("broker: the stream has another shape")
	// ErrNoLeader reports a stream without a leader that has a quorum of its replicas. A replica's
	// view of the stream then proves nothing. Wait: an election takes seconds.
	ErrNoLeader = errors.New("broker: the stream waits for a leader")
)

// Partition describes the purpose of one partition's stream.
type Partition struct {
	Number              int
	FirstSlot, LastSlot int   // the slots of the partition
	After               []int // the partitions whose slots it took over: their events come before its own
}

// Stream is a partition's stream as its leader describes it.
type Stream struct {
	Partition
	Name        string
	Created     time.Time // to the microsecond
	First, Last uint64    // sequences; Last may belong to a deleted message
	Messages    uint64
	Bytes       uint64    // size of the messages
	MaxBytes    int64     // limit of Bytes; 0 for no limit of the stream itself
	Repaired    bool      // the stream replaced a lost one, so the two may not have every event
	MaxMessage  int       // bytes; 0 for no limit of the stream itself
	At          time.Time // when the leader described it, by the leader's clock
	Leader      string    // name of the leading server; empty outside a cluster
	Tags        []string  // that the servers of its replicas must have
	Replicas    int
	Current     int // replicas, including the leader, that have everything that the leader has
}

// StreamName returns the name of a partition's stream.
func (c Config) StreamName(partition int) string { return c.Stream + "-" + strconv.Itoa(partition) }

// Number returns the partition of a stream by the stream's name. ok is false for other streams.
func (c Config) Number(name string) (int, bool) {
	rest, ok := strings.CutPrefix(name, c.Stream+"-")
	n, err := strconv.Atoi(rest)
	return n, ok && err == nil && n >= 0 && strconv.Itoa(n) == rest
}

// ReadStream returns the leader's description of a partition's stream. It returns
// jetstream.ErrStreamNotFound if the stream does not exist, and ErrNoLeader if no leader can
// answer. Apply Doubt or Confirm before you believe a loss.
func ReadStream(ctx context.Context, js jetstream.JetStream, cfg Config, partition int) (Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	stream, err := js.Stream(ctx, cfg.StreamName(partition))
	if err != nil {
		return Stream{}, fmt.Errorf("look up stream %s: %w", cfg.StreamName(partition), unanswered(js, err))
	}
	return describe(cfg, stream.CachedInfo())
}

// Deleted returns the sequences that a stream lacks between its first and its last, from the leader
// that described it.
func Deleted(ctx context.Context, js jetstream.JetStream, s Stream) ([]uint64, error) {
	stream, err := js.Stream(ctx, s.Name)
	var info *jetstream.StreamInfo
	if err == nil {
		info, err = stream.Info(ctx, jetstream.WithDeletedDetails(true))
	}
	if err != nil {
		return nil, fmt.Errorf("read the missing sequences of stream %s: %w", s.Name, unanswered(js, err))
	}
	if s.Leader != "" && (info.Cluster == nil || info.Cluster.Leader != s.Leader) {
		return nil, fmt.Errorf("read the missing sequences of stream %s: %w: it changed", s.Name, ErrNoLeader)
	}
	return info.State.Deleted, nil
}

// maxReads is the limit of concurrent requests about streams.
const maxReads = 8

// Streams returns the existing streams of all partitions by number, including closed ones. An error
// covers the streams that it omits (ErrNoLeader), or all.
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
			case !errors.Is(err, jetstream.ErrStreamNotFound): // otherwise deleted meanwhile
				errs = append(errs, err)
			}
			return nil
		})
	}
	_ = g.Wait() // the functions return no error
	if err := names.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, fmt.Errorf("list the streams of %s.>: %w", cfg.Prefix, unanswered(js, err))
	}
	slices.SortFunc(all, func(a, b Stream) int { return a.Number - b.Number })
	return all, errors.Join(errs...)
}

// maxSilence is how long a leader may not hear from a replica that still counts for its quorum.
// Replicas answer every second.
const maxSilence = 4 * time.Second

// unanswered turns an error into ErrNoLeader if no server could answer the request: the servers
// have no leader for it, or none answered over a working connection.
func unanswered(js jetstream.JetStream, err error) error {
	if IsLeaderless(err) || errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrNoStreamResponse) ||
		(errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout)) && js.Conn().IsConnected() {
		return fmt.Errorf("%w: %w", ErrNoLeader, err)
	}
	return err
}

// streamOffline is the server's error code for a stream of which all replicas are on servers that
// are down.
const streamOffline jetstream.ErrorCode = 10118

// IsLeaderless reports an answer of a server that the stream, or the whole of JetStream, has no
// leader.
func IsLeaderless(err error) bool {
	refused, is := errors.AsType[*jetstream.APIError](err)
	return is && (refused.Code == http.StatusServiceUnavailable || refused.ErrorCode == streamOffline)
}

// IsTransient reports an error that says nothing about a stream: no leader, no connection or no
// answer in time. The same request may succeed later.
func IsTransient(err error) bool {
	return IsLeaderless(err) || slices.ContainsFunc([]error{
		ErrNoLeader, nats.ErrTimeout, nats.ErrNoResponders, nats.ErrDisconnected, nats.ErrConnectionClosed, nats.ErrConnectionReconnecting,
		nats.ErrReconnectBufExceeded, jetstream.ErrNoStreamResponse, jetstream.ErrNoHeartbeat, context.DeadlineExceeded,
	}, func(known error) bool { return errors.Is(err, known) })
}

// describe returns a stream from its info, or ErrNoLeader if the leader has no quorum.
func describe(cfg Config, info *jetstream.StreamInfo) (Stream, error) {
	c := info.Config
	s := Stream{Name: c.Name, Created: info.Created.UTC().Truncate(time.Microsecond), First: info.State.FirstSeq, Last: info.State.LastSeq,
		Messages: info.State.Msgs, Bytes: info.State.Bytes, MaxBytes: max(c.MaxBytes, 0), MaxMessage: max(int(c.MaxMsgSize), 0),
		At: info.TimeStamp, Tags: tagsOf(c), Replicas: c.Replicas, Current: 1}
	if cluster := info.Cluster; cluster != nil && cluster.Name != "" {
		s.Leader = cluster.Leader
		heard := 1
		for _, r := range cluster.Replicas {
			if r.Name == s.Leader { // a leader does not list itself
				return Stream{}, fmt.Errorf("%w: a replica of %s answered in place of %s", ErrNoLeader, c.Name, s.Leader)
			}
			if !r.Offline && r.Active < maxSilence {
				heard++
			}
			if !r.Offline && r.Current {
				s.Current++
			}
		}
		switch {
		case s.Leader == "":
			return Stream{}, fmt.Errorf("%w: %s", ErrNoLeader, c.Name)
		case 2*heard <= len(cluster.Replicas)+1:
			return Stream{}, fmt.Errorf("%w: %s, because its leader %s reaches no majority", ErrNoLeader, c.Name, s.Leader)
		}
	}
	n, ok := cfg.Number(c.Name)
	if !ok {
		return Stream{}, fmt.Errorf("%w: its name is %q", ErrStreamShape, c.Name)
	}
	s.Number = n
	s.Repaired = c.Metadata[MetaRepaired] != ""
	if _, err := fmt.Sscanf(c.Metadata[MetaSlots], "%d-%d", &s.FirstSlot, &s.LastSlot); err != nil {
		return Stream{}, fmt.Errorf("%w: the metadata of %s has no %s, so it was not made for these events",
			ErrStreamShape, c.Name, MetaSlots)
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
	Time    time.Time // when the server stored it, by the server's clock
}

// getTimeout bounds one request for a message. A stream without a leader does not answer at all.
const getTimeout = 5 * time.Second

// Next returns the stream's first message at seq or later from its leader, or nil if none exists.
// It returns ErrNoLeader without a leader. A direct get is not safe here: a replica that lacks the
// message might answer it.
func Next(ctx context.Context, js jetstream.JetStream, stream string, seq uint64) (*Stored, error) {
	return get(ctx, js, stream, map[string]any{"seq": max(seq, 1), "next_by_subj": ">"})
}

// EventAt returns the id of the event at seq, from the stream's leader. It returns "" if the
// message is gone, closes the stream, or was not written by a relay.
func EventAt(ctx context.Context, js jetstream.JetStream, stream string, seq uint64) (id string, err error) {
	m, err := Next(ctx, js, stream, seq)
	if err != nil || m == nil || m.Seq != seq || !event.Ours(m.Header) {
		return "", err
	}
	return m.Header.Get(event.HeaderID), nil
}

// Last returns the stream's last message that matches a subject filter, from its leader, or nil if
// none exists.
func Last(ctx context.Context, js jetstream.JetStream, stream, filter string) (*Stored, error) {
	return get(ctx, js, stream, map[string]any{"last_by_subj": filter})
}

// Closed returns the sequence of the stream's closing message from its leader, or 0 if none exists.
// Other messages may follow it: foreign ones, or the late publish of a relay that was frozen.
// Readers do not read them.
func Closed(ctx context.Context, js jetstream.JetStream, cfg Config, s Stream) (final uint64, err error) {
	subject, _ := event.ClosingMessage(cfg.Prefix, s.Number)
	m, err := Last(ctx, js, s.Name, subject) // the server has an index of it
	if err != nil || m == nil {
		return 0, err
	}
	for from := uint64(1); !event.Closes(m.Subject, m.Header); from = m.Seq + 1 { // foreign messages have the subject too
		if m, err = get(ctx, js, s.Name, map[string]any{"seq": from, "next_by_subj": subject}); err != nil || m == nil {
			return 0, err
		}
	}
	return m.Seq, nil
}

// Ended reports whether the stream gets no more events. all is a list of the streams that contains
// s. Later the closing message expires as every message does. Then the stream is empty, but a
// successor has had messages: relays publish to a stream only after they have closed its
// predecessors. A leader without any message does not know its stream yet.
func Ended(ctx context.Context, js jetstream.JetStream, cfg Config, s Stream, all []Stream) (bool, error) {
	if final, err := Closed(ctx, js, cfg, s); err != nil || final > 0 {
		return final > 0, err
	}
	return s.Messages == 0 && s.Last > 0 && slices.ContainsFunc(all, func(next Stream) bool {
		return next.Last > 0 && slices.Contains(next.After, s.Number)
	}), nil
}

// get requests one message from a stream's leader. It returns nil if the message does not exist.
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
		return nil, fmt.Errorf("read a message of stream %s: the answer has no message", stream)
	}
	got := &Stored{Seq: answer.Message.Seq, Subject: answer.Message.Subject, Data: answer.Message.Data, Time: answer.Message.Time}
	if len(answer.Message.Header) > 0 {
		if got.Header, err = nats.DecodeHeadersMsg(answer.Message.Header); err != nil {
			return nil, fmt.Errorf("read the headers of message %d of stream %s: %w", got.Seq, stream, err)
		}
	}
	return got, nil
}

// Declare creates a partition's stream, or updates an existing one without losing anything. It
// returns ErrStreamShape for a stream of another shape. Several processes may call it at once.
//
// It never shrinks replicas, age or size, because another process may have a larger configuration;
// Configure does. It keeps the placement, because a change copies the whole stream; Configure moves
// it. It keeps the slots. A stream that has had no message gets the durable consumers of Subscribe.
//
// With NATS_MANAGE=false it changes nothing. It returns ErrMissing if the stream, or one of these
// consumers, does not exist.
func Declare(ctx context.Context, js jetstream.JetStream, cfg Config, p Partition, log *slog.Logger) (Stream, error) {
	if err := cfg.Validate(); err != nil {
		return Stream{}, err
	}
	if cfg.Unmanaged {
		return checked(ctx, js, cfg, p)
	}
	name := cfg.StreamName(p.Number)
	stream, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		stream, err = create(ctx, js, cfg.planned(p))
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			stream, err = js.Stream(ctx, name) // another process was faster, perhaps with other settings
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
		log.InfoContext(ctx, "the stream keeps a larger limit than this process is configured with; `tidings stream configure` lowers it",
			"stream", name, "limit", limit)
	}
	if s := stream.CachedInfo().Config; len(cfg.Tags) > 0 && !SameTags(cfg.Tags, tagsOf(s)) {
		log.InfoContext(ctx,
			"the stream keeps other placement tags than this process is configured with; `tidings stream configure` moves it",
			"stream", name, "tags", tagsOf(s))
	}
	declared, err := describe(cfg, stream.CachedInfo())
	if err == nil && declared.Last == 0 { // nobody may write to it before subscribers have their consumers
		err = keep(ctx, js, cfg, declared)
	}
	return declared, err
}

// Inspect compares a partition's stream with the result of Declare, and changes nothing. refused
// are the reasons why Declare would refuse the stream. reset reports whether Declare would reset
// limits that somebody changed; with NATS_MANAGE=false it never does, and refused has the settings
// that relays require.
func Inspect(ctx context.Context, js jetstream.JetStream, cfg Config, p Partition) (refused []string, reset bool, err error) {
	stream, err := js.Stream(ctx, cfg.StreamName(p.Number))
	if err != nil {
		return nil, false, fmt.Errorf("look up stream %s: %w", cfg.StreamName(p.Number), unanswered(js, err))
	}
	have := stream.CachedInfo().Config
	if cfg.Unmanaged {
		return cfg.unmet(have, p), false, nil
	}
	want := cfg.declare(have, p.Number)
	grow(&want, have)
	return cfg.mismatch(have, p), !equal(want, have), nil
}

// change applies f to a stream's configuration. It reads the configuration just before, so values
// that f does not touch remain, for example an operator's metadata. JetStream has no conditional
// update, so one of two overlapping updates may be lost. Therefore change reads the result again
// and retries, up to five times.
func change(ctx context.Context, js jetstream.JetStream, stream jetstream.Stream,
	f func(jetstream.StreamConfig) jetstream.StreamConfig) (jetstream.Stream, error) {
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
	return nil, fmt.Errorf("update stream %s: other processes change it continuously", name)
}

// Limits are the values that Configure sets. nil keeps a value.
type Limits struct {
	Replicas *int
	// server tags to which the stream moves; without tags it stays, and later replicas go anywhere.
	// Not together with Replicas
	Tags     *[]string
	MaxAge   *time.Duration // 0: forever
	MaxBytes *int64         // of each stream; -1 for no limit
}

// Configured are the limits of a stream.
type Configured struct {
	Stream   string        `json:"stream"`
	Replicas int           `json:"replicas"`
	Tags     []string      `json:"placement_tags,omitempty"`
	MaxAge   time.Duration `json:"max_age_ns"`
	MaxBytes int64         `json:"max_bytes"`
}

// Configure sets the limits of all partitions' streams, also to lower values. Lower values drop
// replicas and expire older messages. The record of erasures gets the same replicas and placement.
// A relay with a larger configuration raises the limits again when it next declares the stream.
// Configure also denies purges of streams that an older release created: relays declare no stream
// of a closed partition, and subscribers change no stream of dead letters.
//
// Servers copy a moving stream in the background, and publishes and reads continue meanwhile. After
// an error only some streams may have changed: call it again.
func Configure(ctx context.Context, js jetstream.JetStream, cfg Config, l Limits) (all []Configured, err error) {
	if cfg.Unmanaged {
		return nil, ErrUnmanaged
	}
	streams, err := Streams(ctx, js, cfg)
	if err != nil {
		return nil, err
	}
	for _, s := range streams {
		stream, err := js.Stream(ctx, s.Name)
		if err != nil {
			return all, fmt.Errorf("look up stream %s: %w", s.Name, unanswered(js, err))
		}
		if err := l.overriding(cfg, stream.CachedInfo().Config).Validate(); err != nil {
			return all, err
		}
		stream, err = change(ctx, js, stream, func(have jetstream.StreamConfig) jetstream.StreamConfig {
			c := l.overriding(cfg, have)
			have.Replicas, have.Placement, have.MaxAge, have.MaxBytes = c.Replicas, l.placement(have), c.MaxAge, c.MaxBytes
			have.AllowRollup, have.DenyPurge = false, true
			return have
		})
		if err != nil {
			return all, err
		}
		now := stream.CachedInfo().Config
		all = append(all, Configured{Stream: now.Name, Replicas: now.Replicas, Tags: tagsOf(now), MaxAge: now.MaxAge,
			MaxBytes: now.MaxBytes})
	}
	if err := denyPurges(ctx, js, cfg.DeadStream()); err != nil {
		return all, err
	}
	return all, l.placeErased(ctx, js, cfg)
}

// denyPurges makes the server refuse purges of a stream, if it exists.
func denyPurges(ctx context.Context, js jetstream.JetStream, name string) error {
	stream, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err == nil && !stream.CachedInfo().Config.DenyPurge {
		sc := stream.CachedInfo().Config
		sc.AllowRollup, sc.DenyPurge = false, true
		_, err = js.UpdateStream(ctx, sc)
	}
	if err != nil {
		return fmt.Errorf("deny purges of stream %s: %w", name, unanswered(js, err))
	}
	return nil
}

// Shrinks describes the values that Configure would lower. It changes nothing.
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
		want := l.overriding(cfg, have.Config)
		held := fmt.Sprintf("messages in the stream: %d, of %d bytes", have.State.Msgs, have.State.Bytes)
		if want.Replicas < have.Config.Replicas {
			all = append(all, fmt.Sprintf("Stream %s: %d replicas instead of %d.", s.Name, want.Replicas, have.Config.Replicas))
		}
		if want.MaxAge > 0 && (have.Config.MaxAge == 0 || want.MaxAge < have.Config.MaxAge) {
			all = append(all, fmt.Sprintf("Stream %s: events stay for %s instead of %s (0s: forever); %s.", s.Name, want.MaxAge,
				have.Config.MaxAge, held))
		}
		if want.MaxBytes > 0 && (have.Config.MaxBytes <= 0 || want.MaxBytes < have.Config.MaxBytes) {
			all = append(all, fmt.Sprintf("Stream %s: %d bytes at most instead of %d (-1: no limit); %s.", s.Name, want.MaxBytes,
				have.Config.MaxBytes, held))
		}
	}
	return all, nil
}

// overriding returns c with the limits of have, overridden by those of l.
func (l Limits) overriding(c Config, have jetstream.StreamConfig) Config {
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

// placement returns the placement of l's tags, or have's if l has none.
func (l Limits) placement(have jetstream.StreamConfig) *jetstream.Placement {
	if l.Tags == nil {
		return have.Placement
	}
	return Placement(*l.Tags)
}

// grow keeps larger values of have in want, and describes them.
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

// MarkRepaired records on a partition's stream that it replaces a lost one.
func MarkRepaired(ctx context.Context, js jetstream.JetStream, cfg Config, partition int) error {
	stream, err := js.Stream(ctx, cfg.StreamName(partition))
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", cfg.StreamName(partition), err)
	}
	if cfg.Unmanaged {
		if stream.CachedInfo().Config.Metadata[MetaRepaired] == "" {
			return fmt.Errorf("%w: the metadata of stream %s has no %s=true, which `tidings stream plan` gives it", ErrStreamShape,
				cfg.StreamName(partition), MetaRepaired)
		}
		return nil
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

// create creates the stream. After the deletion of an account's last stream, the server still
// removes its folders in the background, and may remove those of the new stream. A repeated request
// then succeeds.
func create(ctx context.Context, js jetstream.JetStream, sc jetstream.StreamConfig) (jetstream.Stream, error) {
	for try := 1; ; try++ {
		stream, err := js.CreateStream(ctx, sc)
		var refused *jetstream.APIError
		if try == 3 || !errors.As(err, &refused) || refused.ErrorCode != errCodeStore {
			return stream, err
		}
		if work.Sleep(ctx, 100*time.Millisecond) != nil {
			return nil, err
		}
	}
}

// declare returns base with every setting that the protocols require.
func (c Config) declare(base jetstream.StreamConfig, partition int) jetstream.StreamConfig {
	s := base
	s.Name = c.StreamName(partition)
	s.Description = "Tidings events; published by the relay only"
	s.Subjects = []string{event.Subjects(c.Prefix, partition)}
	s.Storage = jetstream.FileStorage
	s.Retention = jetstream.LimitsPolicy // readers come and go, and replay
	s.Discard = jetstream.DiscardNew     // a full stream refuses publishes, and the outbox keeps the rows
	s.MaxAge = c.MaxAge
	s.MaxBytes = c.MaxBytes
	s.MaxMsgs = -1           // a limit by count would refuse or drop messages regardless of their age
	s.MaxMsgsPerSubject = -1 // would leave holes in a partition
	s.Replicas = c.Replicas
	s.Duplicates = duplicateWindow
	s.AllowAtomicPublish = true
	s.AllowDirect = true
	s.AllowRollup = false // a rollup purges
	s.NoAck = false
	// Plain subscribers get stored events, without the partition. Prefix.> also carries publishes
	// that the stream refused.
	source, destination := liveSubjects(c.Prefix, c.LivePrefix, partition)
	s.RePublish = &jetstream.RePublish{Source: source, Destination: destination}
	// No server undoes it. A previous release keeps it: it begins with the stream's own
	// configuration, as this function does. DenyDelete stays off, because erasure deletes messages.
	s.DenyPurge = true
	return s
}

// mismatch returns the reasons why have cannot become ours: the server refuses the change, or the
// change would lose events.
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
		add("it acknowledges messages before it stores them")
	}
	for key, want := range p.metadata() {
		if got := have.Metadata[key]; got != want {
			add("its metadata says %s %q, not %q", key, got, want)
		}
	}
	return why
}

// equal compares the settings of declare.
func equal(a, b jetstream.StreamConfig) bool {
	return a.Description == b.Description && a.Discard == b.Discard && a.MaxAge == b.MaxAge && a.MaxBytes == b.MaxBytes &&
		a.MaxMsgs == b.MaxMsgs && a.MaxMsgsPerSubject == b.MaxMsgsPerSubject && a.Duplicates == b.Duplicates &&
		a.Replicas == b.Replicas && SameTags(tagsOf(a), tagsOf(b)) && a.AllowAtomicPublish == b.AllowAtomicPublish &&
		a.AllowDirect == b.AllowDirect && a.AllowRollup == b.AllowRollup && a.DenyPurge == b.DenyPurge && a.NoAck == b.NoAck &&
		a.RePublish != nil && *a.RePublish == *b.RePublish && maps.Equal(a.Metadata, b.Metadata)
}

// liveSubjects returns the subjects of a partition that NATS republishes, and their new subject,
// which has no partition. It excludes the closing message and the system's events, whose subjects
// have another number of tokens.
func liveSubjects(prefix, live string, partition int) (source, destination string) {
	return fmt.Sprintf("%s.%d.*.*.*", prefix, partition), live + ".{{wildcard(1)}}.{{wildcard(2)}}.{{wildcard(3)}}"
}
