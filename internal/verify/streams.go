package verify

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/status"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// Stream compares a partition's stream with the outbox rows that were published to it.
type Stream struct {
	Partition int    `json:"partition"`
	Stream    string `json:"stream"`
	Messages  uint64 `json:"messages"`  // that the stream holds
	Published int64  `json:"published"` // rows that say they are there
	Distinct  int64  `json:"distinct"`  // sequences that these rows name
	Closing   int64  `json:"closing"`   // messages that end the stream: one, or none
	Foreign   int64  `json:"foreign"`   // messages that no relay wrote: everybody skips them
	Repeated  int64  `json:"repeated"`  // messages of an event that another message has
	Unknown   int64  `json:"unknown"`   // messages without a row
	Missing   int64  `json:"missing"`   // rows without their message
	Trouble   string `json:"trouble,omitempty"`
}

// OK reports whether every published row has its message, and every message of ours its row.
func (s Stream) OK() bool {
	return s.Published == s.Distinct && s.Unknown == 0 && s.Missing == 0 && s.Trouble == ""
}

// String says in words what the stream has.
func (s Stream) String() string {
	var out strings.Builder
	fmt.Fprintf(&out, "Partition %d (%s): %s messages; %s outbox messages are published to it.", s.Partition, s.Stream, words.Count(int64(s.Messages)), words.Count(s.Published))
	if s.Published != s.Distinct {
		fmt.Fprintf(&out, " These name %s sequences: some name the same.", words.Count(s.Distinct))
	}
	for _, part := range []struct {
		n    int64
		what string
	}{{s.Closing, "closes it"}, {s.Foreign, "written by no relay"}, {s.Repeated, "repeated"}, {s.Unknown, "WITHOUT A ROW"}, {s.Missing, "MISSING"}} {
		if part.n > 0 {
			fmt.Fprintf(&out, " %s %s.", words.Count(part.n), part.what)
		}
	}
	if s.Trouble != "" {
		fmt.Fprintf(&out, " %s", s.Trouble)
	}
	return out.String()
}

// verifyStreams compares the streams of all partitions with the outbox, but for those that were closed and are gone. It waits so long for
// leaders.
func (d Deps) verifyStreams(ctx context.Context, wait time.Duration) (all []Stream, err error) {
	var checks []relay.PartitionCheck
	err = status.Retry(ctx, wait, func() (err error) {
		if checks, err = relay.Check(ctx, d.Truth, d.JetStream, d.Broker); err != nil {
			return err
		}
		for _, c := range checks {
			if broker.IsTransient(c.Err) {
				return c.Err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, c := range checks {
		if c.Stream == nil && (c.Closed || c.Partition.Stream == "") {
			continue
		}
		var v Stream
		if err := status.Retry(ctx, wait, func() (err error) { v, err = d.verifyStream(ctx, c); return err }); err != nil {
			return nil, fmt.Errorf("verify %s: %w", d.Broker.StreamName(c.Number), err)
		}
		all = append(all, v)
	}
	return all, nil
}

// verifyStream compares one stream, by its counts if these agree, else message by message.
func (d Deps) verifyStream(ctx context.Context, c relay.PartitionCheck) (v Stream, err error) {
	v.Partition, v.Stream = c.Number, d.Broker.StreamName(c.Number)
	if c.Err != nil {
		v.Trouble = daemon.Plain(c.Err)
	}
	first := uint64(1)
	if c.Stream != nil {
		v.Messages, first = c.Stream.Messages, max(c.Stream.First, 1)
		closed, err := broker.Closed(ctx, d.JetStream, *c.Stream)
		if err != nil {
			return v, err
		}
		if closed {
			v.Closing = 1
		}
	}
	if v.Published, v.Distinct, err = outbox.CountPublished(ctx, d.Truth, c.Number, first); err != nil {
		return v, err
	}
	if c.Stream == nil {
		v.Missing = v.Published
		return v, nil
	}
	if v.Published == v.Distinct && v.Messages == uint64(v.Published+v.Closing) {
		return v, nil
	}
	return v, d.countMessages(ctx, c, &v)
}

// countMessages reads a stream and says of each message what it is.
func (d Deps) countMessages(ctx context.Context, c relay.PartitionCheck, v *Stream) error {
	const page = 1000
	var rows []outbox.Published
	var found int64
	v.Closing, v.Foreign, v.Repeated, v.Unknown = 0, 0, 0, 0
	judge := func() error {
		in, err := outbox.InPlace(ctx, d.Truth, c.Number, rows)
		if err != nil {
			return err
		}
		known, err := outbox.Classify(ctx, d.Truth, rows)
		if err != nil {
			return err
		}
		for _, m := range rows {
			switch {
			case in[m.Seq]:
				found++
			case known[m.Seq] == outbox.Unknown:
				v.Unknown++
			default:
				v.Repeated++
			}
		}
		rows = rows[:0]
		return nil
	}
	stream, err := broker.Scan(ctx, d.JetStream, d.Broker, c.Number, broker.Scanning{From: 1, HeadersOnly: true}, func(m *broker.Stored) error {
		switch {
		case m.Header.Get(event.HeaderClosed) != "":
			v.Closing++
			return nil
		case !event.Ours(m.Header):
			v.Foreign++
			return nil
		}
		id, _ := strconv.ParseInt(m.Header.Get(event.HeaderOutboxID), 10, 64) // Ours has read it
		if rows = append(rows, outbox.Published{ID: id, EventID: m.Header.Get(event.HeaderID), Seq: m.Seq}); len(rows) < page {
			return nil
		}
		return judge()
	})
	if err != nil {
		return err
	}
	if err := judge(); err != nil {
		return err
	}
	v.Messages = stream.Messages
	v.Missing = max(v.Distinct-found, 0)
	return nil
}
