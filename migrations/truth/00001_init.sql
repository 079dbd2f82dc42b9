-- +goose Up
-- The truth: what upstream services wrote, and the outbox that tells of it. Conventions:
--   * tenant_id leads every key of every tenant table, and row-level security compares it with the setting tidings.tenant;
--   * a transaction writes the state row first (its lock, and the transaction id), then the outbox row (its id), so that
--     the ids of one entity are in commit order;
--   * ids are given out one at a time (sequences stay at CACHE 1) for the same reason.

-- Roles are global to the server: another database of it may have made them already, or may be making them now.
-- +goose StatementBegin
DO $$
DECLARE r text;
BEGIN
  FOREACH r IN ARRAY ARRAY['tidings_api', 'tidings_system', 'tidings_writer'] LOOP
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = r) THEN
      BEGIN
        EXECUTE format('CREATE ROLE %I NOLOGIN', r);
      EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
      END;
    END IF;
    IF NOT pg_has_role(current_user, r, 'MEMBER') THEN
      EXECUTE format('GRANT %I TO %I', r, current_user);
    END IF;
  END LOOP;
END $$;
-- +goose StatementEnd

-- follows: one row per pair, kept for ever; REMOVED is a state. positioned_at moves only on REMOVED -> ACTIVE and orders pages.
CREATE TABLE follows (
  tenant_id     bigint      NOT NULL,
  follower_id   bigint      NOT NULL CHECK (follower_id > 0),
  followee_id   bigint      NOT NULL CHECK (followee_id > 0),
  status        text        NOT NULL DEFAULT 'ACTIVE' CHECK (status IN ('ACTIVE', 'REMOVED')),
  version       bigint      NOT NULL DEFAULT 1 CHECK (version > 0),
  created_at    timestamptz NOT NULL DEFAULT now(),
  positioned_at timestamptz NOT NULL DEFAULT now(),
  updated_at    timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, follower_id, followee_id),
  CONSTRAINT follows_no_self CHECK (follower_id <> followee_id)
);
CREATE INDEX follows_forward_idx ON follows (tenant_id, follower_id, positioned_at DESC, followee_id DESC) WHERE status = 'ACTIVE';

-- comments: the author's axis (author_state) and the moderator's (moderation_state) are apart, so that neither undoes the other.
-- path: one segment per level joined by '/', each 14 hexadecimal digits of microseconds and the slug; sorts as the thread reads.
CREATE TABLE comments (
  tenant_id        bigint      NOT NULL,
  comment_id       uuid        NOT NULL,
  post_id          bigint      NOT NULL CHECK (post_id > 0),
  parent_id        uuid,
  slug             text        COLLATE "C" NOT NULL,
  path             text        COLLATE "C" NOT NULL CHECK (length(path) BETWEEN 22 AND 64 * 23 - 1),
  author_id        bigint      NOT NULL CHECK (author_id > 0),
  body             text        NOT NULL,
  author_state     text        NOT NULL DEFAULT 'ACTIVE' CHECK (author_state IN ('ACTIVE', 'DELETED', 'ERASED')),
  moderation_state text        NOT NULL DEFAULT 'NONE' CHECK (moderation_state IN ('NONE', 'PENDING', 'APPROVED', 'HIDDEN', 'REMOVED')),
  version          bigint      NOT NULL DEFAULT 1 CHECK (version > 0),
  created_at       timestamptz NOT NULL DEFAULT now(),
  updated_at       timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, comment_id),
  CONSTRAINT comments_slug_key UNIQUE (tenant_id, post_id, slug),
  CONSTRAINT comments_path_key UNIQUE (tenant_id, post_id, path)
);

-- comment_keys: which create an Idempotency-Key already made. Unpartitioned, and outlives the archiving of its comment.
-- moderation_state is the comment's first one: with it and the repeated request the first answer can be given again.
CREATE TABLE comment_keys (
  tenant_id        bigint NOT NULL,
  author_id        bigint NOT NULL,
  idempotency_key  text   COLLATE "C" NOT NULL CHECK (length(idempotency_key) BETWEEN 1 AND 255),
  request_hash     bytea  NOT NULL,
  comment_id       uuid   NOT NULL,
  moderation_state text   NOT NULL DEFAULT 'NONE',
  PRIMARY KEY (tenant_id, author_id, idempotency_key)
);

