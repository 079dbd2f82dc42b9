package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/store"
)

// Problem is an RFC 9457 problem detail. Programs branch on Code.
type Problem struct {
	Type      string       `json:"type" doc:"The address that explains the code." format:"uri-reference"`
	Title     string       `json:"title" doc:"The meaning of the code."`
	Status    int          `json:"status"`
	Code      string       `json:"code" doc:"Stable: programs branch on it."`
	Detail    string       `json:"detail,omitempty" doc:"What is wrong with this request."`
	Errors    []FieldError `json:"errors,omitempty"`
	Current   *Current     `json:"current,omitempty"`
	RequestID string       `json:"request_id,omitempty" doc:"The X-Request-Id of the answer."`

	location string // the address of the existing entity, for codeAlreadyWritten
}

// Current is the entity whose version or state did not match a write.
type Current struct{ entity any }

// MarshalJSON writes the entity as its own route does.
func (c Current) MarshalJSON() ([]byte, error) { return json.Marshal(c.entity) }

// Schema describes the member. describeEntities adds the schemas of every kind's entities.
func (Current) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Description: "The current entity, if its version or state did not match."}
}

// FieldError describes an error and its place: in the body, in a parameter of the path or query, or
// in a header.
type FieldError struct {
	Detail    string `json:"detail"`
	Pointer   string `json:"pointer,omitempty" doc:"The place in the body, as a URI fragment (RFC 6901)."`
	Parameter string `json:"parameter,omitempty"`
	Header    string `json:"header,omitempty"`
}

func (p *Problem) Error() string { return p.Code + ": " + p.Detail }

// GetStatus returns the status of the answer.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType returns the media type of RFC 9457.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

// Codes of problems.
const (
	codeBadRequest        = "bad-request"
	codeJSONInvalid       = "json-invalid"
	codeCursorInvalid     = "cursor-invalid"
	codeHeaderInvalid     = "header-invalid"
	codeUnauthenticated   = "unauthenticated"
	codeRoleMissing       = "role-missing"
	codeNotFound          = "not-found"
	codeRouteUnknown      = "route-unknown"
	codeMethodNotAllowed  = "method-not-allowed"
	codeRequestTimeout    = "request-timeout"
	codeParentGone        = "parent-gone"
	codeThreadLocked      = "thread-locked"
	codeCommentGone       = "comment-gone"
	codeChildGone         = "child-gone"
	codeTargetGone        = "target-gone"
	codeAlreadyWritten    = "already-written"
	codeVersionStale      = "version-stale"
	codeRequestTooLarge   = "request-too-large"
	codeTooManyOperations = "too-many-operations"
	codeMediaType         = "unsupported-media-type"
	codeValidation        = "validation-failed"
	codeSelfFollow        = "self-follow"
	codeSelfEdge          = "self-edge"
	codeBodyEmpty         = "body-empty"
	codeBodyTooLong       = "body-too-long"
	codeBodyInvalid       = "body-invalid"
	codeParentUnknown     = "parent-unknown"
	codeTooDeep           = "too-deep"
	codeThreadTooLarge    = "thread-too-large"
	codeKeyReused         = "idempotency-key-reused"
	codeIfMatchMissing    = "if-match-missing"
	codeExportOutdated    = "export-outdated"
	codeErasing           = "erasure-unfinished"
	codeRateLimited       = "rate-limited"
	codeInternal          = "internal"
	codeOverloaded        = "overloaded"
	codeUnavailable       = "unavailable"
	codeThreadReturning   = "thread-returning"
	retryAfter            = "1" // seconds
	problemMediaType      = "application/problem+json"
	wwwAuthenticateHeader = "WWW-Authenticate"
)

// problemKind is one line of the table: a code, its status, and the error of the store that it
// represents.
type problemKind struct {
	Code   string
	Status int
	Title  string
	is     error
	at     FieldError // the place, for errors about one place
}

