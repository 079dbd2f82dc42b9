package tokens

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/store"
)

// Roles of a token. Each opens its own routes; none includes another.
const (
	RoleRead     = "read"
	RoleWrite    = "write"
	RoleModerate = "moderate"
	RoleAdmin    = "admin"

	// RoleExport reads everything that a tenant's events contain, with pending bodies and the
	// authors of deleted children.
	RoleExport = "export"
)

// Roles returns every role.
func Roles() []string { return []string{RoleRead, RoleWrite, RoleModerate, RoleAdmin, RoleExport} }

// Errors of tokens.
var (
	// ErrUnauthenticated reports a token that is unknown, expired or revoked.
	ErrUnauthenticated = errors.New("tokens: unknown, expired or revoked token")
	// ErrExists reports a name that the tenant has given to another token, which is neither revoked
	// nor expired.
	ErrExists = errors.New("tokens: the tenant has a token of this name")
	// ErrUnknown reports a name that the tenant never gave to a token, or that has no current token
	// to replace.
	ErrUnknown = errors.New("tokens: the tenant has no token of this name")
	// ErrNotHeld reports a token that would have a role that its maker lacks.
	ErrNotHeld = errors.New("tokens: the maker lacks a role of the token")
	// ErrUnknownToken reports a token that this installation never made.
	ErrUnknownToken = errors.New("tokens: this installation never made this token")
)

// tokenPrefix makes a token recognizable to people and to scanners of leaked secrets.
const tokenPrefix = "tdg_"

// SystemTenant is the tenant of system tokens. An operator signs in to the console with one and
// sees every tenant. The routes of the API refuse it.
const SystemTenant = 0

// Principal is the owner of a token: a service of one tenant, which acts for every user of it, or
// an operator (SystemTenant).
type Principal struct {
	TenantID  int64
	Name      string
	Roles     []string
	ReadRate  *Rate // the token's own; nil: as configured
	WriteRate *Rate
	Lives     time.Duration // from the look-up until it expires; 0: forever
	Limits    string        // the name of the token whose limits it shares: its own, or that of its first maker
}

// Has reports whether the principal has the role.
func (p Principal) Has(role string) bool { return slices.Contains(p.Roles, role) }

// System reports whether the principal's token is a system token.
func (p Principal) System() bool { return p.TenantID == SystemTenant }

// New returns a random token of 256 bits. It stores nothing.
func New() string {
	b := make([]byte, 32)
	rand.Read(b) // never fails
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(b)
}

func checkToken(tenant int64, name, token string, roles []string) error {
	if tenant < 0 {
		return fmt.Errorf("%w: tenant %d", store.ErrInvalid, tenant)
	}
	if !store.ValidActor(name) {
		return fmt.Errorf("%w: token name %.80q: want 1 to %d bytes of printable text", store.ErrInvalid, name, store.MaxActorBytes)
	}
	for _, r := range roles {
		if !slices.Contains(Roles(), r) {
			return fmt.Errorf("%w: role %.80q: want some of %v", store.ErrInvalid, r, Roles())
		}
	}
	if len(roles) == 0 {
		return fmt.Errorf("%w: a token needs a role", store.ErrInvalid)
	}
	for _, c := range []byte(token) {
		if c <= ' ' || c >= 0x7f {
			return fmt.Errorf("%w: a token must be visible ASCII", store.ErrInvalid)
		}
	}
	if token == "" {
		return fmt.Errorf("%w: the token is empty", store.ErrInvalid)
	}
	return nil
}

// Spec describes a token to make.
type Spec struct {
	TenantID  int64  // SystemTenant: a system token
	Name      string // the actor of writes without an actor
	Roles     []string
	Expires   time.Time // zero: never
	ReadRate  *Rate     // nil: as configured
	WriteRate *Rate
	Replace   bool          // replace the name's current token; the new one keeps its roles and rates unless they are given
	Overlap   time.Duration // how long the replaced token remains valid, at most
	// Maker is a token of the same tenant that makes this one. The token then has at most the
	// maker's roles, ends no later than the maker, shares the limits of its maker, and is revoked
	// with it. nil: an operator makes it.
	Maker *Hash
}

