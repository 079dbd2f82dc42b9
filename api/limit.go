package api

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
)

// The policies of rate limits. Headers and tidings_api_rate_limited_requests_total have these
// names.
const (
	policyRead   = "read"
	policyWrite  = "write"
	policyAuthor = "author"
	policyToken  = "unknown"
)

// limitedKeys is how many windows of tokens are kept, and how many of authors: some 30 MiB each at
// most.
const limitedKeys = 1 << 17

// Headers of draft-ietf-httpapi-ratelimit-headers-11 (May 2026).
const (
	rateLimitPolicyHeader = "RateLimit-Policy"
	rateLimitHeader       = "RateLimit"
)

// limiter counts requests in windows. Each key has its own window, which begins with the key's
// first request. A window makes the headers exact (r more requests within t seconds), which a
// leaking bucket does not. Both allow up to twice the rate within the length of a window. A limiter
// counts for this process alone. It keeps a bounded number of keys: it forgets the key that has had
// no request for longest. It is safe for concurrent use.
type limiter[K comparable] struct {
	mu      sync.Mutex
	windows *simplelru.LRU[K, window]
}

type window struct {
	ends time.Time
	// used may exceed the rate, by less than the rate itself: a batch is charged when it has
	// arrived, and the next window pays.
	used int64
}

func newLimiter[K comparable](keep int) *limiter[K] {
	windows, _ := simplelru.NewLRU[K, window](keep, nil) // of a size above 0
	return &limiter[K]{windows: windows}
}

// quota is the number of requests that a key has left, and for how long.
type quota struct {
	left int64
	t    time.Duration // until the window ends
}

// seconds rounds up, so that a client that waits so long is not refused again.
func (q quota) seconds() string { return fmt.Sprint(int64((q.t + time.Second - 1) / time.Second)) }

// take counts a request of the key if the window has room for it. Otherwise it counts nothing, and
// q.t is how long to wait.
func (l *limiter[K]) take(key K, rate tokens.Rate, at time.Time) (q quota, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, _ := l.windows.Get(key)
	if late := at.Sub(w.ends); late >= 0 {
		owed := w.used - rate.N
		// A batch exceeded the previous window: this window pays for it, and no later one.
		if w.ends = w.ends.Add(rate.Window); owed > 0 && late < rate.Window {
			w.used = min(owed, rate.N-1)
		} else {
			w = window{ends: at.Add(rate.Window)}
		}
	}
	ok = w.used < rate.N
	if ok {
		w.used++
	}
	l.windows.Add(key, w)
	return w.quota(rate, at), ok
}

// full reports whether the key has no request left now.
func (l *limiter[K]) full(key K, rate tokens.Rate, at time.Time) (q quota, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, known := l.windows.Get(key)
	if !known || w.used < rate.N || !at.Before(w.ends) {
		return quota{}, false
	}
	return w.quota(rate, at), true
}

// tokenKey names the window of a token and a policy. Tokens of one name share their limits, and so
// do tokens that one of them made.
type tokenKey struct {
	tenant int64
	name   string
	policy string
}

type authorKey struct {
	tenant int64
	user   event.ID
}

// more counts n further requests of a key after take has counted one, unless other requests have
// used up the window since. n is less than rate.N, so that the next window can pay for the excess.
func (l *limiter[K]) more(key K, rate tokens.Rate, n int64, at time.Time) (q quota, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, known := l.windows.Get(key)
	if !known {
		w = window{ends: at.Add(rate.Window)} // the limiter forgot it meanwhile
	}
	if ok = w.used <= rate.N; ok {
		w.used += n
	}
	l.windows.Add(key, w)
	return w.quota(rate, at), ok
}

// quota returns what is left at a time. A request may have read the clock before the one that began
// the window.
func (w window) quota(rate tokens.Rate, at time.Time) quota {
	return quota{left: max(0, rate.N-w.used), t: min(w.ends.Sub(at), rate.Window)}
}

// limits are the rate limits of this process.
type limits struct {
	cfg     Config
	tokens  *limiter[tokenKey]
	authors *limiter[authorKey]
	unknown *limiter[netip.Prefix]
	metrics *metrics
	clock   func() time.Time
}

func newLimits(cfg Config, m *metrics) *limits {
	return &limits{cfg: cfg, tokens: newLimiter[tokenKey](limitedKeys), authors: newLimiter[authorKey](limitedKeys),
		unknown: newLimiter[netip.Prefix](limitedKeys), metrics: m, clock: time.Now}
}

