-- +goose Up
-- The members by kind, as the leases (00003_lease_rows.sql). An expired member is deleted by the others of its kind.
-- +goose StatementBegin
DO $$
DECLARE r record;
BEGIN
  ALTER TABLE lease_members ENABLE ROW LEVEL SECURITY;
  FOR r IN SELECT name, rows, 'tidings_' || name AS role
             FROM (VALUES ('relay', $q$kind = 'relay'$q$), ('consumer', $q$NOT (kind IN ('relay', 'jobs') OR starts_with(kind, 'jobs-'))$q$),
                          ('system', 'true'), ('reader', 'true')) AS of(name, rows)
             JOIN pg_roles ON rolname = 'tidings_' || name
  LOOP
    IF NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = 'lease_members'::regclass AND polname = r.name) THEN
      EXECUTE format('CREATE POLICY %I ON lease_members TO %I USING (%s) WITH CHECK (%s)', r.name, r.role, r.rows, r.rows);
    END IF;
  END LOOP;
END $$;
-- +goose StatementEnd

-- console_sessions: who is signed in to the console. id is the SHA-256 of the session's cookie. Signing out deletes the row, and then no process accepts the
-- cookie. A token has few sessions (tokens.MaxSessions); expired ones are deleted when somebody signs in.
CREATE TABLE console_sessions (
  id         bytea       PRIMARY KEY CHECK (length(id) = 32),
  token_hash bytea       NOT NULL,
  started_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz NOT NULL
);
CREATE INDEX console_sessions_token_idx ON console_sessions (token_hash, started_at);
CREATE INDEX console_sessions_expires_idx ON console_sessions (expires_at);
GRANT SELECT, INSERT, DELETE, UPDATE (expires_at) ON console_sessions TO tidings_system; -- UPDATE: SELECT FOR UPDATE wants it for some column
GRANT SELECT (id, started_at, expires_at) ON console_sessions TO tidings_reader; -- not the hash of the token: see api_tokens
