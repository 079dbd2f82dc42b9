package client

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/tidings/tidings/event"
)

// ID is the id of a user, a post or any other object. You choose it: a number, a UUID or other text
// of at most 128 of the characters A-Z a-z 0-9 - _ . ~ : @ | + =.
type ID = event.ID

// ParseID reads an id, or returns an error that quotes the text and states the rule.
func ParseID(s string) (ID, error) { return event.ParseID(s) }

// IDOf returns the id that is a decimal number.
func IDOf[N ~int | ~int64](n N) ID { return event.IDOf(n) }

// segment is the id in a path. It has no colon, because in paths a colon begins a verb.
func segment(id ID) string { return strings.ReplaceAll(url.PathEscape(string(id)), ":", "%3A") }

// Client calls the API. Make one with New and share it: it is safe for concurrent use. Every call
// of a zero Client returns ErrNoClient.
type Client struct{ Calls }

// Calls has the operations that a Client and a Session have.
type Calls struct {
	BuiltinKinds
	DLQ DLQ

	core *core
}

func newCalls(c *core) Calls { return Calls{BuiltinKinds: builtinKinds(c), DLQ: DLQ{c}, core: c} }

// Caller is a *Client or a *Session.
type Caller interface{ calls() *Calls }

func (c *Calls) calls() *Calls { return c }

// core is shared by all services of a client.
type core struct {
	*settings
	session *tokens // nil outside a session
}

// settings are the settings of New.
type settings struct {
	base    string
	token   string
	bearer  string // the header's value
	actor   string
	http    *http.Client
	retry   Retry
	timeout time.Duration
	kinds   kindCache
}

// kindCache keeps the kinds that the API listed last.
type kindCache struct {
	mu   sync.Mutex
	list *KindList
}

// Setting changes how a Client works.
type Setting func(*settings)

// WithToken sets the bearer token. `tidings token create` makes one.
func WithToken(token string) Setting { return func(s *settings) { s.token = token } }

// WithActor names the actor of writes, for events and histories. The default is the token's name.
// The option Actor overrides it for one call.
func WithActor(actor string) Setting { return func(s *settings) { s.actor = actor } }

// WithHTTPClient sets the client that sends requests. Use its transport for tracing, metrics and
// TLS. By default New makes a client that keeps 100 idle connections.
func WithHTTPClient(h *http.Client) Setting { return func(s *settings) { s.http = h } }

// WithRetry sets how requests are repeated. The zero Retry repeats none.
func WithRetry(r Retry) Setting { return func(s *settings) { s.retry = r } }

// WithAttemptTimeout bounds each attempt. The default is 30 seconds, and 0 sets no bound. For
// batches and exports, it bounds the silence of the API: the time that the caller takes for an item
// does not count. The context bounds all attempts together.
func WithAttemptTimeout(d time.Duration) Setting { return func(s *settings) { s.timeout = d } }

// New returns a client of the API at baseURL, for example https://tidings.example. It sends
// nothing. It returns an error if baseURL or the token is invalid.
func New(baseURL string, with ...Setting) (*Client, error) {
	s := &settings{retry: DefaultRetry(), timeout: 30 * time.Second}
	for _, set := range with {
		set(s)
	}
	u, err := url.Parse(baseURL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return nil, fmt.Errorf("tidings: %q is not an API's address: want http://HOST:PORT or https://HOST", baseURL)
	}
	s.base = strings.TrimRight(baseURL, "/")
	if s.token == "" || strings.ContainsFunc(s.token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("tidings: the token is missing or is not visible ASCII: use client.WithToken")
	}
	s.bearer = "Bearer " + s.token
	var h http.Client
	if s.http != nil {
		h = *s.http
	} else if t, ok := http.DefaultTransport.(*http.Transport); ok {
		t = t.Clone()
		t.MaxIdleConnsPerHost = t.MaxIdleConns
		h.Transport = t
	}
	if h.CheckRedirect == nil { // a redirect must not turn a PUT into a GET
		h.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	}
	s.http = &h
	return &Client{newCalls(&core{settings: s})}, nil
}

// Close closes idle connections. The client may be used afterwards.
func (c *Client) Close() {
	if c.core != nil {
		c.core.http.CloseIdleConnections()
	}
}
