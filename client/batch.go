package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"
	"strconv"
)

const (
	maxBatch      = 1000    // operations per request
	maxBatchBytes = 2 << 20 // per request; the API takes 4 MiB by default
	maxLine       = 4 << 20 // bytes of one outcome
)

// Operation is one operation of a batch. PutOp, PutWithOp, RemoveOp, CreateOp, EditOp and DeleteOp
// make one.
type Operation[T any] struct {
	kind string // put, remove, create, edit or delete

	from, to   ID // of edges
	attributes any

	object ID // of children
	id     string
	key    string
	body   any    // of a create or an edit
	parent string // the child that a create replies to

	version int64 // 0: unconditional; anyVersion
}

const anyVersion = -1

// Outcome is the outcome of one operation of a batch.
type Outcome[T any] struct {
	Index    int      // of the operation, from 0
	Status   int      // the status that the operation's own route would answer
	Entity   *T       // the current state, if the operation returns it
	Replayed bool     // an earlier create with this key made the child
	Token    string   // the Tidings-Token of this write
	Problem  *Problem // why the operation was refused, or nil
}

// Err returns the outcome's problem as an error, or nil.
func (o Outcome[T]) Err() error {
	if o.Problem == nil {
		return nil
	}
	return o.Problem
}

// PutOp returns the operation that puts an edge.
func (e Edges[E, R, V]) PutOp(from, to ID) Operation[E] {
	return Operation[E]{kind: "put", from: from, to: to}
}

// RemoveOp returns the operation that removes an edge.
func (e Edges[E, R, V]) RemoveOp(from, to ID) Operation[E] {
	return Operation[E]{kind: "remove", from: from, to: to}
}

// PutWithOp returns the operation that puts an edge with these attributes. A missing attribute gets
// its default.
func (e AttributedEdges[E, R, V, A]) PutWithOp(from, to ID, attributes A) Operation[E] {
	return Operation[E]{kind: "put", from: from, to: to, attributes: attributes}
}

// CreateOp returns the operation that creates a child under an object. The client gives it an
// idempotency key.
func (c Children[C, N, D, V]) CreateOp(object ID, child N) Operation[C] {
	o := Operation[C]{kind: "create", object: object, body: child, key: rand.Text()}
	if r, ok := any(child).(interface{ replyTo() string }); ok {
		o.parent = r.replyTo()
	}
	return o
}

// EditOp returns the operation that edits a child, on the condition that its version is still
// child's.
func (c Children[C, N, D, V]) EditOp(child C, edit D) Operation[C] {
	id, version := child.Ref()
	return Operation[C]{kind: "edit", id: id, body: edit, version: version}
}

// DeleteOp returns the operation that deletes a child, on the condition that its version is still
// child's.
func (c Children[C, N, D, V]) DeleteOp(child C) Operation[C] {
	id, version := child.Ref()
	return Operation[C]{kind: "delete", id: id, version: version}
}

// WithKey sets the idempotency key of a create, instead of an automatic one.
func (o Operation[T]) WithKey(key string) Operation[T] { o.key = key; return o }

// IfVersion makes an operation conditional on this version.
func (o Operation[T]) IfVersion(version int64) Operation[T] { o.version = version; return o }

// IfAny makes an operation that needs a version apply to any version.
func (o Operation[T]) IfAny() Operation[T] { o.version = anyVersion; return o }

// Batch writes any number of operations, 1,000 per request, and yields their outcomes in the order
// of the operations while it writes. Each operation succeeds or fails alone: an outcome may have a
// Problem. If an answer breaks off, the client sends the operations without an outcome again, in
// their order. That is safe: creates have keys, and the API refuses a repeated change as stale,
// with Problem.OutcomeUnknown. After an error Batch yields nothing more.
func (e Edges[E, R, V]) Batch(ctx context.Context, ops iter.Seq[Operation[E]], opts ...Option) iter.Seq2[Outcome[E], error] {
	return func(yield func(Outcome[E], error) bool) {
		kind, err := e.kind(ctx)
		b := batch[E]{core: e.core, plural: kind.plural, entity: kind.name, names: kind.names, opts: opts,
			encode: func(w []byte, o Operation[E]) ([]byte, string, error) {
				return kind.encode(w, o.kind, o.from, o.to, o.attributes, o.version)
			}}
		b.run(ctx, err, ops, yield)
	}
}

// Batch writes any number of operations, like Edges.Batch.
func (c Children[C, N, D, V]) Batch(ctx context.Context, ops iter.Seq[Operation[C]], opts ...Option) iter.Seq2[Outcome[C], error] {
	return func(yield func(Outcome[C], error) bool) {
		kind, err := c.kind(ctx)
		b := batch[C]{core: c.core, plural: kind.plural, entity: kind.name, names: kind.names, opts: opts,
			encode: func(w []byte, o Operation[C]) ([]byte, string, error) {
				return encodeChild(kind, w, o)
			}}
		b.run(ctx, err, ops, yield)
	}
}

