package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/store"
)

const (
	maxBatch = 1000 // operations per request
	// batchChunk operations are written before their outcomes are sent. It bounds the locks of a
	// transaction and the memory of an answer.
	batchChunk = 100
	ndjson     = "application/x-ndjson"

	batchLinger = 5 * time.Second // for the client to read the end of an answer, after the request's deadline
)

// ifMatch is a version in a body, or store.AnyVersion.
type ifMatch int64

// Schema describes the version.
func (ifMatch) Schema(huma.Registry) *huma.Schema {
	one := 1.0
	return &huma.Schema{
		Description: `Optional, like the header If-Match: the version to change, for example 3, or "*".`,
		OneOf:       []*huma.Schema{{Type: huma.TypeInteger, Format: "int64", Minimum: &one}, {Type: huma.TypeString, Enum: []any{"*"}}},
	}
}

// UnmarshalJSON reads a version or "*".
func (v *ifMatch) UnmarshalJSON(b []byte) error {
	if string(b) == `"*"` {
		*v = store.AnyVersion
		return nil
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil || n <= 0 {
		return fmt.Errorf(`expected a version, for example 3, or "*"`)
	}
	*v = ifMatch(n)
	return nil
}

// BatchOutcome is the outcome of one operation: the status and the body that the operation's own
// route would answer.
type BatchOutcome struct {
	Line     int      `json:"line,omitempty" doc:"NDJSON only: the line number of the operation, from 1." example:"1"`
	Status   int      `json:"status" doc:"The status that the operation's own route would answer." example:"201"`
	Entity   any      `json:"entity,omitempty"`
	Replayed bool     `json:"replayed,omitempty" doc:"An earlier create with this key made the child."`
	Token    string   `json:"token,omitempty" doc:"The Tidings-Token of this write."`
	Problem  *Problem `json:"problem,omitempty" doc:"Why the operation failed; its pointers lead into the operation."`
}

// operation is one operation of a batch.
type operation struct {
	kind string
	in   any      // the store's input
	keys []string // operations that share a key keep their order
	out  BatchOutcome
}

func (o *operation) refuse(p *Problem) { o.out = BatchOutcome{Status: p.Status, Problem: inBody(p)} }

// inBody moves the place of each error from a header or path parameter to the operation's member
// for it.
func inBody(p *Problem) *Problem {
	for i, e := range p.Errors {
		name := e.Parameter // a path parameter has a member of the same name
		if e.Header == "Idempotency-Key" {
			name = "idempotency_key"
		}
		if name != "" {
			p.Errors[i] = FieldError{Detail: e.Detail, Pointer: "#/" + name}
		}
	}
	return p
}

// kind is one type of operation. Its name is the value of the member op.
type kind struct {
	name   string
	schema *huma.Schema
	// take converts an operation that fits the schema to the store's input, and returns its keys.
	take func(ctx context.Context, raw []byte) (in any, keys []string, err error)
	// write writes operations of this kind in one transaction and sets their outcomes. It returns
	// the transaction's error.
	write func(ctx context.Context, ops []*operation) error
}

type batchInput struct {
	RawBody []byte `contentType:"application/x-ndjson"` // or JSON
	media   string // type of the body and of the answer; guard has verified it
	refused string // a header that this route refuses
}

// Resolve reads the headers that are not parameters.
func (in *batchInput) Resolve(ctx huma.Context) []error {
	in.media = ctx.Header("Content-Type")
	for _, name := range []string{"Idempotency-Key", "If-Match"} {
		if ctx.Header(name) != "" {
			in.refused = name
		}
	}
	return nil
}

type batchOutput struct{ Body func(huma.Context) }

const batchDescription = "Each operation fails or succeeds alone, with the status or problem of its own route; there is no common " +
	"transaction. Operations on the same pair, comment or key run in their order. The body is one JSON document or, as " +
	"`application/x-ndjson`, one operation per line; a broken line fails alone. The answer has the same type and one outcome per " +
	"operation, in order; the server sends it while it writes the batch. An operation with 503 `unavailable`, or without an outcome, " +
	"may or may not have been written. Send these again in their order, creates with the same keys. With any other 503 an operation was " +
	"not written. Actor and `traceparent` of the request apply to all operations."

// batchRoute registers a route and describes its bodies, because the framework does not read them.
func (s *server) batchRoute(r route, kinds []kind, example []any) {
	path, n := r.path, r.naming
	r.naming, r.codes, r.maxBody = nil, writing(codeTooManyOperations), s.cfg.MaxBatchBytes
	register(s, r, func(ctx context.Context, in *batchInput) (*batchOutput, error) {
		return s.batch(ctx, path, n, kinds, in)
	})
	var schemas []*huma.Schema
	var lines bytes.Buffer
	for _, k := range kinds {
		for _, status := range []int{http.StatusOK, http.StatusCreated, http.StatusNoContent, http.StatusServiceUnavailable} {
			s.metrics.operations.WithLabelValues(path, k.name, strconv.Itoa(status))
		}
		if !slices.Contains(schemas, k.schema) {
			schemas = append(schemas, k.schema)
		}
	}
	for _, o := range example {
		_ = json.NewEncoder(&lines).Encode(o) // no error: it has strings and numbers only
	}
	content := func(name, line string, item *huma.Schema, items []any, lines string) map[string]*huma.MediaType {
		one, most := 1, maxBatch
		list := &huma.Schema{Type: huma.TypeArray, Items: item, MinItems: &one, MaxItems: &most}
		return map[string]*huma.MediaType{
			"application/json": {Example: map[string]any{name: items}, Schema: &huma.Schema{
				Type: huma.TypeObject, Properties: map[string]*huma.Schema{name: list}, Required: []string{name},
				AdditionalProperties: false,
			}},
			ndjson: {Example: lines, Schema: &huma.Schema{Type: huma.TypeString, Description: "One " + line + " per line."}},
		}
	}
	op := s.api.OpenAPI().Paths[path].Post
	outcome := s.api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[BatchOutcome](), true, "BatchOutcome")
	op.RequestBody.Content = content("operations", "operation", &huma.Schema{OneOf: schemas}, example, lines.String())
	op.Responses["200"].Description = "One outcome per operation, in order."
	op.Responses["200"].Content = content("items", "outcome", outcome, []any{
		map[string]any{"status": http.StatusNoContent}, map[string]any{"status": http.StatusNotFound,
			"problem": s.problems.problem(codeNotFound, "")},
	}, `{"line":1,"status":204}`+"\n")
}

