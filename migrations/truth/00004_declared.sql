-- +goose Up
-- Who may append events of kinds and of upstreams (migrations/outbox/00002_upstreams.sql), beside each other.

CREATE POLICY tenant ON upstreams TO tidings_api USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
  WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint);
GRANT SELECT ON upstreams TO tidings_api;
ALTER POLICY available_at_within_366_days ON outbox_messages TO tidings_writer, tidings_api, tidings_upstream;

SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- is_kind tells whether an aggregate type is that of a kind, or of threads.
-- +goose StatementBegin
CREATE FUNCTION is_kind(aggregate_type text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT aggregate_type = 'thread' OR EXISTS (SELECT FROM child_kinds WHERE kind = aggregate_type)
      OR EXISTS (SELECT FROM pg_inherits WHERE inhparent = 'edges'::regclass AND inhrelid = to_regclass(quote_ident('edges_' || aggregate_type)))
$$;
-- +goose StatementEnd
-- contract: the function is new
REVOKE ALL ON FUNCTION is_kind(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION is_kind(text) TO tidings_writer;

ALTER POLICY writer_appends ON outbox_messages
  WITH CHECK (is_kind(aggregate_type) OR upstream_accepts(tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, payload_bytes, trace_id));
