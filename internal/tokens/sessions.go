package tokens

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// MaxSessions is how many sessions of the console a token has at once. Signing in once more ends
// the oldest.
const MaxSessions = 100

// Session is the SHA-256 of a session's cookie. The database keeps it, so nobody gets a cookie from
// the database.
type Session [sha256.Size]byte

// startSessionSQL adds a session. It deletes the token's oldest sessions beyond the limit, and some
// that have expired. Index: console_sessions_token_idx, console_sessions_expires_idx. Locks: the
// rows deleted.
const startSessionSQL = `
WITH oldest AS (SELECT id FROM console_sessions WHERE token_hash = @hash ORDER BY started_at DESC, id
                OFFSET @most - 1 FOR UPDATE SKIP LOCKED),
     expired AS (SELECT id FROM console_sessions WHERE expires_at <= now() ORDER BY expires_at LIMIT 100 FOR UPDATE SKIP LOCKED),
     gone AS (DELETE FROM console_sessions WHERE id IN (SELECT id FROM oldest UNION ALL SELECT id FROM expired))
INSERT /* tokens.start_session */ INTO console_sessions (id, token_hash, expires_at) VALUES (@id, @hash, now() + @lives::interval)`

// StartSession records a session of the token, which ends after lives. pool acts as
// postgres.RoleSystem, here and in the other functions of sessions.
func StartSession(ctx context.Context, pool *pgxpool.Pool, id Session, h Hash, lives time.Duration) error {
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, startSessionSQL, pgx.StrictNamedArgs{"id": id[:], "hash": h[:], "lives": lives, "most": MaxSessions})
		return err
	})
	if err != nil {
		return fmt.Errorf("start a session of the console: %w", err)
	}
	return nil
}

// endSessionSQL deletes a session. Index: console_sessions_pkey. Locks: the row.
const endSessionSQL = `DELETE /* tokens.end_session */ FROM console_sessions WHERE id = @id`

// EndSession ends a session for all processes. A session that has ended stays ended.
func EndSession(ctx context.Context, pool *pgxpool.Pool, id Session) error {
	if _, err := pool.Exec(ctx, endSessionSQL, pgx.StrictNamedArgs{"id": id[:]}); err != nil {
		return fmt.Errorf("end a session of the console: %w", err)
	}
	return nil
}

// findSessionSQL finds the token of a session. Index: console_sessions_pkey, api_tokens_pkey.
// Locks: none.
const findSessionSQL = `
SELECT /* tokens.find_session */ tenant_id, name, roles, rate_read, rate_write, expires_in, token_limits(@hash::bytea)
  FROM console_sessions s CROSS JOIN LATERAL find_token(s.token_hash)
 WHERE s.id = @id AND s.token_hash = @hash::bytea AND s.expires_at > now()`

// FindSession is Find for a session of the token. If the session has ended, it returns
// ErrUnauthenticated too.
func (l Lookup) FindSession(ctx context.Context, id Session, h Hash) (p Principal, asOf time.Time, err error) {
	return l.find(ctx, findSessionSQL, pgx.StrictNamedArgs{"id": id[:], "hash": h[:]})
}
