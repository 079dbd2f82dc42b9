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
	RoleExport   = "export" // everything of a tenant that its events say: bodies that wait for a moderator, and authors of what is gone
)

// Roles returns every role.
func Roles() []string { return []string{RoleRead, RoleWrite, RoleModerate, RoleAdmin, RoleExport} }

// Errors of tokens.
var (
	// ErrUnauthenticated reports a token that is unknown, expired or revoked.
	ErrUnauthenticated = errors.New("tokens: unknown, expired or revoked token")
	// ErrExists reports a name that the tenant has given to another token, which is neither revoked nor expired.
	ErrExists = errors.New("tokens: the tenant has a token of this name")
	// ErrUnknown reports a name that the tenant never gave to a token, or that has no current one to replace.
	ErrUnknown = errors.New("tokens: the tenant has no token of this name")
	// ErrNobodys reports a token that this installation never made.
	ErrNobodys = errors.New("tokens: this installation never made this token")
)

// tokenPrefix makes a token recognisable to people and to scanners of leaked secrets.
const tokenPrefix = "tdg_"

// SystemTenant is the tenant of system tokens: an operator signs in to the console with one and sees every tenant. No route of the API takes it.
const SystemTenant = 0

// Principal is whom a token stands for: a service of one tenant, which acts for every user of it, or an operator (SystemTenant).
type Principal struct {
	TenantID  int64
	Name      string
	Roles     []string
	ReadRate  *Rate // the token's own; nil: as configured
	WriteRate *Rate
	Lives     time.Duration // from the look-up until it expires; 0: for ever
}

// Has reports whether the principal has the role.
func (p Principal) Has(role string) bool { return slices.Contains(p.Roles, role) }

// System reports whether the principal's token is a system token.
func (p Principal) System() bool { return p.TenantID == SystemTenant }

// New returns a random token of 256 bits. Nothing knows it yet.
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
			return fmt.Errorf("%w: a token is visible ASCII", store.ErrInvalid)
		}
	}
	if token == "" {
		return fmt.Errorf("%w: the token is empty", store.ErrInvalid)
	}
	return nil
}

// Spec is a token to be made.
type Spec struct {
	TenantID  int64  // SystemTenant: a system token
	Name      string // the actor of writes that name none
	Roles     []string
	Expires   time.Time // zero: never
	ReadRate  *Rate     // nil: as configured
	WriteRate *Rate
	Replace   bool          // take the place of the name's current token, whose roles and rates go on where none are given
	Overlap   time.Duration // how long that one goes on working, at most
}

// retireTokenSQL makes room for a token of the name: what has expired gives way, and with @replace the current one too.
// Index: api_tokens_current_key.   Locks: the name's current token.
const retireTokenSQL = `
UPDATE /* tokens.retire_token */ api_tokens SET replaced_at = now(), expires_at = LEAST(expires_at, now() + @overlap::interval)
 WHERE tenant_id = @tenant::bigint AND name = @name::text AND revoked_at IS NULL AND replaced_at IS NULL AND (@replace::boolean OR expires_at <= now())
RETURNING expires_at, roles, rate_read, rate_write`

// createTokenSQL adds a token.
// Index: none.   Locks: none but the new row.
const createTokenSQL = `
INSERT /* tokens.create_token */ INTO api_tokens (token_hash, tenant_id, name, roles, expires_at, rate_read, rate_write)
VALUES (@hash::bytea, @tenant::bigint, @name::text, @roles::text[], @expires::timestamptz, @rate_read::text, @rate_write::text)`

// Issued is a token that was made.
type Issued struct {
	Token    string // only its hash is kept
	Roles    []string
	Replaced *time.Time // when the token before it ends; nil: there was none
}

// retired is the token before.
type retired struct {
	Ends        *time.Time
	Roles       []string
	Read, Write *string
}