// rate returns the token's rate for the policy.
func (l *limits) rate(p tokens.Principal, policy string) tokens.Rate {
	rate, own := l.cfg.RateRead, p.ReadRate
	if policy == policyWrite {
		rate, own = l.cfg.RateWrite, p.WriteRate
	}
	if own != nil {
		rate = *own
	}
	return rate
}

// mayGuess reports whether the API may look up a token from the address. It returns false if the
// address has sent too many unknown tokens.
func (l *limits) mayGuess(h http.Header, from netip.Prefix) bool {
	if l.cfg.RateUnknown.Off() {
		return true
	}
	q, full := l.unknown.full(from, l.cfg.RateUnknown, l.clock())
	if full {
		l.tell(nil, policyToken, l.cfg.RateUnknown, q, false)
		h.Set("Retry-After", q.seconds())
	}
	return !full
}

// guessed counts an unknown token.
func (l *limits) guessed(from netip.Prefix) {
	if !l.cfg.RateUnknown.Off() {
		l.unknown.take(from, l.cfg.RateUnknown, l.clock())
	}
}

// clientOf returns the network that counts as one client: an IPv4 address, or an IPv6 network of 64
// bits.
func clientOf(r *http.Request) netip.Prefix {
	a, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Prefix{} // in a test
	}
	ip := a.Addr().Unmap().WithZone("")
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits) // of a valid address
	return p
}

// tell sets the headers. An operation of a batch has none: then h is nil.
func (l *limits) tell(h http.Header, policy string, rate tokens.Rate, q quota, ok bool) {
	if !ok {
		l.metrics.limited.WithLabelValues(policy).Inc()
	}
	if h == nil {
		return
	}
	h.Add(rateLimitPolicyHeader, fmt.Sprintf("%q;q=%d;w=%d", policy, rate.N, int64(rate.Window/time.Second)))
	h.Add(rateLimitHeader, fmt.Sprintf("%q;r=%d;t=%s", policy, q.left, q.seconds()))
	if !ok {
		h.Set("Retry-After", q.seconds())
	}
}

// limitRequest counts the request against the limit of its token, and sets the headers of what is
// left.
func (s *server) limitRequest(h http.Header, p tokens.Principal, op route) error {
	policy := policyRead
	if op.writes() {
		policy = policyWrite
	}
	l := s.limits
	rate := l.rate(p, policy)
	if rate.Off() {
		return nil
	}
	q, ok := l.tokens.take(tokenKey{p.TenantID, p.Limits, policy}, rate, l.clock())
	if l.tell(h, policy, rate, q, ok); !ok {
		return s.rateLimited(policy)
	}
	return nil
}

func (s *server) rateLimited(policy string) error {
	return s.problems.problem(codeRateLimited, "the token has used up its "+policy+"s for now")
}

// limitBatch counts the operations of a batch, of which limitRequest has counted the first. It
// refuses a batch that exceeds a whole window, because many later windows would pay for it.
func (s *server) limitBatch(c caller, operations int) error {
	l := s.limits
	rate := l.rate(c.Principal, policyWrite)
	if rate.Off() {
		return nil
	}
	if int64(operations) > rate.N {
		return s.problems.problem(codeTooManyOperations,
			fmt.Sprintf("the token may write %d times in %s, and the batch has %d operations", rate.N, rate.Window, operations))
	}
	q, ok := l.tokens.more(tokenKey{c.TenantID, c.Limits, policyWrite}, rate, int64(operations)-1, l.clock())
	c.answer.Del(rateLimitPolicyHeader)
	c.answer.Del(rateLimitHeader)
	if l.tell(c.answer, policyWrite, rate, q, ok); !ok {
		return s.rateLimited(policyWrite)
	}
	return nil
}

// limitAuthor counts a creation against the limit of the user. If the token's own writes are
// unlimited, for example an importer's, it counts nothing.
func (s *server) limitAuthor(ctx context.Context, user event.ID) error {
	c, l := callerOf(ctx), s.limits
	rate := l.cfg.RateAuthor
	if rate.Off() || c.WriteRate != nil && c.WriteRate.Off() {
		return nil
	}
	q, ok := l.authors.take(authorKey{c.TenantID, user}, rate, l.clock())
	if l.tell(c.answer, policyAuthor, rate, q, ok); !ok {
		return s.problems.problem(codeRateLimited, fmt.Sprintf("user %s has used up the limit of one user for now", user))
	}
	return nil
}
