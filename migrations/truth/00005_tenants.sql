-- +goose Up
-- A transaction of the API writes for several tenants at once (docs/adr/0028-tenants-in-one-statement.md): the setting tidings.tenant lists them, "7" or "7,8".

-- Writers use the outbox last, so the outbox is altered last, and each waits for the other in one direction.
-- IS TRUE keeps the list out of the conditions of an index: each statement names its tenants itself.
-- +goose StatementBegin
DO $$
DECLARE
  own  text := $q$tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint$q$;
  ones text := $q$(tenant_id = ANY ((SELECT string_to_array(current_setting('tidings.tenant', true), ','))::bigint[])) IS TRUE$q$;
  p    record;
BEGIN
  FOR p IN SELECT tablename, with_check FROM pg_policies WHERE schemaname = current_schema() AND policyname = 'tenant'
           ORDER BY tablename LIKE 'outbox%', tablename LOOP
    EXECUTE format('ALTER POLICY tenant ON %I USING (%s)', p.tablename, ones) ||
      CASE WHEN p.with_check IS NULL THEN '' ELSE format(' WITH CHECK (%s)', ones) END;
  END LOOP;
  -- The functions that make the tables of a kind give them the same policy. Two of the texts are quoted once more.
  FOR p IN SELECT pg_get_functiondef(oid) AS def FROM pg_proc WHERE pronamespace = quote_ident(current_schema())::regnamespace AND prosrc LIKE '%tidings.tenant%' LOOP
    EXECUTE replace(replace(p.def, own, ones), replace(own, '''', ''''''), replace(ones, '''', ''''''));
  END LOOP;
END $$;
-- +goose StatementEnd