// problemKinds is the table of all answers outside 2xx and 304.
func problemKinds() []problemKind {
	body := FieldError{Pointer: "#/body"}
	parent := FieldError{Pointer: "#/parent_id"}
	return []problemKind{
		{Code: codeBadRequest, Status: 400, Title: "The request cannot be read"},
		{Code: codeJSONInvalid, Status: 400, Title: "The body is not one JSON value of valid UTF-8 text with unique member names"},
		{Code: codeCursorInvalid, Status: 400, Title: "The cursor does not belong to this list", is: errCursor,
			at: FieldError{Parameter: "cursor"}},
		{Code: codeHeaderInvalid, Status: 400, Title: "A header has an invalid value"},
		{Code: codeUnauthenticated, Status: 401, Title: "The bearer token is missing, unknown, expired or revoked",
			is: tokens.ErrUnauthenticated},
		{Code: codeRoleMissing, Status: 403, Title: "The token lacks the role that the route needs"},
		{Code: codeNotFound, Status: 404, Title: "The resource does not exist", is: store.ErrNotFound},
		{Code: codeRouteUnknown, Status: 404, Title: "There is no such route"},
		{Code: codeMethodNotAllowed, Status: 405, Title: "The route does not support this method"},
		{Code: codeRequestTimeout, Status: 408, Title: "The request took too long to arrive"},
		{Code: codeParentGone, Status: 409, Title: "The parent is not visible", is: store.ErrParentGone, at: parent},
		{Code: codeThreadLocked, Status: 409, Title: "The thread is locked and takes no comments", is: store.ErrThreadLocked},
		{Code: codeCommentGone, Status: 409, Title: "The comment's state does not allow this change; current shows it"},
		{Code: codeChildGone, Status: 409, Title: "The state does not allow this change; current shows it"},
		{Code: codeTargetGone, Status: 409, Title: "The target takes no edges, because it was deleted, hidden, removed or erased"},
		{Code: codeAlreadyWritten, Status: 409,
			Title: "The author has already written one for this object; current and Location name it"},
		{Code: codeExportOutdated, Status: 410, Title: "The export no longer joins the streams, because an erasure began or a stream " +
			"dropped messages; start again without a cursor",
			is: store.ErrExportOutdated},
		{Code: codeVersionStale, Status: 412, Title: "The version in If-Match is not the current one; current shows it"},
		{Code: codeRequestTooLarge, Status: 413, Title: "The request's body is too large"},
		{Code: codeTooManyOperations, Status: 413, Title: fmt.Sprintf("The batch has more than %d operations, or more than the token may "+
			"write per window; nothing was written", maxBatch)},
		{Code: codeMediaType, Status: 415, Title: "The route does not take this media type, charset or content coding"},
		{Code: codeValidation, Status: 422, Title: "Some values are invalid; errors names them", is: store.ErrInvalid},
		{Code: codeSelfFollow, Status: 422, Title: "A user cannot follow themselves"},
		{Code: codeSelfEdge, Status: 422, Title: "An edge of this kind cannot lead from an object to itself", is: store.ErrSelf},
		{Code: codeBodyEmpty, Status: 422, Title: "The comment's body is empty", is: store.ErrBodyEmpty, at: body},
		{Code: codeBodyTooLong, Status: 422, Title: fmt.Sprintf("The comment's body is longer than %d bytes", store.MaxBodyBytes),
			is: store.ErrBodyTooLong, at: body},
		{Code: codeBodyInvalid, Status: 422, Title: "The comment's body contains NUL or invalid UTF-8", is: store.ErrBodyText, at: body},
		{Code: codeParentUnknown, Status: 422, Title: "The parent is not a comment of this post", is: store.ErrParentUnknown, at: parent},
		{Code: codeTooDeep, Status: 422, Title: fmt.Sprintf("Replies nest at most %d levels deep", store.MaxDepth),
			is: store.ErrTooDeep, at: parent},
		{Code: codeThreadTooLarge, Status: 422, Title: fmt.Sprintf("The tree has more than %d comments; read it in pages", maxTree)},
		{Code: codeKeyReused, Status: 422, Title: "The Idempotency-Key was used with another request", is: store.ErrKeyReused,
			at: FieldError{Header: "Idempotency-Key"}},
		{Code: codeIfMatchMissing, Status: 428, Title: "The request needs If-Match with the version to change"},
		{Code: codeRateLimited, Status: 429, Title: "The token or the user made too many requests; retry after the time in Retry-After"},
		{Code: codeInternal, Status: 500, Title: "The server failed"},
		{Code: codeOverloaded, Status: 503, Title: "The server is overloaded and did nothing; retry after the time in Retry-After",
			is: store.ErrOverloaded},
		{Code: codeUnavailable, Status: 503, Title: "A database is unavailable; retry"},
		{Code: codeErasing, Status: 503, Title: "An erasure in the tenant has not finished; retry the export of these edges afterwards",
			is: store.ErrErasing},
		{Code: codeThreadReturning, Status: 503, Title: "The thread is long and is still returning from the archive; retry",
			is: store.ErrThreadReturning},
	}
}