// batch splits the body into operations before it writes the first one, and sends the answer while
// it writes.
func (s *server) batch(ctx context.Context, path string, n *naming, kinds []kind, in *batchInput) (*batchOutput, error) {
	if in.refused != "" {
		return nil, s.problems.problem(codeHeaderInvalid, "",
			FieldError{Detail: "send it in each operation, not as a header", Header: in.refused})
	}
	take, media := s.operationsOf, "application/json"
	if in.media == ndjson {
		take, media = s.linesOf, ndjson
	}
	raws, err := take(in.RawBody)
	if err != nil {
		return nil, err
	}
	c := callerOf(ctx)
	if err := s.limitBatch(c, len(raws)); err != nil {
		return nil, err
	}
	c.answer = nil // an operation sets no header of the batch's answer
	ctx = context.WithValue(ctx, callerKey, c)
	return &batchOutput{func(hctx huma.Context) {
		_, w := humago.Unwrap(hctx)
		hctx.SetHeader("Content-Type", media)
		hctx.SetStatus(http.StatusOK)
		s.answerBatch(ctx, path, n, kinds, raws, media == ndjson, w)
	}}, nil
}

// answerBatch writes the operations and sends their outcomes. It stops when the client stops
// reading, and writes no further operation then.
func (s *server) answerBatch(ctx context.Context, path string, n *naming, kinds []kind, raws [][]byte, lines bool,
	w http.ResponseWriter) {
	// A client that does not read keeps its place behind the gate until this deadline at most.
	if deadline, ok := ctx.Deadline(); ok {
		_ = http.NewResponseController(w).SetWriteDeadline(deadline.Add(batchLinger)) // the writer of a test has no deadline
	}
	out := bufio.NewWriter(w)
	enc := json.NewEncoder(out)
	enc.SetEscapeHTML(false)
	separator := `{"items":[`
	var stopped *Problem
	for first := 0; first < len(raws); first += batchChunk {
		ops := make([]*operation, min(batchChunk, len(raws)-first))
		for i := range ops {
			ops[i] = s.takeOperation(ctx, kinds, raws[first+i])
		}
		if stopped == nil {
			stopped = s.writeChunk(ctx, kinds, ops)
		}
		for i, op := range ops {
			if op.out.Status == 0 {
				p := *stopped
				op.refuse(&p)
			}
			if lines {
				op.out.Line = first + i + 1
			} else {
				_, _ = out.WriteString(separator) // the writer keeps its error for Flush
				separator = ","
			}
			s.metrics.operations.WithLabelValues(path, op.kind, strconv.Itoa(op.out.Status)).Inc()
			_ = enc.Encode(n.value(&op.out))
		}
		if out.Flush() != nil {
			return
		}
		_ = http.NewResponseController(w).Flush() // a writer without Flush sends it later
	}
	if !lines {
		_, _ = out.WriteString("]}")
		_ = out.Flush() // on an error the client has gone
	}
}