// retireTokenSQL makes room for a token of the name: it retires an expired current token, and with
// @replace any current token. Index: api_tokens_current_key. Locks: the name's current token.
const retireTokenSQL = `
UPDATE /* tokens.retire_token */ api_tokens SET replaced_at = now(), expires_at = LEAST(expires_at, now() + @overlap::interval)
 WHERE tenant_id = @tenant::bigint AND name = @name::text AND revoked_at IS NULL AND replaced_at IS NULL
   AND (@replace::boolean OR expires_at <= now())
RETURNING expires_at, roles, rate_read, rate_write`

// createTokenSQL adds a token. Index: none. Locks: none but the new row.
const createTokenSQL = `
INSERT /* tokens.create_token */ INTO api_tokens (token_hash, tenant_id, name, roles, expires_at, rate_read, rate_write, made_by, limits_of)
VALUES (@hash::bytea, @tenant::bigint, @name::text, @roles::text[], @expires::timestamptz, @rate_read::text, @rate_write::text,
        @made_by::bytea, @limits_of::text)`

// makerSQL reads what the maker of a token has. A revocation of the maker waits until the token is
// there, and ends it. Index: api_tokens_pkey. Locks: the maker.
const makerSQL = `
SELECT /* tokens.maker */ roles, expires_at, rate_read, rate_write, coalesce(limits_of, name) FROM api_tokens
 WHERE token_hash = @hash::bytea AND tenant_id = @tenant::bigint AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
   FOR NO KEY UPDATE`

// Issued is a token that Issue made.
type Issued struct {
	Token    string // the database has only its hash
	Roles    []string
	Replaced *time.Time // when the replaced token ends; nil: none was replaced
}

// retired is the replaced token.
type retired struct {
	Ends        *time.Time
	Roles       []string
	Read, Write *string
}

// maker is what a token has that makes another one.
type maker struct {
	Roles       []string
	Ends        *time.Time
	Read, Write *string
	Limits      *string // not nil
}

// Issue makes a token. A name has at most one current token. If there is one and spec does not
// replace it, Issue returns ErrExists. If spec gives no roles and there is no token to replace, it
// returns ErrUnknown. If the maker is not valid, it returns ErrUnauthenticated, and ErrNotHeld if
// the maker lacks a role. pool acts as postgres.RoleSystem.
func Issue(ctx context.Context, pool *pgxpool.Pool, spec Spec) (Issued, error) {
	made := Issued{Token: New()}
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		by, err := makerOf(ctx, tx, spec)
		if err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, retireTokenSQL, pgx.StrictNamedArgs{
			"tenant": spec.TenantID, "name": spec.Name, "replace": spec.Replace, "overlap": max(0, spec.Overlap),
		})
		before, err := pgx.CollectRows(rows, pgx.RowToStructByPos[retired])
		if err != nil {
			return err
		}
		read, write := spec.ReadRate.text(), spec.WriteRate.text()
		made.Roles, made.Replaced = spec.Roles, nil
		switch {
		case spec.Replace && len(before) > 0:
			made.Replaced = before[0].Ends
			read, write = cmp.Or(read, before[0].Read), cmp.Or(write, before[0].Write)
			if made.Roles == nil {
				made.Roles = before[0].Roles
			}
		case spec.Replace && made.Roles == nil:
			return ErrUnknown
		}
		if err := checkToken(spec.TenantID, spec.Name, made.Token, made.Roles); err != nil {
			return err
		}
		var until *time.Time
		if !spec.Expires.IsZero() {
			until = &spec.Expires
		}
		var madeBy []byte
		if spec.Maker != nil {
			for _, role := range made.Roles {
				if !slices.Contains(by.Roles, role) {
					return fmt.Errorf("%w: %s", ErrNotHeld, role)
				}
			}
			if by.Ends != nil && (until == nil || by.Ends.Before(*until)) {
				until = by.Ends
			}
			madeBy, read, write = spec.Maker[:], by.Read, by.Write
		}
		_, err = tx.Exec(ctx, createTokenSQL, pgx.StrictNamedArgs{
			"hash": hashed(made.Token), "tenant": spec.TenantID, "name": spec.Name, "roles": made.Roles, "expires": until,
			"rate_read": read, "rate_write": write, "made_by": madeBy, "limits_of": by.Limits,
		})
		return err
	})
	if postgres.IsUnique(err, "api_tokens_current_key") {
		err = ErrExists
	}
	if err != nil {
		return Issued{}, fmt.Errorf("create token %q of tenant %d: %w", spec.Name, spec.TenantID, err)
	}
	return made, nil
}

