-- +goose Up
-- require_mark ends the round of a relay whose mark does not match the database. Between the statements of a batch, only the server can end it.
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);
-- +goose StatementBegin
CREATE FUNCTION require_mark(matches boolean) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  IF NOT matches THEN
    RAISE EXCEPTION 'the mark does not match the database' USING ERRCODE = 'TD001';
  END IF;
END $$;
-- +goose StatementEnd
-- contract: no release before this one has the function
REVOKE ALL ON FUNCTION require_mark(boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION require_mark(boolean) TO tidings_relay;