// encode writes an operation as JSON, and returns the path of its edge.
func (k edgeKind) encode(w []byte, op string, from, to ID, attributes any, version int64) (_ []byte, subject string, err error) {
	w = fmt.Appendf(w, `{"op":%q,%q:%q,%q:%q`, op, k.ends[0], from, k.ends[1], to)
	if attributes != nil {
		if w, err = member(w, "attributes", attributes); err != nil {
			return nil, "", err
		}
	}
	return append(matched(w, version), '}'), k.path(from, to), nil
}

// encodeChild writes an operation as JSON, and returns the path of its child, or "" for a create.
func encodeChild[T any](k childKind, w []byte, o Operation[T]) (_ []byte, subject string, err error) {
	w = fmt.Appendf(w, `{"op":%q`, o.kind)
	if o.kind == "create" {
		w = fmt.Appendf(w, `,%q:%q`, k.parent+"_id", o.object)
		if w, err = member(w, "idempotency_key", o.key); err != nil {
			return nil, "", err
		}
	} else if w, err = member(w, k.name+"_id", o.id); err != nil {
		return nil, "", err
	} else {
		if o.id == "" {
			return nil, "", ErrNoID
		}
		if o.version == 0 {
			return nil, "", ErrNoVersion
		}
		w, subject = matched(w, o.version), k.one(o.id)
	}
	if o.body != nil { // a JSON object, whose members join these
		body, err := json.Marshal(o.body)
		if err != nil {
			return nil, "", err
		}
		if len(body) > 2 {
			w = append(append(w, ','), body[1:len(body)-1]...)
		}
	}
	return append(w, '}'), subject, nil
}

func member(w []byte, name string, v any) ([]byte, error) {
	b, err := json.Marshal(v)
	return append(fmt.Appendf(w, `,%q:`, name), b...), err
}

func matched(w []byte, version int64) []byte {
	switch {
	case version == anyVersion:
		return append(w, `,"if_match":"*"`...)
	case version > 0:
		return strconv.AppendInt(append(w, `,"if_match":`...), version, 10)
	}
	return w
}

// batch sends operations on T, request by request.
type batch[T any] struct {
	core           *core
	plural, entity string
	names          names
	opts           []Option
	encode         func(w []byte, o Operation[T]) (_ []byte, subject string, err error)
}

// sent is an operation in progress.
type sent[T any] struct {
	line    []byte
	subject string // the path of its entity, for the session; "" for a create
	// about is the pair or child that the operation changes, or the child that it replies to; ""
	// for none. Operations with the same about keep their order.
	about   string
	unknown bool // an earlier attempt may have written it
	out     *Outcome[T]
}

func (b *batch[T]) run(ctx context.Context, err error, ops iter.Seq[Operation[T]], yield func(Outcome[T], error) bool) {
	var none Outcome[T]
	if err != nil {
		yield(none, err)
		return
	}
	var request []sent[T]
	size, first := 0, 0
	flush := func() bool {
		ok := b.deliver(ctx, first, request, yield)
		first += len(request)
		request, size = request[:0], 0
		return ok
	}
	for op := range ops {
		line, subject, err := b.encode(nil, op)
		if err != nil {
			if len(request) == 0 || flush() {
				yield(none, fmt.Errorf("tidings: operation %d of the batch: %w", first+len(request), err))
			}
			return
		}
		line = append(line, '\n')
		if len(request) > 0 && (len(request) == maxBatch || size+len(line) > maxBatchBytes) && !flush() {
			return
		}
		request, size = append(request, sent[T]{line: line, subject: subject, about: cmp.Or(op.id, op.parent, subject)}), size+len(line)
	}
	if len(request) > 0 {
		flush()
	}
}

// deliver sends the operations of one request until each has an outcome, and yields the outcomes in
// order. It returns false if the batch ends.
func (b *batch[T]) deliver(ctx context.Context, first int, ops []sent[T], yield func(Outcome[T], error) bool) bool {
	told, k := 0, newCall(http.MethodPost, "/v1/"+b.plural+":batch", b.opts).repeatable()
	tell := func() bool {
		for ; told < len(ops) && ops[told].out != nil; told++ {
			out := *ops[told].out
			out.Index = first + told
			if !yield(out, nil) {
				return false
			}
		}
		return true
	}
	for attempt := 1; ; attempt++ {
		var open []int
		for i := range ops {
			if ops[i].out == nil {
				open = append(open, i)
			}
		}
		if len(open) == 0 {
			return true
		}
		done, more, err := b.attempt(ctx, k, attempt, ops, open, tell)
		if !more {
			return false
		}
		if done > 0 {
			attempt = 1 // for the operations that are left
		}
		if err == nil {
			continue
		}
		if err = b.core.pause(ctx, k, attempt, err); err == nil {
			continue
		}
		if ctx.Err() == nil && b.refuseOpen(ops, open, err) {
			tell()
			return true
		}
		yield(Outcome[T]{}, err)
		return false
	}
}

