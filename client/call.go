package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	mathrand "math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Retry configures the repetition of requests.
type Retry struct {
	Attempts int           // in all, with the first one; 0 and 1: no repetition
	First    time.Duration // wait before the second attempt; doubled for each further one, half of it random
	Most     time.Duration // longest wait; if Retry-After is longer, the call returns the problem at once
}

// DefaultRetry makes up to 5 attempts and waits at most 30 seconds before each.
func DefaultRetry() Retry {
	return Retry{Attempts: 5, First: 100 * time.Millisecond, Most: 30 * time.Second}
}

const (
	maxAnswer  = 64 << 20 // bytes of a result
	maxProblem = 1 << 20  // bytes of a problem, which may have an entity whose characters are all escaped
	maxExcerpt = 200
	ndjson     = "application/x-ndjson"
)

// call is one request of an operation, with all its attempts.
type call struct {
	method, path string
	query        url.Values
	header       http.Header
	body         []byte
	media        string
	response     *Response
	err          error // found before the first attempt

	session bool   // reads a projection, so it carries the session's tokens
	safe    bool   // may be repeated if the outcome of an attempt is unknown
	subject string // the entity of the write, for the session; "": the answer's Location
	began   int    // when the attempt began, for the session
	unknown bool   // the outcome of an attempt is unknown
	names   names  // of the kind
}

func newCall(method, path string, opts []Option) *call {
	k := &call{method: method, path: path, safe: method != http.MethodPost, subject: path}
	for _, o := range opts {
		o(k)
	}
	return k
}

// set sets a header.
func (k *call) set(name, value string) *call {
	if k.header == nil {
		k.header = make(http.Header, 2)
	}
	k.header.Set(name, value)
	return k
}

// named sets the names of the kind.
func (k *call) named(n names) *call { k.names = n; return k }

// projected makes the call include the session's writes.
func (k *call) projected() *call { k.session = true; return k }

// repeatable lets a POST be repeated.
func (k *call) repeatable() *call { k.safe = true; return k }

// json sets the body.
func (k *call) json(v any) *call {
	k.body, k.err = json.Marshal(v)
	k.media = "application/json"
	return k
}

// matching makes the call conditional on the version, unless an option did.
func (k *call) matching(version int64) *call {
	if k.header.Get("If-Match") != "" {
		return k
	}
	if version <= 0 {
		k.err = ErrNoVersion
		return k
	}
	return k.set("If-Match", etag(version))
}

// keyed gives a create an Idempotency-Key, unless an option did.
func (k *call) keyed() *call {
	if k.header.Get("Idempotency-Key") == "" {
		k.set("Idempotency-Key", rand.Text())
	}
	k.safe, k.subject = true, ""
	return k
}

func etag(version int64) string { return `"` + strconv.FormatInt(version, 10) + `"` }

// names maps a kind's names to the archetype's, for results of kinds without types in this package.
// A nil names changes none.
type names map[string]string

// decode decodes JSON with the kind's names into v, which has the archetype's.
func (n names) decode(data []byte, v any) error { return json.Unmarshal(n.rename(data), v) }

// rename replaces the names of members, except those within attributes, which the kind chose.
func (n names) rename(data []byte) []byte {
	if n == nil || !json.Valid(data) {
		return data
	}
	out, depth, attributes := make([]byte, 0, len(data)), 0, 0 // attributes: the depth of this member, or 0 outside of it
	for len(data) > 0 {
		text, rest := data[:1], data[1:]
		switch data[0] {
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth <= attributes {
				attributes = 0
			}
		case '"':
			end := 1
			for ; data[end] != '"'; end++ {
				if data[end] == '\\' {
					end++
				}
			}
			text, rest = data[:end+1], bytes.TrimLeft(data[end+1:], " \n\t\r")
			if name := string(data[1:end]); bytes.HasPrefix(rest, []byte(":")) && (attributes == 0 || depth <= attributes) {
				if name == "attributes" {
					attributes = depth
				}
				if as, ok := n[name]; ok {
					text = []byte(`"` + as + `"`)
				}
			}
		}
		out, data = append(out, text...), rest
	}
	return out
}

