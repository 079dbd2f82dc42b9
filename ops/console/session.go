package console

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/time/rate"

	bounds "github.com/tidings/tidings/internal/shares"
	"github.com/tidings/tidings/internal/tokens"
)

const (
	cookieName   = "tidings_console"
	sessionLives = 12 * time.Hour  // then the reader signs in again, even if the token never expires
	lookupTTL    = time.Second     // how long a session may outlast its token, and its end by another process
	keepSessions = 1 << 12         // number of sessions kept for lookupTTL
	guessEvery   = 6 * time.Second // an address may try one unknown token per guessEvery, after bounds.SignIns at once
	keepGuesses  = 1 << 14         // number of addresses kept
	maxToken     = 4096            // bytes
)

// sealer makes cookies that no other party can make or read. It uses AES-GCM with keys derived from
// the cursor keys. The first key seals, every key opens.
type sealer []cipher.AEAD

func newSealer(keys [][]byte) (sealer, error) {
	if len(keys) == 0 {
		return nil, errors.New("the console needs a key for its sessions: set API_CURSOR_KEY")
	}
	var s sealer
	for _, key := range keys {
		derived, err := hkdf.Key(sha256.New, key, nil, "tidings console session 1", 32)
		if err != nil {
			return nil, fmt.Errorf("derive the console's key: %w", err)
		}
		block, err := aes.NewCipher(derived)
		if err != nil {
			return nil, fmt.Errorf("use the console's key: %w", err)
		}
		aead, err := cipher.NewGCMWithRandomNonce(block)
		if err != nil {
			return nil, fmt.Errorf("use the console's key: %w", err)
		}
		s = append(s, aead)
	}
	return s, nil
}

// seal returns a cookie value with the token's hash and the session's start, and the session that
// it opens. Each is another session.
func (s sealer) seal(h tokens.Hash, at time.Time) (string, tokens.Session) {
	plain := binary.BigEndian.AppendUint64(h[:], uint64(at.Unix()))
	sealed := s[0].Seal(nil, nil, plain, nil)
	return base64.RawURLEncoding.EncodeToString(sealed), sha256.Sum256(sealed)
}

// open returns the session and the hash of its token. It reports false if no key of s sealed the
// text or the session is too old. The database knows whether it has ended.
func (s sealer) open(text string, now time.Time) (id tokens.Session, h tokens.Hash, ok bool) {
	sealed, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil {
		return id, h, false
	}
	id = sha256.Sum256(sealed)
	for _, aead := range s {
		plain, err := aead.Open(nil, nil, sealed, nil)
		if err != nil || len(plain) != len(h)+8 {
			continue
		}
		copy(h[:], plain)
		age := now.Sub(time.Unix(int64(binary.BigEndian.Uint64(plain[len(h):])), 0))
		return id, h, age < sessionLives && age > -time.Minute
	}
	return id, h, false
}

// sessions finds sessions in the database and caches them for lookupTTL.
type sessions struct {
	tokens.Lookup
	mu    *sync.Mutex
	known *simplelru.LRU[tokens.Session, foundToken]
}

type foundToken struct {
	who  tokens.Principal
	asOf time.Time
}

func newSessions(l tokens.Lookup) sessions {
	known, _ := simplelru.NewLRU[tokens.Session, foundToken](keepSessions, nil) // no error: the size is above 0
	return sessions{l, new(sync.Mutex), known}
}

// principal returns the principal of the session's token, or tokens.ErrUnauthenticated.
func (s sessions) principal(ctx context.Context, id tokens.Session, h tokens.Hash) (tokens.Principal, error) {
	s.mu.Lock()
	f, ok := s.known.Get(id)
	s.mu.Unlock()
	if age := time.Since(f.asOf); ok && age < lookupTTL && (f.who.Lives == 0 || age < f.who.Lives) {
		return f.who, nil
	}
	who, asOf, err := s.FindSession(ctx, id, h)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.known.Remove(id)
		return who, err
	}
	s.known.Add(id, foundToken{who, asOf})
	return who, nil
}