// refuseOpen gives open operations the problem that the API repeats for them. It returns false if
// err is no answer to them.
func (b *batch[T]) refuseOpen(ops []sent[T], open []int, err error) bool {
	var p *Problem
	var o *openError
	if !errors.As(err, &o) || !errors.As(err, &p) {
		return false
	}
	for _, i := range open {
		if ops[i].out == nil {
			ops[i].out = &Outcome[T]{Status: p.Status, Problem: p}
		}
	}
	return true
}

// openError reports that the answer was complete, but some operations must be sent again.
type openError struct{ *Problem }

func (e *openError) Unwrap() error { return e.Problem }

// attempt sends the open operations once. done counts those that got an outcome. more is false if
// the caller has stopped the iteration.
func (b *batch[T]) attempt(ctx context.Context, k *call, n int, ops []sent[T], open []int,
	tell func() bool) (done int, more bool, err error) {
	k.media, k.body = ndjson, nil
	for _, i := range open {
		k.body = append(k.body, ops[i].line...)
	}
	a, err := b.core.stream(ctx, k, n)
	if err != nil {
		_, known, _ := mayRepeat(err)
		for _, i := range open {
			ops[i].unknown = ops[i].unknown || !known
		}
		return 0, true, err
	}
	defer a.Body.Close() // errors do not matter: the body was only read
	lines := bufio.NewReaderSize(a.Body, 64<<10)
	var again []refused
	for at, i := range open {
		line, err := readLine(lines)
		if err != nil {
			for _, rest := range open[at:] {
				ops[rest].unknown = true
			}
			_, more = settle(ops, again), tell()
			return done, more, &TransportError{k.method, k.path,
				fmt.Errorf("the answer broke off after %d of %d outcomes: %w", at, len(open), err)}
		}
		out, err := b.outcome(line, &ops[i], k.began)
		if err != nil {
			return done, true, a.broken(k, line, err)
		}
		if may, known, _ := mayRepeat(out.Err()); may {
			again, ops[i].unknown = append(again, refused{i, out.Problem}), ops[i].unknown || !known
			continue
		}
		ops[i].out = &out
		done++
		if !tell() {
			return done, false, nil
		}
	}
	left := settle(ops, again)
	if more = tell(); left != nil {
		err = &openError{left}
	}
	return done, more, err
}

// refused is an operation whose problem may be temporary.
type refused struct {
	i       int
	problem *Problem
}

// settle leaves operations with a temporary problem open, and returns one of these problems. An
// operation keeps its problem if a later operation on the same thing was written: a retry would
// change their order.
func settle[T any](ops []sent[T], again []refused) (left *Problem) {
	if len(again) == 0 {
		return nil
	}
	done := make(map[string]int)
	for i, o := range ops {
		if o.out != nil {
			done[o.about] = i
		}
	}
	for _, r := range slices.Backward(again) {
		o := &ops[r.i]
		if o.about != "" && done[o.about] > r.i {
			o.out = &Outcome[T]{Status: r.problem.Status, Problem: r.problem}
			continue
		}
		left = r.problem
	}
	return left
}

// outcome decodes one line of the answer.
func (b *batch[T]) outcome(line []byte, op *sent[T], began int) (out Outcome[T], err error) {
	var raw struct {
		Status   int      `json:"status"`
		Replayed bool     `json:"replayed"`
		Token    string   `json:"token"`
		Problem  *Problem `json:"problem"`
	}
	if err := json.Unmarshal(line, &raw); err != nil {
		return out, err
	}
	out = Outcome[T]{Status: raw.Status, Replayed: raw.Replayed, Token: raw.Token, Problem: raw.Problem}
	switch {
	case raw.Status < 200 || raw.Status >= 300 && raw.Problem == nil:
		return out, fmt.Errorf("an outcome has the status %d and no problem", raw.Status)
	case raw.Problem != nil:
		out.Problem.OutcomeUnknown, out.Problem.names = op.unknown, b.names
		return out, nil
	}
	var members map[string]json.RawMessage
	if bytes.Contains(line, []byte(`"`+b.entity+`"`)) {
		if err := json.Unmarshal(line, &members); err != nil {
			return out, err
		}
	}
	if entity, ok := members[b.entity]; ok {
		out.Entity = new(T)
		if err := b.names.decode(entity, out.Entity); err != nil {
			return out, err
		}
	}
	if s := b.core.session; s != nil && out.Token != "" {
		s.put(b.subject(op, out.Entity), out.Token, began)
	}
	return out, nil
}

// subject returns the session's key for the entity that an operation wrote.
func (b *batch[T]) subject(op *sent[T], entity *T) string {
	if c, ok := any(entity).(Versioned); ok && entity != nil && op.subject == "" {
		id, _ := c.Ref()
		return "/v1/" + b.plural + "/" + id
	}
	return op.subject
}

// readLine reads a line of bounded length. A last line without a newline is an error.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			return line, nil
		case errors.Is(err, bufio.ErrBufferFull) && len(line) < maxLine:
		case errors.Is(err, bufio.ErrBufferFull):
			return nil, fmt.Errorf("an outcome is longer than %d bytes", maxLine)
		case errors.Is(err, io.EOF):
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}