-- threads: a post's settings as a versioned object (package versioned).
CREATE SEQUENCE object_version_id AS bigint START 100000000001;
CREATE TABLE threads (
  tenant_id     bigint NOT NULL,
  object        jsonb  NOT NULL,
  metadata      jsonb  NOT NULL,
  post_id       bigint GENERATED ALWAYS AS ((object ->> 'post_id')::bigint) STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                CONSTRAINT threads_version_state_check CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
  PRIMARY KEY (tenant_id, post_id, version_id),
  CONSTRAINT threads_created_by_check CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
  CONSTRAINT threads_last_update_time_check CHECK (metadata ->> 'last_update_time' IS NOT NULL)
);
CREATE UNIQUE INDEX threads_head_idx ON threads (tenant_id, post_id) WHERE version_state IN ('LATEST', 'DELETED');

-- api_tokens: bearer tokens by their SHA-256; looked up through authenticate_token(), before the tenant is known.
CREATE TABLE api_tokens (
  token_hash bytea       PRIMARY KEY CHECK (length(token_hash) = 32),
  tenant_id  bigint      NOT NULL CHECK (tenant_id > 0),
  name       text        NOT NULL CHECK (name <> ''),
  roles      text[]      NOT NULL CHECK (roles <@ ARRAY['read', 'write', 'moderate', 'admin']),
  created_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz,
  revoked_at timestamptz,
  CONSTRAINT api_tokens_name_key UNIQUE (tenant_id, name)
);

-- outbox_messages: the events, each written in the transaction of its state change and published by the relay.
--   event_id    names the event; an id alone does not (after a crash, a restore or a failover the same id is given out again);
--   slot        hash bucket of the aggregate, 32 of them, the same in every version and language, computed here only; a partition
--               (a JetStream stream) holds a range of slots;
--   delayed     waits for available_at: asked for by the writer, put off after a failure, or parked behind such a row;
--   behind      the row of the same aggregate that a parked row waits for;
--   partition   the partition that the event was published to, and stream_seq where it stands in that stream;
--   payload_bytes  of the payload's text, which the relay publishes. A claim reads no payload that it has no room for.
CREATE TABLE outbox_messages (
  id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   bigint      NOT NULL,
  event_type     text        NOT NULL,
  event_version  smallint    NOT NULL DEFAULT 1,
  payload        jsonb       NOT NULL,
  occurred_at    timestamptz NOT NULL DEFAULT now(),
  available_at   timestamptz NOT NULL DEFAULT now(),
  processed_at   timestamptz,
  attempts       smallint    NOT NULL DEFAULT 0,
  last_error     text,
  trace_id       text,
  event_id       uuid        NOT NULL DEFAULT gen_random_uuid(),
  stream_seq     bigint,
  inserted_at    timestamptz NOT NULL DEFAULT now(),
  behind         bigint,
  partition      integer,
  slot           smallint    NOT NULL GENERATED ALWAYS AS
    ((get_byte(decode(md5(tenant_id::text || '/' || aggregate_type || '/' || aggregate_id::text), 'hex'), 0) & 31)::smallint) STORED,
  delayed        boolean     NOT NULL GENERATED ALWAYS AS (available_at > inserted_at AND processed_at IS NULL) STORED,
  payload_bytes  integer     NOT NULL GENERATED ALWAYS AS (octet_length(payload::text)) STORED,
  CONSTRAINT outbox_messages_payload_check CHECK (payload_bytes <= 8388608),
  CONSTRAINT outbox_messages_available_at_check CHECK (available_at < inserted_at + interval '366 days')
-- Each row is written twice, pending and published. No index has a column that the second version changes, so it goes into the
-- room that the page has left and touches no index (heap-only; docs/adr/0011-heap-only-marks.md).
) WITH (fillfactor = 46, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);