// writeChunk writes the operations that were not refused, in waves: operations with the same key
// keep their order. Each wave runs one transaction of set-based statements per kind. If a database
// is unavailable, writeChunk stops and returns the problem of the remaining operations.
func (s *server) writeChunk(ctx context.Context, kinds []kind, ops []*operation) *Problem {
	type place struct {
		wave int
		kind string
	}
	last := make(map[string]place)
	var waves []map[string][]*operation
	for _, op := range ops {
		if op.out.Status != 0 {
			continue
		}
		wave := 0
		for _, k := range op.keys {
			if l, ok := last[k]; ok && l.kind == op.kind { // the store keeps the order within a slice
				wave = max(wave, l.wave)
			} else if ok {
				wave = max(wave, l.wave+1)
			}
		}
		for _, k := range op.keys {
			last[k] = place{wave, op.kind}
		}
		if wave == len(waves) {
			waves = append(waves, make(map[string][]*operation))
		}
		waves[wave][op.kind] = append(waves[wave][op.kind], op)
	}
	for _, wave := range waves {
		for _, k := range kinds {
			if err := s.writeKind(ctx, k, wave[k.name]); err != nil {
				p, _ := s.problems.of(s.toProblem(ctx, err))
				return p
			}
		}
	}
	return nil
}

// writeKind writes operations of one kind. If one of them makes their transaction fail, each runs
// in a transaction of its own.
func (s *server) writeKind(ctx context.Context, k kind, ops []*operation) error {
	if len(ops) == 0 {
		return nil
	}
	err := k.write(ctx, ops)
	switch {
	case err == nil || errors.Is(err, postgres.ErrUnknown) || postgres.IsTransient(err) || postgres.IsSystemic(err):
		return err
	case len(ops) == 1:
		p, _ := s.problems.of(s.toProblem(ctx, err))
		ops[0].refuse(p)
		return nil
	}
	for _, op := range ops {
		if err := s.writeKind(ctx, k, []*operation{op}); err != nil {
			return err
		}
	}
	return nil
}

// operationsOf splits {"operations":[...]}. It checks only the syntax of each operation.
func (s *server) operationsOf(body []byte) ([][]byte, error) {
	dec := json.NewDecoder(bytes.NewReader(body))
	expect := func(want ...json.Token) error {
		for _, w := range want {
			t, err := dec.Token()
			if err != nil {
				return s.problems.problem(codeJSONInvalid, "", FieldError{Detail: err.Error(), Pointer: "#"})
			}
			if t != w {
				return s.problems.problem(codeValidation, "",
					FieldError{Detail: `expected {"operations":[...]} without other members`, Pointer: "#"})
			}
		}
		return nil
	}
	if err := expect(json.Delim('{'), "operations", json.Delim('[')); err != nil {
		return nil, err
	}
	var raws [][]byte
	for dec.More() {
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, s.problems.problem(codeJSONInvalid, "",
				FieldError{Detail: err.Error(), Pointer: fmt.Sprintf("#/operations/%d", len(raws))})
		}
		if raws = append(raws, raw); len(raws) > maxBatch {
			return nil, s.tooMany()
		}
	}
	if err := expect(json.Delim(']'), json.Delim('}')); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, s.problems.problem(codeJSONInvalid, "", FieldError{Detail: "there is text after the value", Pointer: "#"})
	}
	if len(raws) == 0 {
		return nil, s.problems.problem(codeValidation, "",
			FieldError{Detail: fmt.Sprintf("expected 1 to %d operations", maxBatch), Pointer: "#/operations"})
	}
	return raws, nil
}

