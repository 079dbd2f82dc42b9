package client

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Option changes one call. The API refuses an option that the operation does not take.
type Option func(*call)

// Actor names the actor of a write, for events and histories.
func Actor(actor string) Option { return Header("Tidings-Actor", actor) }

// Header sets a header of the request, for example traceparent.
func Header(name, value string) Option { return func(k *call) { k.set(name, value) } }

// IdempotencyKey sets the key of a create, instead of an automatic one: 1 to 255 visible ASCII
// characters. Creates with the same author and key make one child.
func IdempotencyKey(key string) Option { return Header("Idempotency-Key", key) }

// IfMatch makes a write conditional on this version, instead of the version of the object that was
// passed.
func IfMatch(version int64) Option { return Header("If-Match", etag(version)) }

// IfMatchAny makes a write that needs a version apply to any version.
func IfMatchAny() Option { return Header("If-Match", "*") }

// IfNoneMatch makes a read return ErrNotModified while the ETag (Response.ETag) is current. With
// "*", PutSettings succeeds only if no settings exist.
func IfNoneMatch(etag string) Option { return Header("If-None-Match", etag) }

// PageSize sets the number of items of a page: 1 to 200, by default 50.
func PageSize(n int) Option { return Query("limit", strconv.Itoa(n)) }

// Cursor begins a list where an earlier one ended. It is a List.Cursor, or the Next or Prev of a
// Page.
func Cursor(cursor string) Option { return Query("cursor", cursor) }

// Order sorts children: oldest, newest, threaded if the kind is threaded, or top if edges rank it.
func Order(order string) Option { return Query("order", order) }

// Skip begins a list of children after the first n.
func Skip(n int64) Option { return Query("skip", strconv.FormatInt(n, 10)) }

// Around begins a list of children so that this one is in the middle of the first page.
func Around(id string) Option { return Query("around", id) }

// CountsIn adds the counts of these lists of edges, for example likers, to each child of a list.
func CountsIn(lists ...string) Option { return Query("counts", strings.Join(lists, ",")) }

// Filter limits a list of edges to those with this value of an attribute. EdgeKind.Filters has the
// attributes that it takes.
func Filter(attribute, value string) Option { return Query(attribute, value) }

// Role limits the members of a group to those with this role.
func Role(role string) Option { return Filter("role", role) }

// Query sets a parameter of the query. An empty value removes the parameter.
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

// WithResponse stores the facts of the answer beside its result, also of an error. Each attempt
// overwrites them.
func WithResponse(r *Response) Option { return func(k *call) { k.response = r } }

// Response has the facts of an answer beside its result.
type Response struct {
	Status    int
	RequestID string
	ETag      string    // of an entity with a version
	Token     string    // the Tidings-Token of a write
	Location  string    // the path of a created entity
	Replayed  bool      // an earlier create with this Idempotency-Key made the child
	AsOf      time.Time // the result includes every write committed by then; zero if it comes from the truth
	RateLimit []RateLimit
	Attempts  int // of this call; 1 without a retry
	Header    http.Header
}

// RateLimit is one limit of the token, and how much of it is left.
type RateLimit struct {
	Policy    string // read or write
	Quota     int64  // requests within Window
	Window    time.Duration
	Remaining int64 // requests within Reset
	Reset     time.Duration
}
