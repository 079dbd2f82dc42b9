package api

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/tidings/tidings/tokens"
)

const (
	// authTTL is how long a token that was revoked or has expired may go on working, counted from the start of a query.
	authTTL = time.Second
	// authKeep is how many tokens are remembered: some 50 MiB of them at most.
	authKeep = 1 << 17
	// authUnknown is how many tokens are remembered that nobody knows, for authTTL.
	authUnknown = 1 << 14
	// authQueue is how many look-ups wait, or are under way: some 100 ms of them.
	authQueue = 256
	// authAge is when a token is looked up again though nobody has said that it changed, which holds for one whose row was deleted by hand. What
	// was looked up together, after a start, is not looked up together again: each token has an age of its own, up to twice this.
	authAge = time.Hour
)

// errBusy reports that too many look-ups of tokens wait.
var errBusy = errors.New("api: too many tokens are being looked up")

// lookup is what the truth knows of tokens (tokens.Lookup).
type lookup interface {
	Find(ctx context.Context, h tokens.Hash) (p tokens.Principal, asOf time.Time, err error)
	Changed(ctx context.Context, since int64) (changed []tokens.Hash, last int64, all bool, asOf time.Time, err error)
}

// authenticator remembers tokens, and asks once in authTTL at most, whatever their number, which ones have changed since. So a known token costs
// no query, and one that was revoked is refused a second later by every process, without a message that could be lost.
//
//	known, and changes heard of up to a second ago ──▶ good
//	unknown a moment ago                           ──▶ refused
//	else: one of a few slots, a look-up            ──▶ known, or unknown
type authenticator struct {
	truth lookup
	now   func() time.Time
	slots chan struct{} // of look-ups
	queue chan struct{} // of those who wait for a slot, and who have one
	asks  chan struct{} // held by who asks for changes

	mu      sync.Mutex
	known   *simplelru.LRU[tokens.Hash, authenticated]
	unknown *simplelru.LRU[tokens.Hash, time.Time]
	change  int64     // the last one that was heard of
	heard   time.Time // all changes before it
	rounds  int       // in which changes were heard of
}

type authenticated struct {
	principal tokens.Principal
	asOf      time.Time
	age       time.Duration // at which it is looked up again
}

// TokenConns is how many connections a pool for tokens wants: one to hear of changes, the others for look-ups. No request waits for them.
const TokenConns = 3

func newAuthenticator(truth lookup) *authenticator {
	known, _ := simplelru.NewLRU[tokens.Hash, authenticated](authKeep, nil) // of a size above 0
	unknown, _ := simplelru.NewLRU[tokens.Hash, time.Time](authUnknown, nil)
	return &authenticator{
		truth: truth, now: time.Now, slots: make(chan struct{}, TokenConns-1), queue: make(chan struct{}, authQueue), asks: make(chan struct{}, 1), known: known, unknown: unknown,
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

// principal returns whom the token stands for, or tokens.ErrUnauthenticated. A token that was revoked or expired more than authTTL ago is refused, however
// long the database takes to say so: an answer that is older than that when it comes proves nothing. Before a look-up it asks mayFind.
func (a *authenticator) principal(ctx context.Context, h tokens.Hash, mayFind func() error) (tokens.Principal, error) {
	if err := a.hear(ctx); err != nil {
		return tokens.Principal{}, err
	}
	p, err := a.remembered(h)
	if err != errNotRemembered {
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
		if p, err := a.remembered(h); err != errNotRemembered { // another request has found it meanwhile
			return p, err
		}
		p, asOf, err := a.find(ctx, h)
		if err != nil || recent(asOf, a.now()) {
			return p, err // an error also when ctx ends: a request lasts only so long
		}
	}
}

var errNotRemembered = errors.New("api: the token is not remembered")

// remembered is principal without a query. hear has come before.
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

// find looks the token up and remembers what it found, unless changes were heard of meanwhile: this one may be among them.
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

// hear makes sure that every change up to authTTL ago is known here. One request asks, when half of that is over, and the others go on meanwhile.
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

// ask asks for changes, unless somebody has since heard. One asks at a time.
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

// recent reports whether what was so at asOf counts at now.
func recent(asOf, now time.Time) bool { return within(asOf, now, authTTL) }

// within reports whether now is less than d after asOf on both clocks: the monotonic one stands still while the machine sleeps, and the other can be
// set.
func within(asOf, now time.Time, d time.Duration) bool {
	wall := now.Round(0).Sub(asOf.Round(0))
	return now.Sub(asOf) < d && 0 <= wall && wall < d
}