// makerOf reads the maker of the token, before a replacement of the maker itself shortens its life.
// Without a maker it returns nothing.
func makerOf(ctx context.Context, tx pgx.Tx, spec Spec) (by maker, err error) {
	if spec.Maker == nil {
		return by, nil
	}
	rows, _ := tx.Query(ctx, makerSQL, pgx.StrictNamedArgs{"hash": spec.Maker[:], "tenant": spec.TenantID})
	by, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[maker])
	if errors.Is(err, pgx.ErrNoRows) {
		return by, ErrUnauthenticated
	}
	return by, err
}

// Create makes a token with the configured rates, which replaces no other. A zero expires means
// never. Errors are those of Issue.
func Create(ctx context.Context, pool *pgxpool.Pool, tenant int64, name string, roles []string, expires time.Time) (string, error) {
	made, err := Issue(ctx, pool, Spec{TenantID: tenant, Name: name, Roles: roles, Expires: expires})
	return made.Token, err
}

// ensureTokenSQL makes the token valid under the name, even if it was revoked.
// Index: api_tokens_pkey. Locks: the token.
const ensureTokenSQL = `
INSERT /* tokens.ensure_token */ INTO api_tokens AS t (token_hash, tenant_id, name, roles, rate_read, rate_write)
VALUES (@hash::bytea, @tenant::bigint, @name::text, @roles::text[], 'off', 'off')
ON CONFLICT (token_hash) DO UPDATE
   SET roles = EXCLUDED.roles, expires_at = NULL, revoked_at = NULL, replaced_at = NULL, rate_read = 'off', rate_write = 'off'
 WHERE t.tenant_id = EXCLUDED.tenant_id AND t.name = EXCLUDED.name`

// Ensure makes token the only valid token of name, with these roles, without an end and without
// limits. It revokes all other tokens of the name. If the token has another name or tenant, it
// returns ErrExists. pool acts as postgres.RoleSystem.
func Ensure(ctx context.Context, pool *pgxpool.Pool, tenant int64, name, token string, roles []string) error {
	if err := checkToken(tenant, name, token, roles); err != nil {
		return err
	}
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, revokeTokensSQL, pgx.StrictNamedArgs{"tenant": tenant, "name": name,
			"keep": hashed(token)}); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, ensureTokenSQL, pgx.StrictNamedArgs{"hash": hashed(token), "tenant": tenant, "name": name, "roles": roles})
		if err == nil && tag.RowsAffected() == 0 {
			err = ErrExists // of another name or tenant
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("ensure token %q of tenant %d: %w", name, tenant, err)
	}
	return nil
}

// revokeTokensSQL revokes every token of the name, including replaced ones, except the one with the
// hash @keep. A trigger also revokes what they made. Index: api_tokens_name_idx. Locks: the tokens.
const revokeTokensSQL = `
UPDATE /* tokens.revoke_tokens */ api_tokens SET revoked_at = now()
 WHERE tenant_id = @tenant::bigint AND name = @name::text AND revoked_at IS NULL AND token_hash <> @keep::bytea`

// revokedAtSQL returns when the last token of the name was revoked. Index: api_tokens_name_idx.
// Locks: none.
const revokedAtSQL = `
SELECT /* tokens.revoked_at */ max(revoked_at) FROM api_tokens WHERE tenant_id = @tenant::bigint AND name = @name::text`

// Revoke revokes every token of the name, including replaced ones, and every token that they made.
// It returns the number of tokens of the name that it revoked, and the time of the last revocation
// of the name. A second call changes nothing. If the name never had a token, it returns ErrUnknown.
// API processes refuse the tokens within a second. pool acts as postgres.RoleSystem.
func Revoke(ctx context.Context, pool *pgxpool.Pool, tenant int64, name string) (n int64, at time.Time, err error) {
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, revokeTokensSQL, pgx.StrictNamedArgs{"tenant": tenant, "name": name, "keep": []byte{}})
		if err != nil {
			return err
		}
		n = tag.RowsAffected()
		rows, _ := tx.Query(ctx, revokedAtSQL, pgx.StrictNamedArgs{"tenant": tenant, "name": name})
		last, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[*time.Time])
		if err != nil {
			return err
		}
		if last == nil {
			return ErrUnknown
		}
		at = *last
		return nil
	})
	if err != nil {
		return 0, time.Time{}, fmt.Errorf("revoke token %q of tenant %d: %w", name, tenant, err)
	}
	return n, at, nil
}