// fetch sends the call and decodes its result.
func fetch[T any](ctx context.Context, c *core, k *call) (v T, err error) {
	body, a, err := c.do(ctx, k)
	if err != nil {
		return v, err
	}
	if err = k.names.decode(body, &v); err != nil {
		return v, a.broken(k, body, err)
	}
	if k.response != nil {
		if of, ok := any(&v).(interface{ asOf() time.Time }); ok {
			k.response.AsOf = of.asOf()
		}
	}
	return v, nil
}

// do sends the call until it succeeds or may not be repeated, and returns the body of a success.
func (c *core) do(ctx context.Context, k *call) ([]byte, *answer, error) {
	if c == nil {
		return nil, nil, ErrNoClient
	}
	for attempt := 1; ; attempt++ {
		body, a, err := c.attempt(ctx, k, attempt)
		if err == nil {
			return body, a, nil
		}
		if err = c.pause(ctx, k, attempt, err); err != nil {
			return nil, a, err
		}
	}
}

// attempt sends the call once and reads the answer to its end.
func (c *core) attempt(ctx context.Context, k *call, n int) (body []byte, a *answer, err error) {
	if c.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	a, err = c.send(ctx, k, n)
	if err != nil {
		return nil, a, err
	}
	body, err = a.read(maxAnswer)
	if err != nil {
		return nil, a, &TransportError{k.method, k.path, err}
	}
	return body, a, nil
}

// stream sends the call once. The caller reads lines of NDJSON from the answer, and closes it. The
// attempt ends if the API is silent for too long. The time that the caller takes between two reads
// does not count: otherwise a slow caller would lose outcomes that have already arrived.
func (c *core) stream(ctx context.Context, k *call, n int) (*answer, error) {
	limit := c.timeout
	if limit <= 0 {
		limit = math.MaxInt64
	}
	ctx, end := context.WithCancel(ctx)
	l := &lines{limit: limit, end: end}
	l.silence = time.AfterFunc(limit, func() {
		l.silent.Store(true)
		end()
	})
	a, err := c.send(ctx, k, n)
	l.silence.Stop()
	if err != nil {
		end()
		if t := (*TransportError)(nil); errors.As(err, &t) {
			t.Err = l.cause(t.Err)
		}
		return nil, err
	}
	l.ReadCloser, a.Body = a.Body, l
	if media, _, _ := mime.ParseMediaType(a.Header.Get("Content-Type")); media != ndjson {
		excerpt, _ := io.ReadAll(io.LimitReader(l, maxExcerpt))
		_ = l.Close() // errors do not matter: the body was only read
		return nil, a.broken(k, excerpt, errors.New("the answer is not NDJSON"))
	}
	return a, nil
}

// lines is the body of an answer that is read while the API writes it.
type lines struct {
	io.ReadCloser
	limit   time.Duration
	silence *time.Timer // ends the request
	silent  atomic.Bool // it has
	end     context.CancelFunc
}

func (l *lines) Read(p []byte) (int, error) {
	l.silence.Reset(l.limit)
	defer l.silence.Stop()
	n, err := l.ReadCloser.Read(p)
	return n, l.cause(err)
}

// cause returns the limit's error in the place of the one that its end of the request leads to.
func (l *lines) cause(err error) error {
	if err != nil && l.silent.Load() {
		return context.DeadlineExceeded
	}
	return err
}

func (l *lines) Close() error {
	defer l.end()
	return l.ReadCloser.Close()
}

// answer is an answer to a request. If send returned no error, the caller must still read the body.
type answer struct{ *http.Response }

// send sends the call once. An answer outside 2xx is an error. The caller reads and closes the body
// of a success.
func (c *core) send(ctx context.Context, k *call, n int) (*answer, error) {
	if k.err == nil && (strings.Contains(k.path, "//") || strings.Contains(k.path, "/:") || strings.HasSuffix(k.path, "/")) {
		k.err = ErrNoID
	}
	if k.err != nil {
		return nil, k.err
	}
	req, err := c.request(ctx, k)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req) //nolint:bodyclose // the answer closes it
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err // url.Error repeats method and address
		}
		return nil, &TransportError{k.method, k.path, err}
	}
	a := &answer{resp}
	if k.response != nil {
		*k.response = a.response(n)
	}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		c.wrote(k, a)
		return a, nil
	}
	body, err := a.read(maxProblem)
	if resp.StatusCode == http.StatusNotModified {
		return a, ErrNotModified
	}
	return a, a.refusal(k, body, err)
}

