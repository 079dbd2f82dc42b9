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
GRANT SELECT (id, event_id, partition, delayed) ON outbox_messages TO tidings_writer; -- for RETURNING
-- What they say of a comment is said of one that there is, with its post and its author: an erasure goes to the partition of the post, and finds
-- the events of an author by their comments. What is not named well the table's check refuses, with its own name.
CREATE POLICY writer_comment ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer
  WITH CHECK (CASE WHEN aggregate_type = 'comment' AND names_comment(payload, aggregate_id)
    THEN EXISTS (SELECT FROM all_comments c WHERE c.tenant_id = outbox_messages.tenant_id AND c.comment_id = (payload ->> 'comment_id')::uuid
                    AND c.post_id = aggregate_id AND c.author_id = (payload ->> 'author_id')::bigint)
    ELSE true END);