-- A claim walks the primary key from the partition's floor. Rows that wait are elsewhere, so any number of them costs a claim
-- nothing. These indexes hold waiting rows alone: by when they fall due, by age, and by aggregate, to hold back the later rows of theirs.
CREATE INDEX outbox_messages_delayed_idx ON outbox_messages (available_at, id) WHERE delayed;
CREATE INDEX outbox_messages_delayed_id_idx ON outbox_messages (id) WHERE delayed;
CREATE INDEX outbox_messages_held_idx ON outbox_messages (tenant_id, aggregate_type, aggregate_id, id) WHERE delayed;

-- Given up after too many attempts; kept until somebody retries or discards it. The tenant index stands here and on the
-- archive, not on the outbox, where it would cost a third of the relay's speed.
CREATE TABLE outbox_messages_dlq (
  id             bigint      PRIMARY KEY,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   bigint      NOT NULL,
  event_type     text        NOT NULL,
  event_version  smallint    NOT NULL,
  payload        jsonb       NOT NULL,
  occurred_at    timestamptz NOT NULL,
  available_at   timestamptz NOT NULL,
  attempts       smallint    NOT NULL,
  last_error     text,
  trace_id       text,
  event_id       uuid        NOT NULL UNIQUE,
  inserted_at    timestamptz NOT NULL,
  slot           smallint    NOT NULL,
  dead_at        timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX outbox_messages_dlq_attempts_idx ON outbox_messages_dlq (attempts);
CREATE INDEX outbox_messages_dlq_tenant_aggregate_idx ON outbox_messages_dlq (tenant_id, aggregate_type, aggregate_id);

-- outbox_dlq_actions: who took what out of the DLQ, and why. Rows are added and never changed. A discarded message's payload is
-- kept nowhere, here neither; new_id is the outbox message that a retry made.
CREATE TABLE outbox_dlq_actions (
  id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at             timestamptz NOT NULL DEFAULT now(),
  actor          text        NOT NULL CHECK (actor <> ''),
  action         text        NOT NULL CHECK (action IN ('retry', 'discard')),
  dlq_id         bigint      NOT NULL,
  event_id       uuid        NOT NULL,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   bigint      NOT NULL,
  event_type     text        NOT NULL,
  new_id         bigint,
  reason         text        NOT NULL DEFAULT '',
  CONSTRAINT outbox_dlq_actions_new_id_check CHECK ((action = 'retry') = (new_id IS NOT NULL))
);
CREATE INDEX outbox_dlq_actions_tenant_event_idx ON outbox_dlq_actions (tenant_id, event_id);

-- Processed rows of the past. Any occurred_at is possible, hence the default partition.
CREATE TABLE outbox_messages_archive (
  id             bigint      NOT NULL,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   bigint      NOT NULL,
  event_type     text        NOT NULL,
  event_version  smallint    NOT NULL,
  payload        jsonb       NOT NULL,
  occurred_at    timestamptz NOT NULL,
  available_at   timestamptz NOT NULL,
  processed_at   timestamptz NOT NULL,
  attempts       smallint    NOT NULL,
  last_error     text,
  trace_id       text,
  event_id       uuid        NOT NULL,
  stream_seq     bigint,
  inserted_at    timestamptz NOT NULL,
  partition      integer,
  slot           smallint    NOT NULL,
  PRIMARY KEY (occurred_at, id)
) PARTITION BY RANGE (occurred_at);
CREATE TABLE outbox_messages_archive_default PARTITION OF outbox_messages_archive DEFAULT;
CREATE INDEX outbox_messages_archive_id_idx ON outbox_messages_archive (id);
CREATE INDEX outbox_messages_archive_tenant_aggregate_idx ON outbox_messages_archive (tenant_id, aggregate_type, aggregate_id);

-- outbox_partitions: the partitions, each a JetStream stream that holds a range of slots and has one writer at a time. A number
-- is never used again: a resize, or a repair of a stream that is lost, adds partitions with new numbers (docs/adr/0003-exactly-once-publish.md).
--   after       the partitions whose slots it takes over: it publishes nothing before they are closed;
--   stream, created   the stream that it is bound to, and when the broker made it; NULL before the first relay has met it;
--   tail_seq    the last sequence of the stream that the marks cover;
--   floor_id    no row of its slots with an id up to here is pending, unless it waits (delayed): a proof (docs/adr/0004-floor.md);
--   closing     its relay publishes what it has in hand, and then closes the stream;
--   final_seq   the last sequence of a closed stream.
-- Small and written all the time: no other index, and room on the page for the versions that a held snapshot keeps.
CREATE TABLE outbox_partitions (
  partition  integer     PRIMARY KEY CHECK (partition >= 0),
  first_slot smallint    NOT NULL CHECK (first_slot >= 0),
  last_slot  smallint    NOT NULL CHECK (last_slot BETWEEN first_slot AND 31),
  after      integer[]   NOT NULL DEFAULT '{}',
  stream     text,
  created    timestamptz,
  tail_seq   bigint      NOT NULL DEFAULT 0,
  floor_id   bigint      NOT NULL DEFAULT 0,
  closing    boolean     NOT NULL DEFAULT false,
  final_seq  bigint,
  CONSTRAINT outbox_partitions_bound_check CHECK ((stream IS NULL) = (created IS NULL)),
  CONSTRAINT outbox_partitions_final_check CHECK (final_seq IS NULL OR closing)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);
INSERT INTO outbox_partitions (partition, first_slot, last_slot) VALUES (0, 0, 31);

-- leases and lease_members: who works on which partition, by this database's clock (package lease). The projections have
-- tables of the same names and shape: in one database they are the same tables, told apart by kind.
CREATE TABLE IF NOT EXISTS leases (
  kind       text        NOT NULL,
  partition  integer     NOT NULL,
  owner      text        NOT NULL DEFAULT '',
  epoch      bigint      NOT NULL DEFAULT 0,
  expires_at timestamptz NOT NULL DEFAULT '-infinity',
  PRIMARY KEY (kind, partition)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE IF NOT EXISTS lease_members (
  kind       text        NOT NULL,
  owner      text        NOT NULL,
  expires_at timestamptz NOT NULL,
  PRIMARY KEY (kind, owner)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);

-- authenticate_token finds a token by its hash for a caller that has no tenant yet. It runs as the owner of the tables.
-- +goose StatementBegin
CREATE FUNCTION authenticate_token(hash bytea)
RETURNS TABLE (tenant_id bigint, name text, roles text[])
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT t.tenant_id, t.name, t.roles FROM api_tokens t
   WHERE t.token_hash = hash AND t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > now())
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION authenticate_token(bytea) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION authenticate_token(bytea) TO tidings_api, tidings_system;

-- Row-level security: the API sees the tenant of its transaction; the relay and the commands see all by policy, never by
-- BYPASSRLS (a superuser's to grant); direct SQL writers may append events and write state for any tenant.
-- +goose StatementBegin
DO $$
DECLARE t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['follows', 'comments', 'comment_keys', 'threads', 'api_tokens',
                           'outbox_messages', 'outbox_messages_dlq', 'outbox_dlq_actions', 'outbox_messages_archive'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
      USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
      WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, t);
    EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', t);
    EXECUTE format('CREATE POLICY writer ON %I TO tidings_writer USING (true) WITH CHECK (true)', t);
  END LOOP;
END $$;
-- +goose StatementEnd

GRANT SELECT, INSERT, UPDATE ON follows, comments, comment_keys, threads TO tidings_api, tidings_writer;
GRANT DELETE ON comment_keys TO tidings_api; -- the key of a create that is refused after all is given back
GRANT SELECT ON outbox_messages_archive, api_tokens TO tidings_api;
GRANT SELECT, INSERT ON outbox_messages TO tidings_api, tidings_writer;
GRANT SELECT, DELETE ON outbox_messages_dlq TO tidings_api;
GRANT UPDATE (last_error) ON outbox_messages_dlq TO tidings_api; -- SELECT FOR UPDATE wants it for some column
GRANT SELECT, INSERT ON outbox_dlq_actions TO tidings_api, tidings_system; -- an audit: nobody changes it
GRANT SELECT ON SEQUENCE outbox_messages_id_seq TO tidings_system; -- for the relay's floor
GRANT USAGE ON SEQUENCE object_version_id TO tidings_api, tidings_writer, tidings_system;
GRANT SELECT, INSERT, UPDATE, DELETE ON follows, comments, comment_keys, threads, api_tokens, outbox_messages, outbox_messages_dlq,
  outbox_messages_archive, outbox_partitions, leases, lease_members TO tidings_system;
