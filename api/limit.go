package api

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/tidings/tidings/tokens"
)

// The policies of rate limits: their names in headers and in api_rate_limited_total.
const (
	policyRead   = "read"
	policyWrite  = "write"
	policyAuthor = "author"
	policyToken  = "unknown"
)

// limitedKeys is how many windows are kept, of tokens and of authors: some 30 MiB each at most.
const limitedKeys = 1 << 17

// Headers of draft-ietf-httpapi-ratelimit-headers-11 (May 2026).
const (
	rateLimitPolicyHeader = "RateLimit-Policy"
	rateLimitHeader       = "RateLimit"
)

// limiter counts requests in windows, one per key, that begin with the key's first request. Windows and not a bucket that leaks: what the
// headers say is then exactly so (r more requests within t seconds), and the most that can come within any window's length is the same, twice
// the rate. It counts for this process alone. Its memory is bounded: of more keys than it keeps, the one that was not heard of for longest begins
// anew. Safe for concurrent use.
type limiter[K comparable] struct {
	mu      sync.Mutex
	windows *simplelru.LRU[K, window]
}

type window struct {
	ends time.Time
	used int64 // may exceed the rate, by less than as much again: a batch is charged when it is there, and the next window pays
}

func newLimiter[K comparable](keep int) *limiter[K] {
	windows, _ := simplelru.NewLRU[K, window](keep, nil) // of a size above 0
	return &limiter[K]{windows: windows}
}

// quota is what a key has left, and for how long that has to last.
type quota struct {
	left int64
	t    time.Duration // until there is more
}

// seconds are rounded up: who waits for so long is not refused again.
func (q quota) seconds() string { return fmt.Sprint(int64((q.t + time.Second - 1) / time.Second)) }

// take counts a request of the key if one may still come; else it counts nothing, and q.t is how long to wait.
func (l *limiter[K]) take(key K, rate tokens.Rate, at time.Time) (q quota, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, _ := l.windows.Get(key)
	if late := at.Sub(w.ends); late >= 0 {
		owed := w.used - rate.N
		if w.ends = w.ends.Add(rate.Window); owed > 0 && late < rate.Window { // a batch's: this window pays, and never the ones that follow
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

// full reports that none of the key's may come now.
func (l *limiter[K]) full(key K, rate tokens.Rate, at time.Time) (q quota, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, known := l.windows.Get(key)
	if !known || w.used < rate.N || !at.Before(w.ends) {
		return quota{}, false
	}
	return w.quota(rate, at), true
}

// tokenKey is a token, the tenant first. Tokens of one name share their limits.
type tokenKey struct {
	tenant int64
	name   string
	policy string
}

type authorKey struct{ tenant, user int64 }

// more counts n more requests of a key of which one was taken just now, unless others have used the window up since then. n is less than
// rate.N, so that the next window can pay for what exceeds this one.
func (l *limiter[K]) more(key K, rate tokens.Rate, n int64, at time.Time) (q quota, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, known := l.windows.Get(key)
	if !known {
		w = window{ends: at.Add(rate.Window)} // it fell out of memory meanwhile
	}
	if ok = w.used <= rate.N; ok {
		w.used += n
	}
	l.windows.Add(key, w)
	return w.quota(rate, at), ok
}

func (w window) quota(rate tokens.Rate, at time.Time) quota {
	return quota{left: max(0, rate.N-w.used), t: w.ends.Sub(at)}
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
	return &limits{cfg: cfg, tokens: newLimiter[tokenKey](limitedKeys), authors: newLimiter[authorKey](limitedKeys), unknown: newLimiter[netip.Prefix](limitedKeys), metrics: m, clock: time.Now}
}

// rate is that of the token.
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

// request counts a request of the token, and says in the answer's header what is left. false: it is one too many.
func (l *limits) request(h http.Header, p tokens.Principal, policy string) bool {
	rate := l.rate(p, policy)
	if rate.Off() {
		return true
	}
	q, ok := l.tokens.take(tokenKey{p.TenantID, p.Name, policy}, rate, l.clock())
	l.tell(h, policy, rate, q, ok)
	return ok
}

// batch counts the operations of a batch, at most the rate's, whose request was counted as one. false: other batches came before it.
func (l *limits) batch(h http.Header, p tokens.Principal, operations int) bool {
	rate := l.rate(p, policyWrite)
	if rate.Off() {
		return true
	}
	q, ok := l.tokens.more(tokenKey{p.TenantID, p.Name, policyWrite}, rate, int64(operations)-1, l.clock())
	h.Del(rateLimitPolicyHeader)
	h.Del(rateLimitHeader)
	l.tell(h, policyWrite, rate, q, ok)
	return ok
}

// author counts a creation by a user, likewise. A token whose own writes are without a limit, an importer's, has none here either.
func (l *limits) author(h http.Header, p tokens.Principal, user int64) bool {
	rate := l.cfg.RateAuthor
	if rate.Off() || p.WriteRate != nil && p.WriteRate.Off() {
		return true
	}
	q, ok := l.authors.take(authorKey{p.TenantID, user}, rate, l.clock())
	l.tell(h, policyAuthor, rate, q, ok)
	return ok
}

// mayGuess reports whether a look-up of a token from the address may be made. false: it has brought too many that nobody knows.
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

// guessed counts a token that nobody knows.
func (l *limits) guessed(from netip.Prefix) {
	if !l.cfg.RateUnknown.Off() {
		l.unknown.take(from, l.cfg.RateUnknown, l.clock())
	}
}

// clientOf is who counts as one client: an address, of IPv6 a network of 64 bits.
func clientOf(r *http.Request) netip.Prefix {
	a, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Prefix{} // a test's
	}
	ip := a.Addr().Unmap().WithZone("")
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits) // of a valid address
	return p
}

// tell writes the headers, but for an operation of a batch, which has none (nil).
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

// limitRequest counts the request against the limit of its token.
func (s *server) limitRequest(h http.Header, p tokens.Principal, op route) error {
	policy := policyRead
	if op.writes() {
		policy = policyWrite
	}
	if s.limits.request(h, p, policy) {
		return nil
	}
	return s.rateLimited(policy)
}

func (s *server) rateLimited(policy string) error {
	return s.problems.problem(codeRateLimited, "the token has made its "+policy+"s for now")
}

// limitBatch counts the operations of a batch. One that no window could hold is refused: it would be paid by so many later ones.
func (s *server) limitBatch(c caller, operations int) error {
	if rate := s.limits.rate(c.Principal, policyWrite); !rate.Off() && int64(operations) > rate.N {
		return s.problems.problem(codeTooManyOperations, fmt.Sprintf("the token may write %d times in %s: %d operations are more than that", rate.N, rate.Window, operations))
	}
	if !s.limits.batch(c.answer, c.Principal, operations) {
		return s.rateLimited(policyWrite)
	}
	return nil
}

// limitAuthor counts a creation by the user.
func (s *server) limitAuthor(ctx context.Context, user int64) error {
	c := callerOf(ctx)
	if s.limits.author(c.answer, c.Principal, user) {
		return nil
	}
	return s.problems.problem(codeRateLimited, fmt.Sprintf("user %d has made what one user may make for now", user))
}