// problemTable is problemKinds with an index by code.
type problemTable struct {
	kinds  []problemKind
	byCode map[string]problemKind
}

func newProblemTable() problemTable {
	t := problemTable{kinds: problemKinds(), byCode: make(map[string]problemKind)}
	for _, k := range t.kinds {
		t.byCode[k.Code] = k
	}
	return t
}

func (t problemTable) problem(code, detail string, at ...FieldError) *Problem {
	k, ok := t.byCode[code]
	if !ok {
		panic("api: no problem has the code " + code)
	}
	return &Problem{Type: "/docs#" + code, Title: k.Title, Status: k.Status, Code: code, Detail: detail, Errors: at}
}

// of returns the problem of an error. logged reports that the error is for the log and must not
// reach the client.
func (t problemTable) of(err error) (p *Problem, logged bool) {
	if errors.As(err, &p) {
		return p, false
	}
	for _, k := range t.kinds {
		if k.is != nil && errors.Is(err, k.is) {
			p := t.problem(k.Code, "")
			if k.at != (FieldError{}) {
				at := k.at
				at.Detail = k.Title
				p.Errors = []FieldError{at}
			}
			return p, false
		}
	}
	if postgres.IsTransient(err) {
		return t.problem(codeUnavailable, ""), true
	}
	return t.problem(codeInternal, ""), true
}

// fromHuma translates the framework's own errors of parsing and validation. A text that breaks
// several rules of its schema (length, pattern, format) has the first error alone.
func (t problemTable) fromHuma(e *huma.ErrorModel) *Problem {
	code := codeBadRequest
	switch e.Status {
	case http.StatusBadRequest:
		if len(e.Errors) > 0 && e.Errors[0].Location == "body" {
			code = codeJSONInvalid
		}
	case http.StatusRequestTimeout:
		code = codeRequestTimeout
	case http.StatusRequestEntityTooLarge:
		code = codeRequestTooLarge
	case http.StatusUnsupportedMediaType:
		code = codeMediaType
	case http.StatusUnprocessableEntity:
		code = codeValidation
	case http.StatusInternalServerError:
		code = codeInternal
	}
	p := t.problem(code, e.Detail)
	wrong := make(map[string]bool) // the places of texts
	for _, d := range e.Errors {
		if d == nil || wrong[d.Location] {
			continue
		}
		_, wrong[d.Location] = d.Value.(string)
		p.Errors = append(p.Errors, fieldError(d.Location, d.Message))
	}
	return p
}

// fieldError translates a location of the framework: body.items[3].tags, path.user_id, query.limit
// or header.If-Match.
func fieldError(location, detail string) FieldError {
	f := FieldError{Detail: detail}
	in, rest, _ := strings.Cut(location, ".")
	switch in {
	case "body":
		f.Pointer = "#"
		if rest != "" {
			f.Pointer += "/" + strings.NewReplacer("~", "~0", "/", "~1", ".", "/", "[", "/", "]", "").Replace(rest)
		}
	case "path", "query":
		f.Parameter = rest
	case "header":
		f.Header = rest
	}
	return f
}

// write sends the problem without the framework.
func (p *Problem) write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", problemMediaType)
	for name, value := range p.headers() {
		h.Set(name, value)
	}
	w.WriteHeader(p.Status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(p) // on an error the client has gone
}

func (p *Problem) headers() map[string]string {
	switch p.Code {
	case codeUnauthenticated:
		return map[string]string{wwwAuthenticateHeader: `Bearer realm="tidings"`}
	case codeUnavailable, codeOverloaded, codeThreadReturning, codeErasing:
		return map[string]string{"Retry-After": retryAfter}
	case codeAlreadyWritten:
		return map[string]string{"Location": p.location}
	}
	return nil
}

// clientGone reports whether err only means that the client no longer waits for the answer.
func clientGone(ctx context.Context, err error) bool {
	return errors.Is(err, context.Canceled) && errors.Is(ctx.Err(), context.Canceled)
}
