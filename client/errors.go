package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// Code identifies a problem. Codes are stable, so programs branch on them.
type Code string

// The codes of problems. docs/api.md explains each.
const (
	CodeBadRequest           Code = "bad-request"
	CodeJSONInvalid          Code = "json-invalid"
	CodeCursorInvalid        Code = "cursor-invalid"
	CodeHeaderInvalid        Code = "header-invalid"
	CodeUnauthenticated      Code = "unauthenticated"
	CodeRoleMissing          Code = "role-missing"
	CodeNotFound             Code = "not-found"
	CodeRouteUnknown         Code = "route-unknown"
	CodeMethodNotAllowed     Code = "method-not-allowed"
	CodeRequestTimeout       Code = "request-timeout"
	CodeParentGone           Code = "parent-gone"
	CodeThreadLocked         Code = "thread-locked"
	CodeCommentGone          Code = "comment-gone"
	CodeChildGone            Code = "child-gone"
	CodeTargetGone           Code = "target-gone"
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

// ErrNotModified reports that the ETag in IfNoneMatch is still current.
var ErrNotModified = errors.New("tidings: not modified")

// ErrNoVersion reports a change of an object whose Version is 0: read the object first, or use
// IfMatch or IfMatchAny.
var ErrNoVersion = errors.New("tidings: the object has no version: read it first, or use client.IfMatch or client.IfMatchAny")

// ErrNoID reports a call for an object whose id is empty. It is not sent.
var ErrNoID = errors.New("tidings: the object has no id")

// ErrNoClient reports a call of a zero Client, or of a part of one. New makes a Client.
var ErrNoClient = errors.New("tidings: the client is a zero value: make it with client.New")

// Problem is an answer of the API outside 2xx and 304 (RFC 9457).
type Problem struct {
	Type      string          `json:"type"`
	Title     string          `json:"title"`
	Status    int             `json:"status"`
	Code      Code            `json:"code"`
	Detail    string          `json:"detail,omitempty"`
	Errors    []FieldError    `json:"errors,omitempty"`
	Current   json.RawMessage `json:"current,omitempty"` // the current entity, if the version or the state did not match; see CurrentAs
	RequestID string          `json:"request_id,omitempty"`

	// RetryAfter is how long the API asks to wait; 0 if it does not ask.
	RetryAfter time.Duration `json:"-"`
	// OutcomeUnknown reports that an earlier attempt of this write may have succeeded. Then a stale
	// version may be the result of that attempt.
	OutcomeUnknown bool `json:"-"`

	names names // of Current's kind
}

// FieldError describes an error in a request and its place.
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

// CurrentAs decodes the current entity into v, for example a *Comment, or a *Child or an *Edge of a
// kind of your own. A type of your own may have the names of Current.
func (p *Problem) CurrentAs(v any) error {
	if len(p.Current) == 0 {
		return errors.New("tidings: the problem has no current object")
	}
	if err := json.Unmarshal(p.Current, v); err != nil || p.names == nil {
		return err
	}
	return p.names.decode(p.Current, v)
}

// AnswerError is an answer that does not come from the API, for example a proxy's page, or that is
// incomplete.
type AnswerError struct {
	Method, Path string
	Status       int
	ContentType  string
	Excerpt      string        // the beginning of the body, at most 200 bytes
	RetryAfter   time.Duration // 0 if the answer does not say
	Err          error         // the error of reading the body, or nil
}

func (e *AnswerError) Error() string {
	text := fmt.Sprintf("tidings: %s %s: unexpected answer: %d %s, %s", e.Method, e.Path, e.Status,
		http.StatusText(e.Status), e.ContentType)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	if e.Excerpt != "" {
		text += fmt.Sprintf(": %q", e.Excerpt)
	}
	return text
}

// Unwrap returns the error of reading the body.
func (e *AnswerError) Unwrap() error { return e.Err }

// TransportError reports a request without an answer. It wraps the cause: errors.Is finds
// context.Canceled and context.DeadlineExceeded. The outcome of a write is unknown, unless nothing
// was sent.
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
	Have []string // the kinds or objects that the installation has
}

func (e *UnknownKindError) Error() string {
	return fmt.Sprintf("tidings: the API has no kind %q: it has %q", e.Kind, e.Have)
}

// StatusOf returns the HTTP status of a Problem or an AnswerError, and 0 for other errors.
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

// IsNotFound reports whether the object does not exist. It is false if the API has no such route
// (CodeRouteUnknown).
func IsNotFound(err error) bool { return HasCode(err, CodeNotFound) }

// IsUnauthenticated reports whether the token is unknown, expired or revoked.
func IsUnauthenticated(err error) bool { return HasCode(err, CodeUnauthenticated) }

// IsForbidden reports whether the token lacks the role that the operation needs.
func IsForbidden(err error) bool { return HasCode(err, CodeRoleMissing) }

// IsInvalid reports whether the API refused values of the request. Problem.Errors names them.
func IsInvalid(err error) bool {
	var p *Problem
	return errors.As(err, &p) && p.Status == http.StatusUnprocessableEntity
}

// IsStale reports whether the version is no longer current. Problem.CurrentAs decodes the current
// object.
func IsStale(err error) bool { return HasCode(err, CodeVersionStale) }

// IsGone reports whether the child's state does not allow the change: the child is deleted or
// erased, or an edit or an edge to it meets a hidden or removed one.
func IsGone(err error) bool { return HasCode(err, CodeCommentGone, CodeChildGone, CodeTargetGone) }

// IsRateLimited reports whether the token or the user made too many requests. Problem.RetryAfter is
// how long to wait.
func IsRateLimited(err error) bool { return HasCode(err, CodeRateLimited) }

// IsUnavailable reports whether the API cannot serve the request now.
func IsUnavailable(err error) bool {
	return HasCode(err, CodeOverloaded, CodeUnavailable, CodeThreadReturning, CodeErasureUnfinished)
}
