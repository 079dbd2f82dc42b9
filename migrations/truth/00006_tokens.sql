-- +goose Up
-- The search_path of the functions, as in 00001.
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- A name has one current token and any number of former ones: revoked, or replaced and working until their end, so that a service can be given
-- another token without an outage, and a name that is free again can be used again.
--   replaced_at          when another token of the name took its place; it goes on working until expires_at;
--   rate_read, rate_write the token's own limits instead of the configured ones: "N/WINDOW" with the window in seconds, or "off".
ALTER TABLE api_tokens
  ADD COLUMN replaced_at timestamptz,
  ADD COLUMN rate_read   text CONSTRAINT api_tokens_rate_read_check CHECK (rate_read ~ '^(off|[1-9][0-9]{0,6}/[1-9][0-9]{0,4}s)$'),
  ADD COLUMN rate_write  text CONSTRAINT api_tokens_rate_write_check CHECK (rate_write ~ '^(off|[1-9][0-9]{0,6}/[1-9][0-9]{0,4}s)$'),
  DROP CONSTRAINT api_tokens_name_key;
CREATE UNIQUE INDEX api_tokens_current_key ON api_tokens (tenant_id, name) WHERE revoked_at IS NULL AND replaced_at IS NULL;
CREATE INDEX api_tokens_name_idx ON api_tokens (tenant_id, name);

-- find_token finds a token by its hash for a caller that has no tenant yet. It runs as the owner of the tables.
-- +goose StatementBegin
CREATE FUNCTION find_token(hash bytea)
RETURNS TABLE (tenant_id bigint, name text, roles text[], rate_read text, rate_write text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT t.tenant_id, t.name, t.roles, t.rate_read, t.rate_write FROM api_tokens t
   WHERE t.token_hash = hash AND t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > now())
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION find_token(bytea) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION find_token(bytea) TO tidings_api, tidings_system;
GRANT SELECT (replaced_at, rate_read, rate_write) ON api_tokens TO tidings_reader;
