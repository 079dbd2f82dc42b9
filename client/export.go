package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"time"
)

// Export reads all states of a kind in the tenant, for a projection that needs more than the
// streams keep. Making an Export sends nothing. It is not safe for concurrent use.
type Export struct {
	core  *core
	where func(context.Context) (string, error)
	opts  []Option
	head  ExportHead
	after string
}

// ExportHead says what an export covers, and where the streams continue after it.
type ExportHead struct {
	Kind    string           `json:"kind"` // the aggregate type of the events
	Tenant  int64            `json:"tenant,string"`
	BeganAt time.Time        `json:"began_at"`
	Cursor  string           `json:"cursor"`
	Streams []ExportPosition `json:"streams"` // read each after its sequence, and a stream with a higher number from its beginning
}

// ExportPosition is the position up to which an export covers a stream.
type ExportPosition struct {
	Partition int       `json:"partition"`
	Stream    string    `json:"stream,omitempty"` // "" before the stream exists
	Created   time.Time `json:"created,omitzero"` // when the stream was created
	Sequence  uint64    `json:"sequence,string"`  // 0: read the stream from its beginning
}

// ExportState is the whole state of an entity, as in its last event, without the actor.
type ExportState struct {
	After   string          `json:"after"`   // its position in the export
	Type    string          `json:"type"`    // ce-type of an event that leads to this state
	Subject string          `json:"subject"` // ce-subject: the aggregate's id
	Data    json.RawMessage `json:"data"`    // the payload of the event; actor is empty
}

// Export exports the edges of the kind, with removed ones. It needs the role export.
func (e Edges[E, R, V]) Export(opts ...Option) *Export {
	return &Export{core: e.core, opts: opts, where: func(ctx context.Context) (string, error) {
		k, err := e.kind(ctx)
		return k.plural, err
	}}
}

// Export exports the children of the kind, with deleted ones. It needs the role export.
func (c Children[C, N, D, V]) Export(opts ...Option) *Export {
	return &Export{core: c.core, opts: opts, where: func(ctx context.Context) (string, error) {
		k, err := c.kind(ctx)
		return k.plural, err
	}}
}

// ExportSettings exports the settings of the threads of all kinds. It needs the role export.
func (c *Calls) ExportSettings(opts ...Option) *Export { return c.Export("threads", opts...) }

// Export exports the states of the kind with this plural, which its path has. It needs the role
// export.
func (c *Calls) Export(plural string, opts ...Option) *Export {
	return &Export{core: c.core, opts: opts, where: func(context.Context) (string, error) {
		if c.core == nil {
			return "", ErrNoClient
		}
		return plural, nil
	}}
}

// ExportLines limits the states of one answer: 1 to 100,000, by default 10,000.
func ExportLines(n int) Option { return Query("lines", fmt.Sprint(n)) }

// Resume continues an export after a position: cursor is the Cursor of its ExportHead, and after
// the After of the last state that you kept.
func (x *Export) Resume(cursor, after string) *Export {
	x.head.Cursor, x.after = cursor, after
	return x
}

// Head returns what the export covers. It is known from the first state on, or at the end. Keep its
// Streams and Cursor with the states.
func (x *Export) Head() ExportHead { return x.head }

// After returns the position of the last state that All yielded.
func (x *Export) After() string { return x.after }

// All yields all states. It sends requests until the export is complete. If an answer breaks off,
// it resumes after the last state. After an error it yields nothing more. CodeExportOutdated means
// that the export must begin again.
func (x *Export) All(ctx context.Context) iter.Seq2[ExportState, error] {
	return func(yield func(ExportState, error) bool) {
		var none ExportState
		plural, err := x.where(ctx)
		if err != nil {
			yield(none, err)
			return
		}
		for attempt := 1; ; attempt++ {
			k := newCall(http.MethodGet, "/v1/"+plural+":export", x.opts)
			Query("cursor", x.head.Cursor)(k)
			Query("after", x.after)(k)
			before := x.after
			end, stop, err := x.attempt(ctx, k, attempt, yield)
			if stop || err == nil && end == "done" {
				return
			}
			if x.after != before {
				attempt = 1
			}
			// Without this check the loop would never end.
			if err == nil && x.after == before && end == "more" {
				err = &AnswerError{k.method, k.path, http.StatusOK, ndjson, "", 0,
					errors.New("the answer has no states and is not the last one")}
			}
			if err == nil {
				attempt = 0
				continue
			}
			if err = x.core.pause(ctx, k, attempt, err); err != nil {
				yield(none, err)
				return
			}
		}
	}
}

// attempt reads one answer. stop reports that the caller has stopped the iteration.
func (x *Export) attempt(ctx context.Context, k *call, n int, yield func(ExportState, error) bool) (end string, stop bool, err error) {
	a, err := x.core.stream(ctx, k, n)
	if err != nil {
		return "", false, err
	}
	defer a.Body.Close() // errors do not matter: the body was only read
	lines := bufio.NewReaderSize(a.Body, 64<<10)
	for {
		line, err := readLine(lines)
		if err != nil {
			return "", false, &TransportError{k.method, k.path, fmt.Errorf("the answer broke off: %w", err)}
		}
		var l struct {
			ExportState
			Export  *ExportHead `json:"export"`
			End     string      `json:"end"`
			Problem *Problem    `json:"problem"`
		}
		if err := json.Unmarshal(line, &l); err != nil {
			return "", false, a.broken(k, line, err)
		}
		switch {
		case l.Export != nil:
			x.head = *l.Export
		case l.Problem != nil:
			return l.End, false, l.Problem
		case l.End != "":
			return l.End, false, nil
		case l.After == "":
			return "", false, a.broken(k, line, errors.New("a line is not a state"))
		default:
			x.after = l.After
			if !yield(l.ExportState, nil) {
				return "", true, nil
			}
		}
	}
}
