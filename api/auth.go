package api

import (
	"context"
	"crypto/sha256"
	"strings"
	"sync"
	"time"

	"github.com/tidings/tidings/tokens"

	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	authTTL  = time.Second // how long a revoked token may go on working, counted from a look-up's start
	authSize = 4096        // tokens kept
)

// authenticator remembers tokens for authTTL at most, so that a busy client does not cost a look-up per request. Only known
// tokens are kept: guesses take no room.
type authenticator struct {
	truth *pgxpool.Pool
	now   func() time.Time

	mu   sync.Mutex
	seen map[[sha256.Size]byte]authenticated
}

type authenticated struct {
	principal tokens.Principal
	asOf      time.Time
}

func newAuthenticator(truth *pgxpool.Pool) *authenticator {
	return &authenticator{truth: truth, now: time.Now, seen: make(map[[sha256.Size]byte]authenticated)}
}

// principal returns whom the value of an Authorization header stands for, or tokens.ErrUnauthenticated. A token that was revoked or expired more
// than authTTL ago is refused, however long the database takes to say so: an answer that is older than that when it comes proves nothing.
func (a *authenticator) principal(ctx context.Context, header string) (tokens.Principal, error) {
	scheme, token, _ := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" {
		return tokens.Principal{}, tokens.ErrUnauthenticated
	}
	key := sha256.Sum256([]byte(token))
	a.mu.Lock()
	known, ok := a.seen[key]
	a.mu.Unlock()
	if ok && recent(known.asOf, a.now()) {
		return known.principal, nil
	}
	for {
		p, asOf, err := tokens.Authenticate(ctx, a.truth, token)
		if err != nil {
			return tokens.Principal{}, err // also when ctx ends: a request lasts only so long
		}
		if recent(asOf, a.now()) {
			a.keep(key, authenticated{p, asOf})
			return p, nil
		}
	}
}

func (a *authenticator) keep(key [sha256.Size]byte, found authenticated) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.seen) >= authSize {
		clear(a.seen)
	}
	a.seen[key] = found
}

// recent reports whether what was so at asOf counts at now, on both clocks: the monotonic one stands still while the machine sleeps, and
// the other can be set.
func recent(asOf, now time.Time) bool {
	wall := now.Round(0).Sub(asOf.Round(0))
	return now.Sub(asOf) < authTTL && 0 <= wall && wall < authTTL
}