// Issue makes a token. A name has one current token: ErrExists while there is one, unless spec replaces it, and ErrUnknown when
// there is none whose roles could go on. pool acts as postgres.RoleSystem.
func Issue(ctx context.Context, pool *pgxpool.Pool, spec Spec) (Issued, error) {
	made := Issued{Token: New()}
	var until *time.Time
	if !spec.Expires.IsZero() {
		until = &spec.Expires
	}
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
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
		_, err = tx.Exec(ctx, createTokenSQL, pgx.StrictNamedArgs{
			"hash": hashed(made.Token), "tenant": spec.TenantID, "name": spec.Name, "roles": made.Roles, "expires": until, "rate_read": read, "rate_write": write,
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

// Create is Issue of a token with the configured rates that replaces none. A zero expires means never.
func Create(ctx context.Context, pool *pgxpool.Pool, tenant int64, name string, roles []string, expires time.Time) (string, error) {
	made, err := Issue(ctx, pool, Spec{TenantID: tenant, Name: name, Roles: roles, Expires: expires})
	return made.Token, err
}

// ensureTokenSQL makes the token the name's, whatever had become of it.
// Index: api_tokens_pkey.   Locks: the token.
const ensureTokenSQL = `
INSERT /* tokens.ensure_token */ INTO api_tokens AS t (token_hash, tenant_id, name, roles, rate_read, rate_write)
VALUES (@hash::bytea, @tenant::bigint, @name::text, @roles::text[], 'off', 'off')
ON CONFLICT (token_hash) DO UPDATE SET roles = EXCLUDED.roles, expires_at = NULL, revoked_at = NULL, replaced_at = NULL, rate_read = 'off', rate_write = 'off'
 WHERE t.tenant_id = EXCLUDED.tenant_id AND t.name = EXCLUDED.name`

// Ensure makes token the one that name of tenant has, with these roles, no end and no limits. The ones it had before are void. pool
// acts as postgres.RoleSystem.
func Ensure(ctx context.Context, pool *pgxpool.Pool, tenant int64, name, token string, roles []string) error {
	if err := checkToken(tenant, name, token, roles); err != nil {
		return err
	}
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, revokeTokensSQL, pgx.StrictNamedArgs{"tenant": tenant, "name": name}); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, ensureTokenSQL, pgx.StrictNamedArgs{"hash": hashed(token), "tenant": tenant, "name": name, "roles": roles})
		if err == nil && tag.RowsAffected() == 0 {
			err = ErrExists // under another name
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("ensure token %q of tenant %d: %w", name, tenant, err)
	}
	return nil
}

// revokeTokensSQL ends every token of the name, those that were replaced too.
// Index: api_tokens_name_idx.   Locks: the tokens.
const revokeTokensSQL = `
UPDATE /* tokens.revoke_tokens */ api_tokens SET revoked_at = now() WHERE tenant_id = @tenant::bigint AND name = @name::text AND revoked_at IS NULL`

// revokedAtSQL says when the last token of the name was revoked.
// Index: api_tokens_name_idx.   Locks: none.
const revokedAtSQL = `SELECT /* tokens.revoked_at */ max(revoked_at) FROM api_tokens WHERE tenant_id = @tenant::bigint AND name = @name::text`

// Revoke ends every token of the name, those that it replaced included, and returns how many it ended and when the last one was. Done
// again it changes nothing. ErrUnknown: there never was one. No API process takes them a second later. pool acts as postgres.RoleSystem.
func Revoke(ctx context.Context, pool *pgxpool.Pool, tenant int64, name string) (n int64, at time.Time, err error) {
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		args := pgx.StrictNamedArgs{"tenant": tenant, "name": name}
		tag, err := tx.Exec(ctx, revokeTokensSQL, args)
		if err != nil {
			return err
		}
		n = tag.RowsAffected()
		rows, _ := tx.Query(ctx, revokedAtSQL, args)
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

// Token is what is known of a token. Neither the token nor its whole hash is.
type Token struct {
	Fingerprint                string // Fingerprint of the token
	TenantID                   int64
	Name                       string
	Roles                      []string
	Created                    time.Time
	Expires, Replaced, Revoked *time.Time // nil: not
	ReadRate, WriteRate        *Rate      // nil: as configured
	Works                      bool       // neither revoked nor expired
}

const tokenColumns = `token_hash, tenant_id, name, roles, created_at, expires_at, replaced_at, revoked_at, rate_read, rate_write,
       revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())`

func scanToken(row pgx.CollectableRow) (t Token, err error) {
	var hash []byte
	var read, write *string
	err = row.Scan(&hash, &t.TenantID, &t.Name, &t.Roles, &t.Created, &t.Expires, &t.Replaced, &t.Revoked, &read, &write, &t.Works)
	t.Fingerprint = fingerprint(hash)
	return t, errors.Join(err, setRate(&t.ReadRate, read), setRate(&t.WriteRate, write))
}

// fingerprintLen is how many bytes of the hash tell a token from another: too few to find a token by, or to prove that one is it.
const fingerprintLen = 6

func fingerprint(hash []byte) string {
	return hex.EncodeToString(hash[:min(len(hash), fingerprintLen)])
}

// Fingerprint is a short name of a token, for lists and logs: 12 hexadecimal digits of its SHA-256.
func Fingerprint(token string) string { return fingerprint(hashed(token)) }

// listTokensSQL reads the tokens of a tenant, or of all.
// Index: api_tokens_name_idx for one tenant; all: a scan of a table with a row per token ever made.   Locks: none.
const listTokensSQL = `
SELECT /* tokens.list_tokens */ ` + tokenColumns + `
  FROM api_tokens WHERE @tenant::bigint = 0 OR tenant_id = @tenant::bigint ORDER BY tenant_id, name, created_at, token_hash`

// List returns the tokens of a tenant, of all tenants for 0, by tenant, name and age, former ones included. pool acts as postgres.RoleSystem.
func List(ctx context.Context, pool *pgxpool.Pool, tenant int64) ([]Token, error) {
	rows, _ := pool.Query(ctx, listTokensSQL, pgx.StrictNamedArgs{"tenant": tenant})
	all, err := pgx.CollectRows(rows, scanToken)
	if err != nil {
		return nil, fmt.Errorf("list the tokens of tenant %d: %w", tenant, err)
	}
	return all, nil
}

// identifySQL finds a token by its hash, whatever has become of it.
// Index: api_tokens_pkey.   Locks: none.
const identifySQL = `SELECT /* tokens.identify */ ` + tokenColumns + ` FROM api_tokens WHERE token_hash = @hash::bytea`

// Identify returns what is known of a token that was found somewhere, also of one that was revoked or has expired, or ErrNobodys. No error names it, and the
// database gets its hash alone. pool acts as postgres.RoleSystem.
func Identify(ctx context.Context, pool *pgxpool.Pool, token string) (Token, error) {
	rows, _ := pool.Query(ctx, identifySQL, pgx.StrictNamedArgs{"hash": hashed(token)})
	t, err := pgx.CollectExactlyOneRow(rows, scanToken)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Token{}, ErrNobodys
	case err != nil:
		return Token{}, fmt.Errorf("identify a token: %w", err)
	}
	return t, nil
}

// authenticateSQL finds a token by its hash, before the tenant is known; the function runs as the owner of the tables.
// Index: api_tokens_pkey.   Locks: none.
const authenticateSQL = `SELECT /* tokens.authenticate */ tenant_id, name, roles, rate_read, rate_write, expires_in FROM find_token(@hash::bytea)`

// Hash is the SHA-256 of a token.
type Hash [sha256.Size]byte

// Fingerprint is that of the token (Fingerprint).
func (h Hash) Fingerprint() string { return fingerprint(h[:]) }

// HashOf is the token's: 256 random bits need no slow hash.
func HashOf(token string) Hash { return sha256.Sum256([]byte(token)) }

func hashed(token string) []byte {
	h := HashOf(token)
	return h[:]
}

// Lookup finds tokens in the truth. Its pool acts as postgres.RoleAPI. A moment that it returns lies before what it says was read, behind the wait
// for a connection.
type Lookup struct{ pool *pgxpool.Pool }

// NewLookup returns a Lookup on pool.
func NewLookup(pool *pgxpool.Pool) Lookup { return Lookup{pool} }

// Find returns whom the token stands for, or ErrUnauthenticated. What was revoked or had expired at asOf is refused, what is later may not be;
// p.Lives says when it expires.
func (l Lookup) Find(ctx context.Context, h Hash) (p Principal, asOf time.Time, err error) {
	conn, err := l.pool.Acquire(ctx)
	if err != nil {
		return Principal{}, asOf, fmt.Errorf("authenticate: %w", err)
	}
	defer conn.Release()
	asOf = time.Now()
	rows, _ := conn.Query(ctx, authenticateSQL, pgx.StrictNamedArgs{"hash": h[:]})
	p, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (p Principal, err error) {
		var read, write *string
		var lives *float64
		err = row.Scan(&p.TenantID, &p.Name, &p.Roles, &read, &write, &lives)
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

// changedTokensSQL reads which tokens have changed, the last ones first.
// Index: api_tokens_change_idx.   Locks: none.
const changedTokensSQL = `SELECT /* tokens.changed */ change, token_hash FROM changed_tokens(@since::bigint, @most::integer)`

// maxChanged is how many changes Changed tells of.
const maxChanged = 1000

// Changed returns the tokens that were changed (revoked, replaced, or made anew with other roles) after the change since, and the last change, to ask from
// there. all: there may be more than those, back to since.
func (l Lookup) Changed(ctx context.Context, since int64) (changed []Hash, last int64, all bool, asOf time.Time, err error) {
	conn, err := l.pool.Acquire(ctx)
	if err != nil {
		return nil, since, false, asOf, fmt.Errorf("look for changed tokens: %w", err)
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
		return nil, since, false, asOf, fmt.Errorf("look for changed tokens: %w", err)
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

// text is how the database has a rate that may be absent.
func (r *Rate) text() *string {
	if r == nil {
		return nil
	}
	s := r.String()
	return &s
}
