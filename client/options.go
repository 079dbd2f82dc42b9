package client

import (
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Option changes one call. The API refuses an option that the operation does not take.
type Option func(*call)

// Actor names who acts, in events and histories.
func Actor(actor string) Option { return Header("Tidings-Actor", actor) }

// Header sets a header of the request, such as traceparent.
func Header(name, value string) Option { return func(k *call) { k.set(name, value) } }

// IdempotencyKey sets the key of a create, in the place of an automatic one: 1 to 255 visible ASCII characters. The same author and key make one child.
func IdempotencyKey(key string) Option { return Header("Idempotency-Key", key) }

// IfMatch makes a write conditional on this version of what it changes, in the place of the version that the object has.
func IfMatch(version int64) Option { return Header("If-Match", etag(version)) }

// IfMatchAny makes a write that needs a version apply to whichever there is.
func IfMatchAny() Option { return Header("If-Match", "*") }

// IfNoneMatch makes a read return ErrNotModified while the ETag (Response.ETag) is current. "*" lets PutSettings only make the first settings.
func IfNoneMatch(etag string) Option { return Header("If-None-Match", etag) }

// PageSize sets the items of a page: 1 to 200, and 50 unless set.
func PageSize(n int) Option { return Query("limit", strconv.Itoa(n)) }

// Cursor begins a list where an earlier one ended: List.Cursor, or the Next or Prev of a Page.
func Cursor(cursor string) Option { return Query("cursor", cursor) }

// Order sorts children: oldest, newest, or threaded where the kind is.
func Order(order string) Option { return Query("order", order) }

// Skip begins a list of children behind the first n.
func Skip(n int64) Option { return Query("skip", strconv.FormatInt(n, 10)) }

// Around begins a list of children so that this one is in the middle of the first page.
func Around(id string) Option { return Query("around", id) }

// Filter keeps of a list of edges those with this value of an attribute. The kind says which attributes can be asked for.
func Filter(attribute, value string) Option { return Query(attribute, value) }

// Role keeps of the members of a group those with this role.
func Role(role string) Option { return Filter("role", role) }

// Query sets a parameter of the query. An empty value takes the parameter away.
func Query(name, value string) Option {
	return func(k *call) {
		if value == "" {
			k.query.Del(name)
			return
		}
		if k.query == nil {
			k.query = make(url.Values)
		}
		k.query.Set(name, value)
	}
}

// WithResponse stores what the API said beside its result, also of an error. Each attempt overwrites it.
func WithResponse(r *Response) Option { return func(k *call) { k.response = r } }

// Response is what an answer says beside its result.
type Response struct {
	Status    int
	RequestID string
	ETag      string    // of what has a version
	Token     string    // the Tidings-Token of a write
	Location  string    // of what a request made
	Replayed  bool      // an earlier create with this Idempotency-Key made the child
	AsOf      time.Time // everything published until then is in the result; zero of what comes from the truth
	RateLimit []RateLimit
	Attempts  int // of this call, 1 without a retry
	Header    http.Header
}

// RateLimit is what the token may still do.
type RateLimit struct {
	Policy    string        // read or write
	Quota     int64         // requests within Window
	Window    time.Duration //
	Remaining int64         // within Reset
	Reset     time.Duration
}