// forget makes this process look up a session that it has ended.
func (s sessions) forget(id tokens.Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known.Remove(id)
}

// guesses limits how often one address may try unknown tokens. A right token always signs in,
// because strangers and operators may have one address, that of a proxy. Nobody finds 256 random
// bits by trying; the limit keeps those who try from using the console's connections to the
// database. So of all look-ups only one runs at a time for the addresses within their limit, and
// one for those beyond it.
type guesses struct {
	mu     *sync.Mutex
	by     *simplelru.LRU[netip.Prefix, *rate.Limiter]
	within chan struct{}
	beyond chan struct{}
}

// lane returns the place in which the next look-up of an address runs.
func (g guesses) lane(l *rate.Limiter) chan struct{} {
	if l.Tokens() < 1 {
		return g.beyond
	}
	return g.within
}

func newGuesses() guesses {
	by, _ := simplelru.NewLRU[netip.Prefix, *rate.Limiter](keepGuesses, nil) // no error: the size is above 0
	half := bounds.SignIns.All.N / 2
	return guesses{new(sync.Mutex), by, make(chan struct{}, half), make(chan struct{}, half)}
}

// of returns the limiter of the request's address. For IPv6 a limiter covers a /64 network.
func (g guesses) of(r *http.Request) *rate.Limiter {
	var from netip.Prefix
	if a, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		ip := a.Addr().Unmap().WithZone("")
		from, _ = ip.Prefix(min(ip.BitLen(), 64)) // no error: the address is valid
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	l, ok := g.by.Get(from)
	if !ok {
		l = rate.NewLimiter(rate.Every(guessEvery), int(bounds.SignIns.Each.N))
		g.by.Add(from, l)
	}
	return l
}

// session returns the principal and the token's hash of the request's cookie, or
// tokens.ErrUnauthenticated. No page opens for a token without the role read.
func (c *Console) session(r *http.Request) (tokens.Principal, tokens.Hash, error) {
	cookie, err := r.Cookie(cookieName)
	if err != nil {
		return tokens.Principal{}, tokens.Hash{}, tokens.ErrUnauthenticated
	}
	id, h, ok := c.seals.open(cookie.Value, time.Now())
	if !ok {
		return tokens.Principal{}, tokens.Hash{}, tokens.ErrUnauthenticated
	}
	ctx, cancel := context.WithTimeout(r.Context(), pageTimeout)
	defer cancel()
	who, err := c.found.principal(ctx, id, h)
	return who, h, err
}

// cookie returns a session's cookie; an empty value deletes it. SameSite is Lax, so a link from
// another site opens its page signed in. No page writes on GET, so this is safe.
func cookie(r *http.Request, value string) *http.Cookie {
	secure := r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https")
	c := &http.Cookie{Name: cookieName, Value: value, Path: "/console", HttpOnly: true, Secure: secure, SameSite: http.SameSiteLaxMode}
	if value == "" {
		c.MaxAge = -1
	}
	return c
}

// toSignIn redirects to the sign-in form, which leads back after a GET. It does not repeat a write.
// A live stream gets 401.
func (c *Console) toSignIn(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, root+"live/") {
		http.Error(w, "signed out", http.StatusUnauthorized)
		return
	}
	to := root + "sign-in"
	if r.Method == http.MethodGet && r.URL.RequestURI() != root {
		to += "?next=" + url.QueryEscape(r.URL.RequestURI())
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
}

// next returns the page to open after signing in. It returns only pages of the console.
func next(r *http.Request) string {
	next := r.FormValue("next")
	if !ours(next) || strings.HasPrefix(next, root+"sign-") {
		return root
	}
	return next
}

