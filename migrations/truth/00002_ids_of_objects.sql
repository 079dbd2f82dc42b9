-- +goose Up
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- narrow_ids lets the ids in the tables of a kind have one form each: those of origins and targets of edges, or those of objects and authors of
-- children. A form is 'integer', a decimal number from 1 to 2^63-1; 'uuid', in lower case with hyphens; or 'string', any id. The constraint of a
-- column has its name and its form in its own: edges_like_to_uuid. The function returns false if all constraints are there, and takes no lock then.
-- Otherwise it locks the tables, ACCESS EXCLUSIVE, and reads their rows: call it with a lock_timeout. A row with an id of another form is an error.
-- +goose StatementBegin
CREATE FUNCTION narrow_ids(kind text, first text, second text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  tab     text;
  col     text;
  form    text;
  other   text;
  name    text;
  present boolean;
  changed boolean := false;
BEGIN
  IF NOT ARRAY[first, second] <@ ARRAY['string', 'integer', 'uuid'] THEN
    RAISE invalid_parameter_value USING MESSAGE = format('%s, %s: want string, integer or uuid', first, second);
  END IF;
  PERFORM pg_advisory_xact_lock(x'74646b64'::bigint); -- "tdkd": one at a time, as in make_child_kind
  FOR tab, col, form IN
    SELECT t.* FROM (VALUES ('edges_' || kind, 'from_id', first), ('edges_' || kind, 'to_id', second),
        ('children_' || kind, 'object_id', first), ('children_' || kind, 'author_id', second),
        ('children_archive_' || kind, 'object_id', first), ('children_archive_' || kind, 'author_id', second)) t
     WHERE to_regclass(format('%I.%I', current_schema(), t.column1)) IS NOT NULL
  LOOP
    FOREACH other IN ARRAY ARRAY['integer', 'uuid'] LOOP
      name := tab || '_' || replace(col, 'id', other);
      present := EXISTS (SELECT FROM pg_constraint WHERE conrelid = to_regclass(quote_ident(tab)) AND conname = name);
      IF present AND form <> other THEN
        EXECUTE format('ALTER TABLE %I DROP CONSTRAINT %I', tab, name);
      ELSIF form = other AND NOT present THEN
        -- numbers of 19 digits are in the order of their text
        EXECUTE format(CASE other
          WHEN 'integer' THEN 'ALTER TABLE %1$I ADD CONSTRAINT %2$I CHECK (%3$I ~ ''^[1-9][0-9]{0,18}$'' AND (octet_length(%3$I) < 19 OR %3$I <= ''9223372036854775807''))'
          ELSE 'ALTER TABLE %1$I ADD CONSTRAINT %2$I CHECK (%3$I ~ ''^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$'')' END, tab, name, col);
      END IF;
      changed := changed OR present <> (form = other);
    END LOOP;
  END LOOP;
  RETURN changed;
END $$;
-- +goose StatementEnd
-- contract: the function is new
REVOKE ALL ON FUNCTION narrow_ids(text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION narrow_ids(text, text, text) TO tidings_system;