func (c *core) request(ctx context.Context, k *call) (*http.Request, error) {
	target := c.base + k.path
	if len(k.query) > 0 {
		target += "?" + k.query.Encode()
	}
	var body io.Reader
	if k.body != nil {
		body = bytes.NewReader(k.body)
	}
	req, err := http.NewRequestWithContext(ctx, k.method, target, body)
	if err != nil {
		return nil, fmt.Errorf("tidings: %w", err)
	}
	for name, values := range k.header {
		req.Header[name] = slices.Clone(values) // a transport may add to them
	}
	req.Header["Authorization"] = []string{c.bearer}
	if k.media != "" {
		req.Header["Content-Type"] = []string{k.media}
	}
	if c.actor != "" && req.Header.Get("Tidings-Actor") == "" && k.method != http.MethodGet {
		req.Header.Set("Tidings-Actor", c.actor)
	}
	if c.session != nil {
		k.began = c.session.begin()
	}
	if k.session && c.session != nil {
		if all := c.session.all(); len(all) > 0 {
			req.Header["Tidings-Token"] = append(req.Header["Tidings-Token"], all...)
		}
	}
	return req, nil
}

// wrote remembers a write in the session.
func (c *core) wrote(k *call, a *answer) {
	if token := a.Header.Get("Tidings-Token"); token != "" && c.session != nil {
		subject := k.subject
		if subject == "" {
			subject = a.Header.Get("Location")
		}
		c.session.put(subject, token, k.began)
	}
}

// read reads the body to its end, so that the connection can be used again, and closes it.
func (a *answer) read(most int64) ([]byte, error) {
	var body []byte
	var err error
	if n := a.ContentLength; n >= 0 && n <= most {
		body = make([]byte, n)
		_, err = io.ReadFull(a.Body, body)
	} else if body, err = io.ReadAll(io.LimitReader(a.Body, most+1)); err == nil && int64(len(body)) > most {
		err = fmt.Errorf("the body is larger than %d bytes", most)
	}
	return body, errors.Join(err, a.Body.Close())
}

// refusal returns the error of an answer outside 2xx.
func (a *answer) refusal(k *call, body []byte, err error) error {
	media, _, _ := mime.ParseMediaType(a.Header.Get("Content-Type"))
	if err == nil && media == "application/problem+json" {
		var p Problem
		if err = json.Unmarshal(body, &p); err == nil && p.Code != "" && (p.Status == 0 || p.Status == a.StatusCode) {
			p.Status = a.StatusCode
			p.RetryAfter = retryAfter(a.Header.Get("Retry-After"))
			if p.RequestID == "" {
				p.RequestID = a.Header.Get("X-Request-Id")
			}
			p.names = k.names
			p.OutcomeUnknown = k.unknown && k.method != http.MethodGet
			return &p
		}
		if err == nil {
			err = errors.New("the problem has no code, or another status")
		}
	}
	return a.broken(k, body, err)
}

// broken returns the error of an answer that does not come from the API.
func (a *answer) broken(k *call, body []byte, err error) error {
	return &AnswerError{k.method, k.path, a.StatusCode, a.Header.Get("Content-Type"),
		strings.ToValidUTF8(string(body[:min(len(body), maxExcerpt)]), "\uFFFD"), retryAfter(a.Header.Get("Retry-After")), err}
}

// pause waits until the call may be sent again. It returns an error if the call must not be sent
// again.
func (c *core) pause(ctx context.Context, k *call, attempt int, err error) error {
	if ctx.Err() != nil || attempt >= c.retry.Attempts {
		return err
	}
	again, known, asked := mayRepeat(err)
	if !again || !known && !k.safe {
		return err
	}
	k.unknown = k.unknown || !known
	wait := c.retry.wait(attempt, asked)
	if end, ok := ctx.Deadline(); asked > c.retry.Most || ok && time.Until(end) < wait {
		return err // the API's problem tells more than an expired deadline
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return &TransportError{k.method, k.path, errors.Join(context.Cause(ctx), err)}
	}
}

// wait returns how long to wait after an attempt. It is partly random, so that clients that were
// refused together do not return together.
func (r Retry) wait(attempt int, asked time.Duration) time.Duration {
	d := time.Duration(min(float64(r.First)*math.Pow(2, float64(attempt-1)), float64(r.Most)))
	if d > 0 {
		d = d/2 + mathrand.N(d/2+1)
	}
	if asked > 0 {
		return asked + min(d, asked/4)
	}
	return d
}

