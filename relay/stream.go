package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// ErrStreamRefused reports that the stream is not the one that this database has published to, or has lost some of it.
// Publishing on would lose or double events, so nothing is published until a person has decided.
var ErrStreamRefused = errors.New("relay: the stream does not continue what this database has published; run `tidings repair stream`")

// connect opens a session: a connection of its own that never reconnects, to a stream that was compared with the database.
func (r *Relay) connect(ctx context.Context) (*session, error) {
	s := &session{Relay: r, closed: make(chan struct{}), look: make(chan struct{}, 1)}
	nc, err := broker.Connect(r.broker, r.owner, r.log,
		nats.RetryOnFailedConnect(false), nats.NoReconnect(),
		nats.FlusherTimeout(r.cfg.PublishTimeout), // a write that blocks holds the connection's lock, heeds no context, and by default waits a minute
		nats.ClosedHandler(func(*nats.Conn) { close(s.closed) }))
	if err != nil {
		return nil, err
	}
	s.nc = nc
	ctx, cancel := context.WithTimeout(ctx, 4*r.cfg.PublishTimeout)
	defer cancel()
	if err := s.verify(ctx); err != nil {
		nc.Close()
		return nil, err
	}
	return s, nil
}

// verify compares the stream with what this database knows of it, stream-wide, before the session's first publish. A
// database that has met no stream yet is bound to an empty one.
func (s *session) verify(ctx context.Context) error {
	js, err := jetstream.New(s.nc)
	if err != nil {
		return err
	}
	s.js = js
	bound, tails, ok, err := outbox.BoundStream(ctx, s.pool)
	if err != nil {
		return err
	}
	if ok { // never declared anew: a stream that is gone is a loss to be decided on
		if _, err := js.Stream(ctx, s.broker.Stream); errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("%w: stream %s is gone", ErrStreamRefused, s.broker.Stream)
		}
	}
	stream, err := broker.EnsureStream(ctx, js, s.broker)
	if err != nil {
		return err
	}
	info := stream.CachedInfo()
	if kept := s.broker.Less(info.Config); len(kept) > 0 {
		s.log.WarnContext(ctx, "the stream keeps what it has, because declaring it takes nothing away: correct this relay's environment, or shrink the stream with `tidings stream configure`",
			"stream", s.broker.Stream, "kept", strings.Join(kept, "; "))
	}
	created := info.Created.UTC().Truncate(time.Microsecond)
	generation, err := strconv.ParseInt(info.Config.Metadata[broker.MetaGeneration], 10, 64)
	if err != nil {
		return fmt.Errorf("%w: stream %s has no generation in its metadata", ErrStreamRefused, s.broker.Stream)
	}
	if !ok {
		if info.State.LastSeq > 0 {
			return fmt.Errorf("%w: stream %s holds %d messages of another database", ErrStreamRefused, s.broker.Stream, info.State.LastSeq)
		}
		if err := outbox.Bind(ctx, s.pool, outbox.Stream{Name: s.broker.Stream, Created: created, Generation: generation}); err != nil {
			return err
		}
		if bound, tails, _, err = outbox.BoundStream(ctx, s.pool); err != nil { // another relay may have been first
			return err
		}
	}
	if err := sameStream(bound, s.broker, info); err != nil {
		return err
	}
	if info.State.LastSeq < slices.Max(tails) {
		return fmt.Errorf("%w: stream %s ends at %d, its marks at %d", ErrStreamRefused, bound.Name, info.State.LastSeq, slices.Max(tails))
	}
	s.bound = bound
	s.generation = bound.Generation
	s.maxMessage = int(s.nc.MaxPayload())
	if limit := int(info.Config.MaxMsgSize); limit > 0 {
		s.maxMessage = min(s.maxMessage, limit)
	}
	return nil
}

