package api

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	bounds "github.com/tidings/tidings/internal/shares" // shares is the name of a kind
	"github.com/tidings/tidings/internal/tokens"
)

const (
	// authTTL is how long a revoked or expired token may continue to work. It counts from the start
	// of the query that read the token's state.
	authTTL = time.Second
	// authKeep is how many tokens are remembered: some 50 MiB at most.
	authKeep = 1 << 17
	// authUnknown is how many unknown tokens are remembered, each for authTTL.
	authUnknown = 1 << 14
	// authAge is the age at which a token is looked up again without a notice of a change. This
	// finds a row that somebody deleted by hand. Each token has its own age, between authAge and
	// twice that. So tokens that were looked up together after a start are not looked up together
	// again.
	authAge = time.Hour
)

// errBusy reports that too many look-ups of tokens wait.
var errBusy = errors.New("api: too many look-ups of tokens wait")

// lookup reads tokens from the truth (tokens.Lookup).
type lookup interface {
	Find(ctx context.Context, h tokens.Hash) (p tokens.Principal, asOf time.Time, err error)
	Changed(ctx context.Context, since int64) (changed []tokens.Hash, last int64, all bool, asOf time.Time, err error)
}

// authenticator remembers tokens. At most once per half of authTTL it reads which tokens have
// changed, whatever their number. So a known token costs no query. Every process refuses a revoked
// token a second later, without a message that could be lost.
//
//	known, and changes read within the last second ──▶ accepted
//	unknown within the last second                 ──▶ refused
//	otherwise: a look-up, in one of a few slots    ──▶ known or unknown
type authenticator struct {
	truth lookup
	now   func() time.Time
	slots chan struct{} // one per look-up that runs
	queue chan struct{} // one per request that waits for a slot or has one: some 100 ms of look-ups
	asks  chan struct{} // held by the request that reads changes

	mu      sync.Mutex
	known   *simplelru.LRU[tokens.Hash, authenticated]
	unknown *simplelru.LRU[tokens.Hash, time.Time]
	change  int64     // the last change that was read
	heard   time.Time // every change before this time is known
	rounds  int       // reads that found changes
}

type authenticated struct {
	principal tokens.Principal
	asOf      time.Time
	age       time.Duration // at which the token is looked up again
}

// TokenConns is the number of connections of the pool for tokens: one reads changes, the others
// look tokens up. Requests do not use this pool.
const TokenConns = 3

func newAuthenticator(truth lookup) *authenticator {
	known, _ := simplelru.NewLRU[tokens.Hash, authenticated](authKeep, nil) // of a size above 0
	unknown, _ := simplelru.NewLRU[tokens.Hash, time.Time](authUnknown, nil)
	return &authenticator{
		truth: truth, now: time.Now, slots: make(chan struct{}, TokenConns-1), queue: make(chan struct{}, bounds.Lookups.All.N),
		asks: make(chan struct{}, 1), known: known, unknown: unknown,
	}
}

// bearer returns the hash of the token in the value of an Authorization header.
func bearer(header string) (h tokens.Hash, ok bool) {
	scheme, token, _ := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" {
		return h, false
	}
	return tokens.HashOf(token), true
}

// principal returns the principal of the token, or tokens.ErrUnauthenticated. It refuses a token
// that was revoked or expired more than authTTL ago, however slow the database is: it repeats a
// look-up that takes longer than authTTL. It calls mayFind before a look-up.
func (a *authenticator) principal(ctx context.Context, h tokens.Hash, mayFind func() error) (tokens.Principal, error) {
	if err := a.hear(ctx); err != nil {
		return tokens.Principal{}, err
	}
	p, err := a.remembered(h)
	if !errors.Is(err, errNotRemembered) {
		return p, err
	}
	if err := mayFind(); err != nil {
		return tokens.Principal{}, err
	}
	select {
	case a.queue <- struct{}{}:
		defer func() { <-a.queue }()
	default:
		return tokens.Principal{}, errBusy
	}
	select {
	case a.slots <- struct{}{}:
		defer func() { <-a.slots }()
	case <-ctx.Done():
		return tokens.Principal{}, ctx.Err()
	}
	for {
		if p, err := a.remembered(h); !errors.Is(err, errNotRemembered) { // another request found it meanwhile
			return p, err
		}
		p, asOf, err := a.find(ctx, h)
		if err != nil || recent(asOf, a.now()) {
			return p, err // the loop ends at the request's deadline: then err is ctx's
		}
	}
}

var errNotRemembered = errors.New("api: the token is not remembered")

// remembered is principal without a query. The caller calls hear before it.
func (a *authenticator) remembered(h tokens.Hash) (tokens.Principal, error) {
	now := a.now()
	a.mu.Lock()
	defer a.mu.Unlock()
	if k, ok := a.known.Get(h); ok {
		lives := k.principal.Lives
		if within(k.asOf, now, k.age) && (lives == 0 || within(k.asOf, now, lives)) && (recent(a.heard, now) || recent(k.asOf, now)) {
			return k.principal, nil
		}
		a.known.Remove(h)
	}
	if at, ok := a.unknown.Get(h); ok && recent(at, now) {
		return tokens.Principal{}, tokens.ErrUnauthenticated
	}
	return tokens.Principal{}, errNotRemembered
}

// find looks the token up and remembers it, unless changes were read meanwhile: the result may be
// older than they are. It remembers an unknown token for authTTL in any case.
func (a *authenticator) find(ctx context.Context, h tokens.Hash) (tokens.Principal, time.Time, error) {
	a.mu.Lock()
	rounds := a.rounds
	a.mu.Unlock()
	p, asOf, err := a.truth.Find(ctx, h)
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case errors.Is(err, tokens.ErrUnauthenticated):
		a.unknown.Add(h, asOf)
	case err == nil && rounds == a.rounds:
		a.known.Add(h, authenticated{p, asOf, authAge + rand.N(authAge)})
	}
	return p, asOf, err
}

// hear makes sure that every change up to authTTL ago is known here. After half of authTTL one
// request reads the changes, and the others continue meanwhile.
func (a *authenticator) hear(ctx context.Context) error {
	for {
		a.mu.Lock()
		heard := a.heard
		a.mu.Unlock()
		now := a.now()
		if within(heard, now, authTTL/2) {
			return nil
		}
		good := recent(heard, now)
		select {
		case a.asks <- struct{}{}:
		default:
			if good {
				return nil
			}
			select {
			case a.asks <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		err := a.ask(ctx, heard)
		<-a.asks
		if err != nil && !good {
			return err
		}
		if good {
			return nil
		}
	}
}

// ask reads the changes, unless another request has read them since heard. One request at a time
// calls it.
func (a *authenticator) ask(ctx context.Context, heard time.Time) error {
	a.mu.Lock()
	since, done := a.change, a.heard != heard
	a.mu.Unlock()
	if done {
		return nil
	}
	changed, last, all, asOf, err := a.truth.Changed(ctx, since)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.change, a.heard = last, asOf
	if len(changed) > 0 {
		a.rounds++
	}
	for _, h := range changed {
		a.known.Remove(h)
		a.unknown.Remove(h)
	}
	if all {
		a.known.Purge()
	}
	return nil
}

// recent reports whether a result as of asOf is still valid at now.
func recent(asOf, now time.Time) bool { return within(asOf, now, authTTL) }

// within reports whether now is less than d after asOf on both clocks. The monotonic clock stops
// while the machine sleeps, and the wall clock can be set.
func within(asOf, now time.Time, d time.Duration) bool {
	wall := now.Round(0).Sub(asOf.Round(0))
	return now.Sub(asOf) < d && 0 <= wall && wall < d
}