// mayRepeat reports whether a request that failed with err may succeed later, whether it certainly
// did nothing, and how long the API asks to wait.
func mayRepeat(err error) (again, known bool, asked time.Duration) {
	var p *Problem
	var a *AnswerError
	var t *TransportError
	switch {
	case errors.As(err, &p):
		switch p.Code {
		case CodeRateLimited, CodeOverloaded, CodeThreadReturning, CodeErasureUnfinished, CodeRequestTimeout:
			return true, true, p.RetryAfter
		}
		return p.Code == CodeUnavailable, false, p.RetryAfter
	case errors.As(err, &a):
		switch a.Status {
		case http.StatusTooManyRequests:
			return true, true, a.RetryAfter
		case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
			return true, false, a.RetryAfter
		}
		return false, false, 0
	case errors.As(err, &t):
		var bad *tls.CertificateVerificationError
		var dial *net.OpError
		if errors.As(err, &bad) || strings.Contains(t.Err.Error(), "unsupported protocol scheme") {
			return false, true, 0
		}
		return true, errors.As(err, &dial) && dial.Op == "dial", 0
	}
	return false, false, 0
}

// retryAfter reads the value of Retry-After (RFC 9110, 10.2.3): seconds, or a date.
func retryAfter(value string) time.Duration {
	if s, err := strconv.ParseInt(value, 10, 32); err == nil || errors.Is(err, strconv.ErrRange) { // then s is the bound
		return time.Duration(max(s, 0)) * time.Second
	}
	if t, err := http.ParseTime(value); err == nil {
		return max(time.Until(t), 0)
	}
	return 0
}

// response returns the facts of the answer beside its result.
func (a *answer) response(attempts int) Response {
	h := a.Header
	return Response{
		Status: a.StatusCode, RequestID: h.Get("X-Request-Id"), ETag: h.Get("ETag"), Token: h.Get("Tidings-Token"),
		Location: h.Get("Location"),
		Replayed: h.Get("Idempotency-Replayed") == "true", RateLimit: rateLimits(h), Attempts: attempts, Header: h,
	}
}

// rateLimits reads the headers of draft-ietf-httpapi-ratelimit-headers-11: "write";q=100;w=1 and
// "write";r=50;t=1.
func rateLimits(h http.Header) (all []RateLimit) {
	for item := range strings.SplitSeq(h.Get("RateLimit-Policy"), ",") {
		name, parameters := rateItem(item)
		if name == "" {
			continue
		}
		limit := RateLimit{Policy: name, Quota: parameters["q"], Window: time.Duration(parameters["w"]) * time.Second}
		for left := range strings.SplitSeq(h.Get("RateLimit"), ",") {
			if of, p := rateItem(left); of == name {
				limit.Remaining, limit.Reset = p["r"], time.Duration(p["t"])*time.Second
			}
		}
		all = append(all, limit)
	}
	return all
}

func rateItem(item string) (name string, parameters map[string]int64) {
	parameters = make(map[string]int64)
	for i, part := range strings.Split(strings.TrimSpace(item), ";") {
		if i == 0 {
			name = strings.Trim(part, `"`)
			continue
		}
		key, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		if n, err := strconv.ParseInt(value, 10, 64); err == nil {
			parameters[key] = n
		}
	}
	return name, parameters
}

// Call sends a request that the package has no method for, for example of a newer API. It uses the
// token, the retries and the typed errors of all other calls. path begins with /v1/. body is
// encoded as JSON, unless it is nil. The answer is decoded from JSON into result; a *[]byte gets
// the raw body, and nil discards it. If the outcome of a POST is unknown, Call repeats it only with
// an IdempotencyKey.
func (c *Calls) Call(ctx context.Context, method, path string, body, result any, opts ...Option) error {
	k := newCall(method, path, opts)
	k.safe = method != http.MethodPost || k.header.Get("Idempotency-Key") != ""
	if k.session = method == http.MethodGet; !k.session && method == http.MethodPost {
		k.subject = "" // the answer's Location names the created entity
	}
	if body != nil {
		k.json(body)
	}
	answered, a, err := c.core.do(ctx, k)
	if err != nil {
		return err
	}
	switch result := result.(type) {
	case nil:
	case *[]byte:
		*result = answered
	default:
		if err := json.Unmarshal(answered, result); err != nil {
			return a.broken(k, answered, err)
		}
	}
	return nil
}
