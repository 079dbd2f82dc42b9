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

// The codes of problems. In docs/api.md, each has its members and headers.
const (
	// CodeBadRequest (400): the request cannot be read.
	CodeBadRequest Code = "bad-request"
	// CodeJSONInvalid (400): the body is not one JSON value of valid UTF-8 text with unique member
	// names.
	CodeJSONInvalid Code = "json-invalid"
	// CodeCursorInvalid (400): the cursor does not belong to this list.
	CodeCursorInvalid Code = "cursor-invalid"
	// CodeHeaderInvalid (400): a header has an invalid value.
	CodeHeaderInvalid Code = "header-invalid"
	// CodeUnauthenticated (401): the bearer token is missing, unknown, expired or revoked.
	CodeUnauthenticated Code = "unauthenticated"
	// CodeRoleMissing (403): the token lacks the role that the route needs.
	CodeRoleMissing Code = "role-missing"
	// CodeNotFound (404): the resource does not exist.
	CodeNotFound Code = "not-found"
	// CodeRouteUnknown (404): there is no such route.
	CodeRouteUnknown Code = "route-unknown"
	// CodeMethodNotAllowed (405): the route does not support this method.
	CodeMethodNotAllowed Code = "method-not-allowed"
	// CodeRequestTimeout (408): the request took too long to arrive.
	CodeRequestTimeout Code = "request-timeout"
	// CodeParentGone (409): the parent is not visible.
	CodeParentGone Code = "parent-gone"
	// CodeThreadLocked (409): the thread is locked and takes no comments.
	CodeThreadLocked Code = "thread-locked"
	// CodeCommentGone (409): the comment's state does not allow this change; see Problem.CurrentAs.
	CodeCommentGone Code = "comment-gone"
	// CodeChildGone (409): the state does not allow this change; see Problem.CurrentAs.
	CodeChildGone Code = "child-gone"
	// CodeTargetGone (409): the target takes no edges, because it was deleted, hidden, removed or
	// erased.
	CodeTargetGone Code = "target-gone"
	// CodeAlreadyWritten (409): the author has already written one for this object; see
	// Problem.CurrentAs.
	CodeAlreadyWritten Code = "already-written"
	// CodeVersionStale (412): the version in If-Match is not the current one; see
	// Problem.CurrentAs.
	CodeVersionStale Code = "version-stale"
	// CodeRequestTooLarge (413): the request's body is too large.
	CodeRequestTooLarge Code = "request-too-large"
	// CodeTooManyOperations (413): the batch has too many operations, or more than the token may
	// write per window; nothing was written.
	CodeTooManyOperations Code = "too-many-operations"
	// CodeUnsupportedMediaType (415): the route does not take this media type, charset or content
	// coding.
	CodeUnsupportedMediaType Code = "unsupported-media-type"
	// CodeValidationFailed (422): some values are invalid; errors names them.
	CodeValidationFailed Code = "validation-failed"
	// CodeSelfFollow (422): a user cannot follow themselves.
	CodeSelfFollow Code = "self-follow"
	// CodeSelfEdge (422): an edge of this kind cannot lead from an object to itself.
	CodeSelfEdge Code = "self-edge"
	// CodeBodyEmpty (422): the comment's body is empty.
	CodeBodyEmpty Code = "body-empty"
	// CodeBodyTooLong (422): the comment's body is too long.
	CodeBodyTooLong Code = "body-too-long"
	// CodeBodyInvalid (422): the comment's body contains NUL or invalid UTF-8.
	CodeBodyInvalid Code = "body-invalid"
	// CodeParentUnknown (422): the parent is not a comment of this post.
	CodeParentUnknown Code = "parent-unknown"
	// CodeTooDeep (422): replies nest too deep.
	CodeTooDeep Code = "too-deep"
	// CodeThreadTooLarge (422): the tree has too many comments; read it in pages.
	CodeThreadTooLarge Code = "thread-too-large"
	// CodeIdempotencyKeyReused (422): the Idempotency-Key was used with another request.
	CodeIdempotencyKeyReused Code = "idempotency-key-reused"
	// CodeIfMatchMissing (428): the request needs If-Match with the version to change.
	CodeIfMatchMissing Code = "if-match-missing"
	// CodeExportOutdated (410): the export no longer joins the streams, because an erasure began or
	// a stream dropped messages; start again without a cursor.
	CodeExportOutdated Code = "export-outdated"
	// CodeErasureUnfinished (503): an erasure in the tenant has not finished; retry the export of
	// these edges afterwards.
	CodeErasureUnfinished Code = "erasure-unfinished"
	// CodeRateLimited (429): the token or the user made too many requests; retry after the time in
	// Retry-After.
	CodeRateLimited Code = "rate-limited"
	// CodeInternal (500): the server failed.
	CodeInternal Code = "internal"
	// CodeOverloaded (503): the server is overloaded and did nothing; retry after the time in
	// Retry-After.
	CodeOverloaded Code = "overloaded"
	// CodeUnavailable (503): a database is unavailable; retry.
	CodeUnavailable Code = "unavailable"
	// CodeThreadReturning (503): the thread is long and is still returning from the archive; retry.
	CodeThreadReturning Code = "thread-returning"
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
