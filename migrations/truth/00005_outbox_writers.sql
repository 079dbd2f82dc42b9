-- +goose Up
-- No row that a writer appends may keep its relay from updating it. The relay moves a row's available_at: for a retry, or to that of a row ahead, which
-- may have begun later. So the bound of 366 days is the writer's, and no longer the row's, and a type is short enough for the indexes of rows that wait.
-- contract: a bound that every release's rows keep
ALTER TABLE outbox_messages DROP CONSTRAINT outbox_messages_available_at_check;
CREATE POLICY available_at_within_366_days ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer, tidings_api
  WITH CHECK (available_at < inserted_at + interval '366 days');
CREATE POLICY types_within_1000_bytes ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer, tidings_api
  WITH CHECK (octet_length(aggregate_type) <= 1000 AND octet_length(event_type) <= 1000);
CREATE POLICY trace_id_within_64_kib ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer, tidings_api
  WITH CHECK (trace_id IS NULL OR octet_length(trace_id) <= 65536);
-- The system's own events measure the path of all others, so only a relay writes them.
CREATE POLICY heartbeats_are_the_relays ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer, tidings_api
  WITH CHECK (tenant_id <> 0 AND aggregate_type <> 'heartbeat');

-- outbox_range_return, as it was, except that a range which was archived before loses the same bound.
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_range_return(first bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  name    text := 'outbox_messages_' || first;
  columns text := outbox_messages_columns();
  r       outbox_ranges;
BEGIN
  SELECT * INTO r FROM outbox_ranges WHERE from_id = first AND state = 'ARCHIVED' FOR UPDATE;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  LOCK TABLE ONLY outbox_messages IN ACCESS EXCLUSIVE MODE;
  EXECUTE format('ALTER TABLE outbox_messages_archive DETACH PARTITION %I', name);
  EXECUTE format('ALTER TABLE %I DROP CONSTRAINT IF EXISTS outbox_messages_available_at_check', name);
  EXECUTE format('WITH back AS (DELETE FROM outbox_messages_default WHERE id >= %s AND id < %s RETURNING *) INSERT INTO %I (%s) SELECT %4$s FROM back',
    r.from_id, r.to_id, name, columns);
  EXECUTE format('ALTER TABLE outbox_messages ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', name, r.from_id, r.to_id);
  UPDATE outbox_ranges SET state = 'OPEN', settled_at = NULL, archived_at = NULL WHERE from_id = first;
  RETURN true;
END $$;
-- +goose StatementEnd
