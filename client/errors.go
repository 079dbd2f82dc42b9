package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// Code says what a Problem is. Codes are stable: programs branch on them.
type Code string

// The codes of problems. The page of docs/api.md explains each.
const (
	CodeBadRequest           Code = "bad-request"
	CodeJSONInvalid          Code = "json-invalid"
	CodeCursorInvalid        Code = "cursor-invalid"
	CodeHeaderInvalid        Code = "header-invalid"
	CodeUnauthenticated      Code = "unauthenticated"
	CodeRoleMissing          Code = "role-missing"
	CodeNotFound             Code = "not-found"
	CodeMethodNotAllowed     Code = "method-not-allowed"
	CodeRequestTimeout       Code = "request-timeout"
	CodeParentGone           Code = "parent-gone"
	CodeThreadLocked         Code = "thread-locked"
	CodeCommentGone          Code = "comment-gone"
	CodeChildGone            Code = "child-gone"
	CodeAlreadyWritten       Code = "already-written"
	CodeVersionStale         Code = "version-stale"
	CodeRequestTooLarge      Code = "request-too-large"
	CodeTooManyOperations    Code = "too-many-operations"
	CodeUnsupportedMediaType Code = "unsupported-media-type"
	CodeValidationFailed     Code = "validation-failed"
	CodeSelfFollow           Code = "self-follow"
	CodeSelfEdge             Code = "self-edge"
	CodeBodyEmpty            Code = "body-empty"
	CodeBodyTooLong          Code = "body-too-long"
	CodeBodyInvalid          Code = "body-invalid"
	CodeParentUnknown        Code = "parent-unknown"
	CodeTooDeep              Code = "too-deep"
	CodeThreadTooLarge       Code = "thread-too-large"
	CodeIdempotencyKeyReused Code = "idempotency-key-reused"
	CodeIfMatchMissing       Code = "if-match-missing"
	CodeExportOutdated       Code = "export-outdated"
	CodeErasureUnfinished    Code = "erasure-unfinished"
	CodeRateLimited          Code = "rate-limited"
	CodeInternal             Code = "internal"
	CodeOverloaded           Code = "overloaded"
	CodeUnavailable          Code = "unavailable"
	CodeThreadReturning      Code = "thread-returning"
)

// ErrNotModified reports that what IfNoneMatch names is current.
var ErrNotModified = errors.New("tidings: not modified")

// ErrNoVersion reports a change of an object whose Version is 0: read the object first, or use IfMatch or IfMatchAny.
var ErrNoVersion = errors.New("tidings: the object has no version: read it first, or use client.IfMatch or client.IfMatchAny")

// Problem is a refusal by the API (RFC 9457).
type Problem struct {
	Type      string          `json:"type"`
	Title     string          `json:"title"`
	Status    int             `json:"status"`
	Code      Code            `json:"code"`
	Detail    string          `json:"detail,omitempty"`
	Errors    []FieldError    `json:"errors,omitempty"`
	Current   json.RawMessage `json:"current,omitempty"` // what the write met: CurrentAs reads it
	RequestID string          `json:"request_id,omitempty"`

	// RetryAfter is how long the API asks to wait; 0 if it does not say.
	RetryAfter time.Duration `json:"-"`
	// OutcomeUnknown says of a write that an earlier attempt got no answer and may have been done: a version that is stale now may be of that attempt.
	OutcomeUnknown bool `json:"-"`
}

// FieldError is one thing that is wrong with a request, and where.
type FieldError struct {
	Detail    string `json:"detail"`
	Pointer   string `json:"pointer,omitempty"` // into the body (RFC 6901)
	Parameter string `json:"parameter,omitempty"`
	Header    string `json:"header,omitempty"`
}

func (p *Problem) Error() string {
	text := fmt.Sprintf("tidings: %d %s: %s", p.Status, p.Code, p.Title)
	if p.Detail != "" {
		text += ": " + p.Detail
	}
	for _, e := range p.Errors {
		text += fmt.Sprintf("; %s%s%s: %s", e.Pointer, e.Parameter, e.Header, e.Detail)
	}
	if p.RequestID != "" {
		text += " (request " + p.RequestID + ")"
	}
	return text
}