// ours reports whether to is a path (with a query) of the console.
func ours(to string) bool {
	u, err := url.Parse(to)
	return err == nil && !u.IsAbs() && u.Host == "" && strings.HasPrefix(u.Path, root) && strings.HasPrefix(path.Clean(u.Path)+"/", root) &&
		!strings.Contains(u.Path, "\\")
}

type signInData struct {
	Next, Error string
}

func (c *Console) signInForm(w http.ResponseWriter, r *http.Request) {
	c.render(&view{c: c, w: w, r: r}, http.StatusOK, "signin", "Sign in", signInData{Next: next(r)})
}

func (c *Console) signIn(w http.ResponseWriter, r *http.Request) {
	v := &view{c: c, w: w, r: r}
	refuse := func(status int, why string) { c.render(v, status, "signin", "Sign in", signInData{next(r), why}) }
	token := strings.TrimSpace(r.PostFormValue("token"))
	if scheme, rest, ok := strings.Cut(token, " "); ok && strings.EqualFold(scheme, "Bearer") {
		token = strings.TrimSpace(rest)
	}
	if token == "" || len(token) > maxToken {
		refuse(http.StatusUnprocessableEntity, "Paste a token.")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), pageTimeout)
	defer cancel()
	limit := c.guesses.of(r)
	value, err := c.startSession(ctx, tokens.HashOf(token), c.guesses.lane(limit))
	switch {
	case errors.Is(err, tokens.ErrUnauthenticated) && !limit.Allow():
		w.Header().Set("Retry-After", fmt.Sprint(int(guessEvery/time.Second)))
		refuse(http.StatusTooManyRequests, "The token is unknown, expired or revoked. "+
			"This address tried too many such tokens: wait a few seconds.")
	case errors.Is(err, tokens.ErrUnauthenticated):
		refuse(http.StatusUnauthorized, "The token is unknown, expired or revoked.")
	case errors.Is(err, errNoRead):
		refuse(http.StatusForbidden, "The token lacks the role read. Make one with --roles read, and moderate or admin for more.")
	case err != nil:
		c.fail(v, err)
	default:
		http.SetCookie(w, cookie(r, value))
		http.Redirect(w, r, next(r), http.StatusSeeOther)
	}
}

// errNoRead reports a token without the role read.
var errNoRead = errors.New("console: the token lacks the role read")

// startSession starts a session of the token, in its turn in the lane, and returns its cookie's
// value. Errors: tokens.ErrUnauthenticated, errNoRead.
func (c *Console) startSession(ctx context.Context, h tokens.Hash, lane chan struct{}) (string, error) {
	select {
	case lane <- struct{}{}:
		defer func() { <-lane }()
	case <-ctx.Done():
		return "", &problem{http.StatusServiceUnavailable, "Too many people sign in", "Try again in a few seconds."}
	}
	who, _, err := c.found.Find(ctx, h)
	if err != nil {
		return "", err
	}
	if !who.Has(tokens.RoleRead) {
		return "", errNoRead
	}
	value, id := c.seals.seal(h, time.Now())
	return value, tokens.StartSession(ctx, c.deps.Truth, id, h, sessionLives)
}

// signOut ends the session for all processes, so that a copy of its cookie opens nothing. If the
// database does not answer, the reader keeps the cookie and can try again.
func (c *Console) signOut(w http.ResponseWriter, r *http.Request) {
	if sent, err := r.Cookie(cookieName); err == nil {
		if id, _, ok := c.seals.open(sent.Value, time.Now()); ok {
			ctx, cancel := context.WithTimeout(r.Context(), pageTimeout)
			defer cancel()
			if err := tokens.EndSession(ctx, c.deps.Truth, id); err != nil {
				c.fail(&view{c: c, w: w, r: r}, err)
				return
			}
			c.found.forget(id)
		}
	}
	http.SetCookie(w, cookie(r, ""))
	http.Redirect(w, r, root+"sign-in", http.StatusSeeOther)
}
