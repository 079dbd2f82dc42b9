-- +goose Up
-- Edges may lead to children. The target of such an edge is the id of a child, a UUID in lower case.

SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- let_api_lock_shelf lets the API lock the shelved children of a kind: while it writes an edge to one, and, in the order of their keys, before it brings
-- them back. A statement that locks wants the right to update some column. Nobody can change this one, because the table is the partition of its value.
-- It returns false when the API has the right.
-- +goose StatementBegin
CREATE FUNCTION let_api_lock_shelf(kind text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  shelf text := quote_ident('children_archive_' || kind);
BEGIN
  PERFORM pg_advisory_xact_lock(x'74646b64'::bigint); -- "tdkd": one at a time, as in make_child_kind
  IF has_any_column_privilege('tidings_api', shelf, 'UPDATE') THEN
    RETURN false;
  END IF;
  EXECUTE format('GRANT UPDATE (kind) ON %s TO tidings_api', shelf);
  RETURN true;
END $$;
-- +goose StatementEnd

-- make_edges_to_children makes what a kind of edges to children needs beside what make_edge_kind makes: an index by target, by which an erasure finds the
-- edges to a child. narrow_ids holds the targets to their form. It returns false when the index is there, and changes nothing. In a table with rows, it
-- keeps writers waiting while it runs.
-- +goose StatementBegin
CREATE FUNCTION make_edges_to_children(kind text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  part text := 'edges_' || kind;
BEGIN
  PERFORM pg_advisory_xact_lock(x'7464656b'::bigint); -- "tdek": one at a time, as in make_edge_kind
  IF to_regclass(quote_ident(part || '_to_idx')) IS NOT NULL THEN
    RETURN false;
  END IF;
  EXECUTE format('CREATE INDEX %I ON %I (tenant_id, to_id, from_id)', part || '_to_idx', part);
  -- The primary key is the youngest index again, which the planner takes in an empty table: see make_child_kind.
  EXECUTE format('ALTER TABLE %I DROP CONSTRAINT %I, ADD PRIMARY KEY (tenant_id, from_id, to_id)', part, part || '_pkey');
  RETURN true;
END $$;
-- +goose StatementEnd
-- contract: new functions, which no release calls
REVOKE ALL ON FUNCTION let_api_lock_shelf(text), make_edges_to_children(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION let_api_lock_shelf(text), make_edges_to_children(text) TO tidings_system;
