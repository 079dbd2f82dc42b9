package store

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// Roles of a token. Each opens its own routes; none includes another.
const (
	RoleRead     = "read"
	RoleWrite    = "write"
	RoleModerate = "moderate"
	RoleAdmin    = "admin"
)

// Roles returns every role.
func Roles() []string { return []string{RoleRead, RoleWrite, RoleModerate, RoleAdmin} }

// Errors of tokens.
var (
	// ErrUnauthenticated reports a token that is unknown, expired or revoked.
	ErrUnauthenticated = errors.New("store: unknown, expired or revoked token")
	// ErrTokenExists reports a name that the tenant has given to another token.
	ErrTokenExists = errors.New("store: the tenant has a token of this name")
)

// tokenPrefix makes a token recognisable to people and to scanners of leaked secrets.
const tokenPrefix = "tdg_"

// Principal is whom a token stands for: a service of one tenant, which acts for every user of it.
type Principal struct {
	TenantID int64
	Name     string
	Roles    []string
}

// Has reports whether the principal has the role.
func (p Principal) Has(role string) bool { return slices.Contains(p.Roles, role) }

// NewToken returns a random token of 256 bits. Nothing knows it yet.
func NewToken() string {
	b := make([]byte, 32)
	rand.Read(b) // never fails
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(b)
}

func tokenHash(token string) []byte {
	h := sha256.Sum256([]byte(token)) // 256 random bits need no slow hash
	return h[:]
}

func checkToken(tenant int64, name, token string, roles []string) error {
	if tenant <= 0 {
		return fmt.Errorf("%w: tenant %d", ErrInvalid, tenant)
	}
	if !ValidActor(name) {
		return fmt.Errorf("%w: token name %.80q: want 1 to %d bytes of printable text", ErrInvalid, name, MaxActorBytes)
	}
	for _, r := range roles {
		if !slices.Contains(Roles(), r) {
			return fmt.Errorf("%w: role %.80q: want some of %v", ErrInvalid, r, Roles())
		}
	}
	if len(roles) == 0 {
		return fmt.Errorf("%w: a token needs a role", ErrInvalid)
	}
	for _, c := range []byte(token) {
		if c <= ' ' || c >= 0x7f {
			return fmt.Errorf("%w: a token is visible ASCII", ErrInvalid)
		}
	}
	if token == "" {
		return fmt.Errorf("%w: the token is empty", ErrInvalid)
	}
	return nil
}

// createTokenSQL adds a token.
// Index: none.   Locks: none but the new row.
const createTokenSQL = `
INSERT /* store.create_token */ INTO api_tokens (token_hash, tenant_id, name, roles, expires_at)
VALUES (@hash::bytea, @tenant::bigint, @name::text, @roles::text[], @expires::timestamptz)`

// CreateToken makes a token for the tenant and returns it; only its hash is kept. The name is unique within the tenant and is
// the actor of writes that name none. A zero expires means never. pool acts as postgres.RoleSystem.
func CreateToken(ctx context.Context, pool *pgxpool.Pool, tenant int64, name string, roles []string, expires time.Time) (string, error) {
	token := NewToken()
	if err := checkToken(tenant, name, token, roles); err != nil {
		return "", err
	}
	var until *time.Time
	if !expires.IsZero() {
		until = &expires
	}
	_, err := pool.Exec(ctx, createTokenSQL, pgx.StrictNamedArgs{
		"hash": tokenHash(token), "tenant": tenant, "name": name, "roles": roles, "expires": until,
	})
	if postgres.IsUnique(err, "api_tokens_name_key") {
		err = ErrTokenExists
	}
	if err != nil {
		return "", fmt.Errorf("create token %q of tenant %d: %w", name, tenant, err)
	}
	return token, nil
}

// ensureTokenSQL makes name's token this one.
// Index: api_tokens_name_key.   Locks: the token.
const ensureTokenSQL = `
INSERT /* store.ensure_token */ INTO api_tokens AS t (token_hash, tenant_id, name, roles)
VALUES (@hash::bytea, @tenant::bigint, @name::text, @roles::text[])
ON CONFLICT (tenant_id, name) DO UPDATE SET token_hash = EXCLUDED.token_hash, roles = EXCLUDED.roles, expires_at = NULL, revoked_at = NULL
 WHERE (t.token_hash, t.roles) IS DISTINCT FROM (EXCLUDED.token_hash, EXCLUDED.roles) OR t.expires_at IS NOT NULL OR t.revoked_at IS NOT NULL`

// EnsureToken makes token the one that name of tenant has, with these roles and no end. The one it had before is void. pool
// acts as postgres.RoleSystem.
func EnsureToken(ctx context.Context, pool *pgxpool.Pool, tenant int64, name, token string, roles []string) error {
	if err := checkToken(tenant, name, token, roles); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, ensureTokenSQL, pgx.StrictNamedArgs{"hash": tokenHash(token), "tenant": tenant, "name": name, "roles": roles})
	if err != nil {
		return fmt.Errorf("ensure token %q of tenant %d: %w", name, tenant, err)
	}
	return nil
}

// authenticateSQL finds a token by its hash, before the tenant is known; the function runs as the owner of the tables.
// Index: api_tokens_pkey.   Locks: none.
const authenticateSQL = `SELECT /* store.authenticate */ tenant_id, name, roles FROM authenticate_token(@hash::bytea)`

// Authenticate returns whom the token stands for, or ErrUnauthenticated.
func (s *Store) Authenticate(ctx context.Context, token string) (Principal, error) {
	rows, _ := s.pool.Query(ctx, authenticateSQL, pgx.StrictNamedArgs{"hash": tokenHash(token)})
	p, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Principal])
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Principal{}, ErrUnauthenticated
	case err != nil:
		return Principal{}, fmt.Errorf("authenticate: %w", err)
	}
	return p, nil
}
