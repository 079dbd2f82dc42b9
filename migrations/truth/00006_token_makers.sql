-- +goose Up
-- A token that another token made in the console is never more than its maker.
--   made_by    the hash of the token of the same tenant that made it; null: an operator made it. Whoever revokes the maker revokes it;
--   limits_of  the name of the token whose limits it shares, which is the first of the makers; null: it has limits of its own.
ALTER TABLE api_tokens ADD COLUMN made_by bytea, ADD COLUMN limits_of text;
GRANT SELECT (limits_of) ON api_tokens TO tidings_reader; -- made_by is a hash

SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- token_limits names the token whose limits a token shares, for a caller that has no tenant yet. It runs as the owner of the tables.
-- +goose StatementBegin
CREATE FUNCTION token_limits(hash bytea) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT coalesce(t.limits_of, t.name) FROM api_tokens t WHERE t.token_hash = hash
$$;
-- +goose StatementEnd
-- contract: no release before this one has the function
REVOKE ALL ON FUNCTION token_limits(bytea) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION token_limits(bytea) TO tidings_api, tidings_system;

-- revoke_made_tokens revokes what revoked tokens made, and what that made, whichever release or person revokes them. Each level is a statement of its
-- own, which sees every token that was made while the one before it waited: whoever makes a token holds its maker's row. Tokens are few, and seldom
-- revoked: a level reads all of them.
-- +goose StatementBegin
CREATE FUNCTION revoke_made_tokens() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE makers bytea[];
BEGIN
  SELECT array_agg(n.token_hash) INTO makers FROM after n JOIN before o ON o.token_hash = n.token_hash
   WHERE o.revoked_at IS NULL AND n.revoked_at IS NOT NULL;
  WHILE makers IS NOT NULL LOOP
    WITH ended AS (UPDATE api_tokens SET revoked_at = now() WHERE made_by = ANY (makers) AND revoked_at IS NULL RETURNING token_hash)
    SELECT array_agg(token_hash) INTO makers FROM ended;
  END LOOP;
  RETURN NULL;
END $$;
-- +goose StatementEnd
-- contract: no release before this one has the function
REVOKE ALL ON FUNCTION revoke_made_tokens() FROM PUBLIC;
CREATE TRIGGER revoke_made AFTER UPDATE ON api_tokens REFERENCING OLD TABLE AS before NEW TABLE AS after FOR EACH STATEMENT
  WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION revoke_made_tokens();