// linesOf splits NDJSON into lines. An empty line is an invalid operation, because every line has
// its outcome.
func (s *server) linesOf(body []byte) ([][]byte, error) {
	body = bytes.TrimSuffix(body, []byte("\n"))
	if bytes.Count(body, []byte("\n")) >= maxBatch {
		return nil, s.tooMany()
	}
	return bytes.Split(body, []byte("\n")), nil
}

func (s *server) tooMany() error {
	return s.problems.problem(codeTooManyOperations, "nothing was written")
}

// takeOperation reads one operation like the framework reads a body: strict JSON, then the schema,
// then the values.
func (s *server) takeOperation(ctx context.Context, kinds []kind, raw []byte) *operation {
	op := &operation{kind: "none"}
	err := func() error {
		var value any
		if err := strictJSON(raw, &value); err != nil {
			return s.problems.problem(codeJSONInvalid, "", FieldError{Detail: err.Error(), Pointer: "#"})
		}
		object, _ := value.(map[string]any)
		n := slices.IndexFunc(kinds, func(k kind) bool { return object["op"] == k.name })
		if n < 0 {
			names := make([]string, len(kinds))
			for i, k := range kinds {
				names[i] = k.name
			}
			return s.problems.problem(codeValidation, "validation failed",
				FieldError{Detail: "expected one of " + strings.Join(names, ", "), Pointer: "#/op"})
		}
		path, res := huma.NewPathBuffer(nil, 0), huma.ValidateResult{}
		path.Push("body")
		huma.Validate(s.api.OpenAPI().Components.Schemas, kinds[n].schema, path, huma.ModeWriteToServer, value, &res)
		if len(res.Errors) > 0 {
			e := &huma.ErrorModel{Status: http.StatusUnprocessableEntity, Detail: "validation failed"}
			for _, err := range res.Errors {
				e.Add(err)
			}
			return s.problems.fromHuma(e)
		}
		var err error
		op.kind = kinds[n].name
		op.in, op.keys, err = kinds[n].take(ctx, raw)
		return err
	}()
	if err != nil {
		p, _ := s.problems.of(err)
		op.refuse(p)
	}
	return op
}

// takeApart decodes an operation.
func (s *server) takeApart(raw []byte, op any) error {
	if err := json.Unmarshal(raw, op); err != nil { // the schema does not limit a version to 64 bits
		return s.problems.problem(codeValidation, "validation failed", FieldError{Detail: err.Error(), Pointer: "#/if_match"})
	}
	return nil
}

// writeAll passes the operations to a function of the store. After the commit it calls tell with
// each outcome.
func writeAll[K, W, O any](ctx context.Context, ops []*operation, of K,
	write func(ctx context.Context, tenant int64, of K, in []W) ([]O, error), tell func(op *operation, o O)) error {
	in := make([]W, len(ops))
	for i, op := range ops {
		in[i] = op.in.(W)
	}
	outs, err := write(ctx, callerOf(ctx).TenantID, of, in)
	if err != nil {
		return err
	}
	for i, o := range outs {
		tell(ops[i], o)
	}
	return nil
}

// done sets the outcome of an operation: the problem of err, or out with the Tidings-Token of ref.
func (s *server) done(ctx context.Context, op *operation, err error, ref event.Ref, out BatchOutcome) {
	if err == nil {
		var token WriteToken
		token, err = s.tokenOf(ctx, ref)
		out.Token = token.Token
	}
	if err != nil {
		p, _ := s.problems.of(s.toProblem(ctx, err))
		op.refuse(p)
		return
	}
	op.out = out
}
