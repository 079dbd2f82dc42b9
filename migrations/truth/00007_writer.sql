-- +goose Up
-- Direct SQL writers append events, and write follows and comments; nothing else. What the relay writes on an outbox row
-- (processed_at, attempts, stream_seq...) and what names a row (id, event_id) is not theirs, and neither is a row's key once it stands.
REVOKE ALL ON follows, comments, comment_keys, threads, outbox_messages FROM tidings_writer;
REVOKE ALL ON SEQUENCE object_version_id FROM tidings_writer;
GRANT SELECT, INSERT ON follows, comments TO tidings_writer;
GRANT UPDATE (status, version, positioned_at, updated_at) ON follows TO tidings_writer;
GRANT UPDATE (body, author_state, version, updated_at) ON comments TO tidings_writer;
GRANT INSERT (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, trace_id)
  ON outbox_messages TO tidings_writer;
GRANT SELECT (id, event_id, slot, delayed) ON outbox_messages TO tidings_writer; -- for RETURNING