// Token describes a token without the token or its whole hash.
type Token struct {
	Fingerprint                string // Fingerprint of the token
	TenantID                   int64
	Name                       string
	Roles                      []string
	Created                    time.Time
	Expires, Replaced, Revoked *time.Time // nil: never
	ReadRate, WriteRate        *Rate      // nil: as configured
	Works                      bool       // neither revoked nor expired
	MadeBy                     string     // Fingerprint of its maker; empty: an operator made it
}

const tokenColumns = `token_hash, tenant_id, name, roles, created_at, expires_at, replaced_at, revoked_at, rate_read, rate_write,
       revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now()), made_by`

func scanToken(row pgx.CollectableRow) (t Token, err error) {
	var hash, maker []byte
	var read, write *string
	err = row.Scan(&hash, &t.TenantID, &t.Name, &t.Roles, &t.Created, &t.Expires, &t.Replaced, &t.Revoked, &read, &write, &t.Works,
		&maker)
	t.Fingerprint, t.MadeBy = fingerprint(hash), fingerprint(maker)
	return t, errors.Join(err, setRate(&t.ReadRate, read), setRate(&t.WriteRate, write))
}

// RevokedWith returns the tokens of the list that work and that a revocation of the name ends:
// those of the name, and what they made.
func RevokedWith(all []Token, tenant int64, name string) (ending []Token) {
	ends := make(map[string]bool)
	for grown := true; grown; {
		grown = false
		for _, t := range all {
			if t.TenantID == tenant && !ends[t.Fingerprint] && (t.Name == name || ends[t.MadeBy]) {
				ends[t.Fingerprint], grown = true, true
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(t Token) bool { return !ends[t.Fingerprint] || !t.Works })
}

// fingerprintLen is the number of bytes of the hash in a fingerprint. They are too few to find the
// token or to prove that one has it.
const fingerprintLen = 6

func fingerprint(hash []byte) string {
	return hex.EncodeToString(hash[:min(len(hash), fingerprintLen)])
}

// Fingerprint returns a short name of a token for lists and logs: 12 hexadecimal digits of its
// SHA-256.
func Fingerprint(token string) string { return fingerprint(hashed(token)) }

// listTokensSQL reads the tokens of one tenant or of all. Index: api_tokens_name_idx for one
// tenant; for all, a scan of a table with a row per token ever made. Locks: none.
const listTokensSQL = `
SELECT /* tokens.list_tokens */ ` + tokenColumns + `
  FROM api_tokens WHERE @tenant::bigint = 0 OR tenant_id = @tenant::bigint ORDER BY tenant_id, name, created_at, token_hash`

// List returns the tokens of a tenant, or of all tenants for 0, with former ones. It orders them by
// tenant, name and age. pool acts as postgres.RoleSystem.
func List(ctx context.Context, pool *pgxpool.Pool, tenant int64) ([]Token, error) {
	rows, _ := pool.Query(ctx, listTokensSQL, pgx.StrictNamedArgs{"tenant": tenant})
	all, err := pgx.CollectRows(rows, scanToken)
	if err != nil {
		return nil, fmt.Errorf("list the tokens of tenant %d: %w", tenant, err)
	}
	return all, nil
}

// identifySQL finds a token in any state by its hash. Index: api_tokens_pkey. Locks: none.
const identifySQL = `SELECT /* tokens.identify */ ` + tokenColumns + ` FROM api_tokens WHERE token_hash = @hash::bytea`

// Identify returns the description of a token that somebody found, even a revoked or expired one,
// or ErrUnknownToken. No error contains the token, and the database gets only its hash. pool acts
// as postgres.RoleSystem.
func Identify(ctx context.Context, pool *pgxpool.Pool, token string) (Token, error) {
	rows, _ := pool.Query(ctx, identifySQL, pgx.StrictNamedArgs{"hash": hashed(token)})
	t, err := pgx.CollectExactlyOneRow(rows, scanToken)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Token{}, ErrUnknownToken
	case err != nil:
		return Token{}, fmt.Errorf("identify a token: %w", err)
	}
	return t, nil
}

// authenticateSQL finds a token by its hash, before the tenant is known. Its functions run as the
// owner of the tables. Index: api_tokens_pkey. Locks: none.
const authenticateSQL = `
SELECT /* tokens.authenticate */ tenant_id, name, roles, rate_read, rate_write, expires_in, token_limits(@hash::bytea)
  FROM find_token(@hash::bytea)`

// Hash is the SHA-256 of a token.
type Hash [sha256.Size]byte

// Fingerprint returns the same as Fingerprint of the token.
func (h Hash) Fingerprint() string { return fingerprint(h[:]) }

// HashOf returns the hash of the token. A token has 256 random bits, so it needs no slow hash.
func HashOf(token string) Hash { return sha256.Sum256([]byte(token)) }

func hashed(token string) []byte {
	h := HashOf(token)
	return h[:]
}

// Lookup finds tokens in the truth. Its pool acts as postgres.RoleAPI. The times that it returns
// are taken after the wait for a connection and before the query.
type Lookup struct{ pool *pgxpool.Pool }

// NewLookup returns a Lookup on pool.
func NewLookup(pool *pgxpool.Pool) Lookup { return Lookup{pool} }

// Find returns the principal of the token, or ErrUnauthenticated. It refuses a token that was
// revoked or had expired at asOf; it may accept one that is revoked later. p.Lives is the time
// until the token expires.
func (l Lookup) Find(ctx context.Context, h Hash) (p Principal, asOf time.Time, err error) {
	return l.find(ctx, authenticateSQL, pgx.StrictNamedArgs{"hash": h[:]})
}

func (l Lookup) find(ctx context.Context, sql string, args pgx.StrictNamedArgs) (p Principal, asOf time.Time, err error) {
	conn, err := l.pool.Acquire(ctx)
	if err != nil {
		return Principal{}, asOf, fmt.Errorf("authenticate: %w", err)
	}
	defer conn.Release()
	asOf = time.Now()
	rows, _ := conn.Query(ctx, sql, args)
	p, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (p Principal, err error) {
		var read, write *string
		var lives *float64
		err = row.Scan(&p.TenantID, &p.Name, &p.Roles, &read, &write, &lives, &p.Limits)
		if lives != nil {
			p.Lives = time.Duration(min(*lives, forever.Seconds()) * float64(time.Second))
		}
		return p, errors.Join(err, setRate(&p.ReadRate, read), setRate(&p.WriteRate, write))
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Principal{}, asOf, ErrUnauthenticated
	case err != nil:
		return Principal{}, asOf, fmt.Errorf("authenticate: %w", err)
	}
	return p, asOf, nil
}

const forever = 100 * 365 * 24 * time.Hour

// changedTokensSQL reads which tokens have changed, newest first. Index: api_tokens_change_idx.
// Locks: none.
const changedTokensSQL = `SELECT /* tokens.changed */ change, token_hash FROM changed_tokens(@since::bigint, @most::integer)`

// maxChanged is the most changes that Changed returns.
const maxChanged = 1000

// Changed returns the tokens that have changed after the change since: they were revoked, replaced,
// or made again with other roles. It also returns the last change, for the next call. all reports
// that more tokens may have changed.
func (l Lookup) Changed(ctx context.Context, since int64) (changed []Hash, last int64, all bool, asOf time.Time, err error) {
	conn, err := l.pool.Acquire(ctx)
	if err != nil {
		return nil, since, false, asOf, fmt.Errorf("read the changed tokens: %w", err)
	}
	defer conn.Release()
	asOf, last = time.Now(), since
	rows, _ := conn.Query(ctx, changedTokensSQL, pgx.StrictNamedArgs{"since": since, "most": maxChanged})
	changed, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (h Hash, err error) {
		var change int64
		var hash []byte
		err = row.Scan(&change, &hash)
		copy(h[:], hash)
		last = max(last, change)
		return h, err
	})
	if err != nil {
		return nil, since, false, asOf, fmt.Errorf("read the changed tokens: %w", err)
	}
	return changed, last, len(changed) == maxChanged, asOf, nil
}

// setRate reads a rate of the database, which has checked its form.
func setRate(to **Rate, text *string) error {
	if text == nil {
		return nil
	}
	r, err := ParseRate(*text)
	*to = &r
	return err
}

// text returns the database's form of a rate that may be absent.
func (r *Rate) text() *string {
	if r == nil {
		return nil
	}
	s := r.String()
	return &s
}
