package api

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/tokens"
)

// tokenStore plays the truth and counts the calls.
type tokenStore struct {
	now     time.Time
	good    map[tokens.Hash]tokens.Principal
	changes []tokens.Hash
	finds   int
	asked   int
	finding func() // called during a look-up
}

func (s *tokenStore) Find(_ context.Context, h tokens.Hash) (tokens.Principal, time.Time, error) {
	s.finds++
	p, ok := s.good[h]
	if s.finding != nil {
		s.finding()
	}
	if !ok {
		return p, s.now, tokens.ErrUnauthenticated
	}
	return p, s.now, nil
}

func (s *tokenStore) Changed(_ context.Context, since int64) ([]tokens.Hash, int64, bool, time.Time, error) {
	s.asked++
	return s.changes[since:], int64(len(s.changes)), false, s.now, nil
}

func (s *tokenStore) revoke(h tokens.Hash) {
	delete(s.good, h)
	s.changes = append(s.changes, h)
}

func newTokenStore(n int) (*tokenStore, *authenticator, []tokens.Hash) {
	s := &tokenStore{now: time.Now(), good: make(map[tokens.Hash]tokens.Principal)}
	a := newAuthenticator(s)
	a.now = func() time.Time { return s.now }
	all := make([]tokens.Hash, n)
	for i := range all {
		all[i] = tokens.Hash{byte(i), byte(i >> 8), byte(i >> 16)}
		s.good[all[i]] = tokens.Principal{TenantID: int64(i + 1), Name: "t"}
	}
	return s, a, all
}

func mayFind() error { return nil }

func TestWhatIsRememberedOfATokenEnds(t *testing.T) {
	ctx := t.Context()
	want := func(t *testing.T, a *authenticator, h tokens.Hash, want error) {
		t.Helper()
		if _, err := a.principal(ctx, h, mayFind); !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	t.Run("when it is revoked", func(t *testing.T) {
		s, a, all := newTokenStore(2)
		want(t, a, all[0], nil)
		s.revoke(all[0])
		s.now = s.now.Add(authTTL)
		want(t, a, all[0], tokens.ErrUnauthenticated)
		want(t, a, all[1], nil)
	})
	t.Run("when it is revoked in the night, after which nobody has asked", func(t *testing.T) {
		s, a, all := newTokenStore(2)
		want(t, a, all[0], nil)
		s.revoke(all[0])
		s.now = s.now.Add(authAge - time.Second)
		want(t, a, all[0], tokens.ErrUnauthenticated)
	})
	t.Run("when it expires", func(t *testing.T) {
		s, a, all := newTokenStore(1)
		s.good[all[0]] = tokens.Principal{TenantID: 1, Lives: time.Minute}
		want(t, a, all[0], nil)
		s.now = s.now.Add(time.Minute - 1)
		want(t, a, all[0], nil)
		delete(s.good, all[0])
		s.now = s.now.Add(1)
		want(t, a, all[0], tokens.ErrUnauthenticated)
	})
	t.Run("when its row is gone and nobody said so", func(t *testing.T) {
		s, a, all := newTokenStore(1)
		want(t, a, all[0], nil)
		delete(s.good, all[0])
		s.now = s.now.Add(2 * authAge)
		want(t, a, all[0], tokens.ErrUnauthenticated)
	})
	t.Run("when it is revoked while it is looked up, and that is heard first", func(t *testing.T) {
		s, a, all := newTokenStore(2)
		want(t, a, all[1], nil)
		s.finding = func() {
			s.finding = nil
			s.revoke(all[0])
			s.now = s.now.Add(authTTL / 2)
			want(t, a, all[1], nil) // reads the change
		}
		_, _ = a.principal(ctx, all[0], mayFind) // accepted or not: the token ended half a second ago
		s.now = s.now.Add(authTTL / 2)
		want(t, a, all[0], tokens.ErrUnauthenticated)
	})
	t.Run("and begins, when it is made after it was guessed", func(t *testing.T) {
		s, a, all := newTokenStore(1)
		p := s.good[all[0]]
		delete(s.good, all[0])
		want(t, a, all[0], tokens.ErrUnauthenticated)
		s.good[all[0]] = p
		finds := s.finds
		want(t, a, all[0], tokens.ErrUnauthenticated)
		if s.finds != finds {
			t.Error("an unknown token is looked up twice within the second")
		}
		s.now = s.now.Add(authTTL)
		want(t, a, all[0], nil)
	})
}

// Look-ups of unknown tokens take every slot and the whole queue. A remembered token is not
// affected.
func TestRememberedTokensPassThoseThatAreLookedUp(t *testing.T) {
	s, a, all := newTokenStore(1)
	if _, err := a.principal(t.Context(), all[0], mayFind); err != nil {
		t.Fatal(err)
	}
	for range cap(a.slots) {
		a.slots <- struct{}{}
	}
	for range cap(a.queue) {
		a.queue <- struct{}{}
	}
	if _, err := a.principal(t.Context(), tokens.Hash{1, 2, 3, 4}, mayFind); !errors.Is(err, errBusy) {
		t.Errorf("one more: %v", err)
	}
	s.now = s.now.Add(time.Hour / 2)
	if _, err := a.principal(t.Context(), all[0], mayFind); err != nil {
		t.Errorf("the remembered one: %v", err)
	}
}