// CurrentAs decodes what the write met, such as a Comment, into v.
func (p *Problem) CurrentAs(v any) error {
	if len(p.Current) == 0 {
		return errors.New("tidings: the problem has no current object")
	}
	return json.Unmarshal(p.Current, v)
}

// AnswerError is an answer that the API cannot have given: a proxy's page, or a body that broke off.
type AnswerError struct {
	Method, Path string
	Status       int
	ContentType  string
	Excerpt      string        // of the body, at most 200 bytes
	RetryAfter   time.Duration // 0 if the answer does not say
	Err          error         // why the body cannot be read, or nil
}

func (e *AnswerError) Error() string {
	text := fmt.Sprintf("tidings: %s %s: the answer is not the API's: %d %s, %s", e.Method, e.Path, e.Status, http.StatusText(e.Status), e.ContentType)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	if e.Excerpt != "" {
		text += fmt.Sprintf(": %q", e.Excerpt)
	}
	return text
}

// Unwrap returns why the body cannot be read.
func (e *AnswerError) Unwrap() error { return e.Err }

// TransportError is a request without an answer. It wraps the cause: errors.Is finds context.Canceled and context.DeadlineExceeded. Of a write the outcome is
// unknown, unless nothing was sent.
type TransportError struct {
	Method, Path string
	Err          error
}

func (e *TransportError) Error() string {
	return fmt.Sprintf("tidings: %s %s: %v", e.Method, e.Path, e.Err)
}

// Unwrap returns the cause.
func (e *TransportError) Unwrap() error { return e.Err }

// UnknownKindError reports a kind that the installation does not have.
type UnknownKindError struct {
	Kind string
	Have []string // the kinds of this archetype
}

func (e *UnknownKindError) Error() string {
	return fmt.Sprintf("tidings: the API has no kind %q: it has %q", e.Kind, e.Have)
}

// StatusOf returns the status of the answer that err is about, and 0 where there is none.
func StatusOf(err error) int {
	var p *Problem
	var a *AnswerError
	switch {
	case errors.As(err, &p):
		return p.Status
	case errors.As(err, &a):
		return a.Status
	}
	return 0
}

// HasCode reports whether err is a Problem with one of the codes.
func HasCode(err error, codes ...Code) bool {
	var p *Problem
	if !errors.As(err, &p) {
		return false
	}
	for _, c := range codes {
		if p.Code == c {
			return true
		}
	}
	return false
}

// IsNotFound reports that there is no such thing.
func IsNotFound(err error) bool { return HasCode(err, CodeNotFound) }

// IsUnauthenticated reports a token that is unknown, expired or revoked.
func IsUnauthenticated(err error) bool { return HasCode(err, CodeUnauthenticated) }

// IsForbidden reports a token without the role that the operation needs.
func IsForbidden(err error) bool { return HasCode(err, CodeRoleMissing) }

// IsInvalid reports values that the API refuses: Problem.Errors names them.
func IsInvalid(err error) bool {
	var p *Problem
	return errors.As(err, &p) && p.Status == http.StatusUnprocessableEntity
}

// IsStale reports a version that is not current any more: Problem.CurrentAs has the current object.
func IsStale(err error) bool { return HasCode(err, CodeVersionStale) }

// IsGone reports a child that its author or a moderator took away.
func IsGone(err error) bool { return HasCode(err, CodeCommentGone, CodeChildGone) }

// IsRateLimited reports that the token or the user did too much: Problem.RetryAfter says how long to wait.
func IsRateLimited(err error) bool { return HasCode(err, CodeRateLimited) }

// IsUnavailable reports that the API cannot answer now.
func IsUnavailable(err error) bool {
	return HasCode(err, CodeOverloaded, CodeUnavailable, CodeThreadReturning, CodeErasureUnfinished)
}
