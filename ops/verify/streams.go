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
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// Stream compares a partition's stream with the outbox rows that were published to it.
type Stream struct {
	Partition int    `json:"partition"`
	Stream    string `json:"stream"`
	Messages  uint64 `json:"messages"`  // messages on the stream
	Published int64  `json:"published"` // rows that are marked as published
	Distinct  int64  `json:"distinct"`  // sequences that these rows name
	Closing   int64  `json:"closing"`   // closing messages: 0 or 1
	Foreign   int64  `json:"foreign"`   // messages that no relay wrote; every reader skips them
	Repeated  int64  `json:"repeated"`  // further messages of an event that already has one
	Unmarked  int64  `json:"unmarked"`  // messages whose row is not marked: their relay marks it
	Unknown   int64  `json:"unknown"`   // messages without a row
	Missing   int64  `json:"missing"`   // rows without their message
	Trouble   string `json:"trouble,omitempty"`
}

// OK reports whether every published row has its message, and every message of a relay its row.
func (s Stream) OK() bool {
	return s.Published == s.Distinct && s.Unknown == 0 && s.Missing == 0 && s.Trouble == ""
}

// String describes the stream in words.
func (s Stream) String() string {
	var out strings.Builder
	fmt.Fprintf(&out, "Partition %d (%s): %s; the outbox has %s as published.", s.Partition, s.Stream,
		words.Of(int64(s.Messages), "message"), words.Count(s.Published))
	if s.Published != s.Distinct {
		fmt.Fprintf(&out, " They have only %s different sequences.", words.Count(s.Distinct))
	}
	for _, part := range []struct {
		n    int64
		what string
	}{{s.Closing, "Closing messages"}, {s.Foreign, "Messages that no relay wrote"}, {s.Repeated, "Repeated messages"},
		{s.Unmarked, "Messages whose row is not marked yet"}, {s.Unknown, "MESSAGES WITHOUT A ROW"}, {s.Missing, "MISSING MESSAGES"}} {
		if part.n > 0 {
			fmt.Fprintf(&out, " %s: %s.", part.what, words.Count(part.n))
		}
	}
	if s.Trouble != "" {
		fmt.Fprintf(&out, " %s", s.Trouble)
	}
	return out.String()
}

// verifyStreams compares the streams of all partitions with the outbox, except closed streams that
// are gone. It waits for leaders for at most wait.
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
		if err := status.Retry(ctx, wait, func() error {
			_, err := broker.Confirm(ctx, d.JetStream, func(ctx context.Context) (_ broker.Stream, lost bool, err error) {
				v, err = d.verifyStream(ctx, c)
				return broker.Stream{}, v.Missing > 0 && v.Trouble == "", err // Check has confirmed the trouble
			})
			return err
		}); err != nil {
			return nil, fmt.Errorf("verify %s: %w", d.Broker.StreamName(c.Number), err)
		}
		all = append(all, v)
	}
	return all, nil
}

// verifyStream compares one stream: by its counts if these agree, otherwise message by message.
func (d Deps) verifyStream(ctx context.Context, c relay.PartitionCheck) (v Stream, err error) {
	v.Partition, v.Stream = c.Number, d.Broker.StreamName(c.Number)
	if c.Err != nil {
		v.Trouble = daemon.Plain(c.Err)
	}
	first := uint64(1)
	if c.Stream != nil {
		v.Messages, first = c.Stream.Messages, max(c.Stream.First, 1)
		final, err := broker.Closed(ctx, d.JetStream, d.Broker, *c.Stream)
		if err != nil {
			return v, err
		}
		if final > 0 {
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

// countMessages reads a stream and counts its messages by category.
func (d Deps) countMessages(ctx context.Context, c relay.PartitionCheck, v *Stream) error {
	const page = 1000
	var rows []outbox.Published
	var found int64
	v.Closing, v.Foreign, v.Repeated, v.Unmarked, v.Unknown = 0, 0, 0, 0, 0
	unmarked := make(map[int64]bool) // rows whose first message was counted
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
			case known[m.Seq] == outbox.Pending && !unmarked[m.ID]:
				unmarked[m.ID] = true
				v.Unmarked++
			default:
				v.Repeated++
			}
		}
		rows = rows[:0]
		return nil
	}
	stream, err := broker.Scan(ctx, d.JetStream, d.Broker, c.Number, broker.Scanning{From: 1, HeadersOnly: true},
		func(m *broker.Stored) error {
			switch {
			case m.Header.Get(event.HeaderClosed) != "":
				v.Closing++
				return nil
			case !event.Ours(m.Header):
				v.Foreign++
				return nil
			}
			id, _ := strconv.ParseInt(m.Header.Get(event.HeaderOutboxID), 10, 64) // Ours has parsed it
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