// sameStream returns ErrStreamRefused unless the stream is the one that is bound: of the same name, creation and generation.
func sameStream(bound outbox.Stream, cfg broker.Config, info *jetstream.StreamInfo) error {
	created, generation := info.Created.UTC().Truncate(time.Microsecond), info.Config.Metadata[broker.MetaGeneration]
	switch {
	case bound.Name != cfg.Stream:
		return fmt.Errorf("%w: this database publishes to stream %s, not %s", ErrStreamRefused, bound.Name, cfg.Stream)
	case !bound.Created.Equal(created):
		return fmt.Errorf("%w: stream %s was made at %s, the one known here at %s", ErrStreamRefused, bound.Name, created, bound.Created)
	case strconv.FormatInt(bound.Generation, 10) != generation:
		return fmt.Errorf("%w: stream %s is of generation %s, this database of %d", ErrStreamRefused, bound.Name, generation, bound.Generation)
	}
	return nil
}

// Check compares the stream with the one that this database publishes to, as a relay that connects does: it returns ErrStreamRefused when
// they are not the same, and nothing is published. A database that has met no stream yet has nothing to compare.
func Check(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config) error {
	bound, _, ok, err := outbox.BoundStream(ctx, pool)
	if err != nil || !ok {
		return err
	}
	stream, err := js.Stream(ctx, cfg.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return fmt.Errorf("%w: stream %s is gone", ErrStreamRefused, cfg.Stream)
	}
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", cfg.Stream, err)
	}
	return sameStream(bound, cfg, stream.CachedInfo())
}

// watch looks every StreamInterval, and at once after a failure, whether the stream is still there and the same, until ctx ends. It
// says on gone when it is not, and the next session says what is wrong: an idle relay would notice nothing, and a busy one only that
// nobody answers.
func (s *session) watch(ctx context.Context, gone chan<- error) {
	tick := time.NewTicker(s.cfg.StreamInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.look:
		}
		rctx, cancel := context.WithTimeout(ctx, s.cfg.PublishTimeout)
		stream, err := s.js.Stream(rctx, s.broker.Stream)
		cancel()
		if err == nil {
			err = sameStream(s.bound, s.broker, stream.CachedInfo())
		}
		if errors.Is(err, jetstream.ErrStreamNotFound) || errors.Is(err, ErrStreamRefused) { // no answer says nothing about the stream
			gone <- fmt.Errorf("relay: stream %s is gone or another one than before", s.broker.Stream)
			return
		}
	}
}

// streamState is the part of a stream's state that catch-up needs, read from its leader.
type streamState struct {
	last  uint64 // last sequence under the partition's filter; 0 without any
	first uint64 // of the whole stream
}

// lastOf asks the stream's leader for the last message under a filter. (A direct get could be answered by a follower.)
func (s *session) lastOf(ctx context.Context, filter string) (seq uint64, err error) {
	request, err := json.Marshal(map[string]string{"last_by_subj": filter})
	if err != nil {
		return 0, err
	}
	m, err := s.nc.RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+s.broker.Stream, request)
	if err != nil {
		return 0, fmt.Errorf("read the last message of %s: %w", filter, err)
	}
	var answer struct {
		Message struct {
			Seq uint64 `json:"seq"`
		} `json:"message"`
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		return 0, fmt.Errorf("read the last message of %s: %w", filter, err)
	}
	if answer.Error != nil {
		if answer.Error.Code == http.StatusNotFound && answer.Error.ErrorCode != jetstream.JSErrCodeStreamNotFound {
			return 0, nil
		}
		return 0, fmt.Errorf("read the last message of %s: %w", filter, answer.Error)
	}
	return answer.Message.Seq, nil
}

// stateOf reads where the stream stands for one partition. No answer is an error, as it is for a publish.
func (s *session) stateOf(ctx context.Context, filter string) (streamState, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.PublishTimeout)
	defer cancel()
	last, err := s.lastOf(ctx, filter)
	if err != nil {
		return streamState{}, err
	}
	stream, err := s.js.Stream(ctx, s.broker.Stream)
	if err != nil {
		return streamState{}, fmt.Errorf("read the state of stream %s: %w", s.broker.Stream, err)
	}
	return streamState{last: last, first: stream.CachedInfo().State.FirstSeq}, nil
}
