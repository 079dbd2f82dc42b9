package api

import (
	"context"
	"crypto/sha256"
	"strings"
	"sync"
	"time"

	"github.com/tidings/tidings/store"
)

const (
	authTTL  = time.Second // how long a revoked token may go on working
	authSize = 4096        // tokens kept
)

// authenticator remembers tokens for authTTL at most, so that a busy client does not cost a look-up per request. Only known
// tokens are kept: guesses take no room.
type authenticator struct {
	store *store.Store
	now   func() time.Time

	mu   sync.Mutex
	seen map[[sha256.Size]byte]authenticated
}

type authenticated struct {
	principal store.Principal
	until     time.Time
}

func newAuthenticator(s *store.Store) *authenticator {
	return &authenticator{store: s, now: time.Now, seen: make(map[[sha256.Size]byte]authenticated)}
}

// principal returns whom the value of an Authorization header stands for, or store.ErrUnauthenticated.
func (a *authenticator) principal(ctx context.Context, header string) (store.Principal, error) {
	scheme, token, _ := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" {
		return store.Principal{}, store.ErrUnauthenticated
	}
	key := sha256.Sum256([]byte(token))
	asked := a.now()
	a.mu.Lock()
	known, ok := a.seen[key]
	a.mu.Unlock()
	if ok && asked.Before(known.until) {
		return known.principal, nil
	}
	p, err := a.store.Authenticate(ctx, token)
	if err != nil {
		return store.Principal{}, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.seen) >= authSize {
		clear(a.seen)
	}
	a.seen[key] = authenticated{principal: p, until: asked.Add(authTTL)}
	return p, nil
}
