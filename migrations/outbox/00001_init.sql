-- +goose Up
-- The outbox: events, each written in the transaction of its state change, and all that a relay and the archive need. It is part of the truth, and may also be
-- alone in anybody's database. Conventions:
--   * row-level security is on, and only policies let a role in;
--   * a transaction writes the state row first (its lock, and the transaction id), then the outbox row (its id), so that
--     the ids of one entity are in commit order;
--   * ids are given out one at a time (sequences stay at CACHE 1) for the same reason.
--
-- The roles, which tidings migrate makes before:
--   tidings_relay   the relay: claims messages of all tenants, and changes of a message only what became of it
--   tidings_system  the archiver and the commands: all tenants; it may all that the relay, the consumers and the reader may
--   tidings_writer  direct SQL writers (docs/upstream.md)
--   tidings_reader  consumers that compare with the truth, and a person who looks at rows (docs/runbook/looking-at-rows.md): reads every table of every tenant and writes none. A table that is
--                   made later grants it SELECT, and has a policy for it where it has row-level security.

-- ==== Tables ====

-- outbox_messages: the events, each written in the transaction of its state change and published by the relay. It is partitioned into ranges of
-- ids (outbox_ranges), which leave it for the archive as they are.
--   id          is taken after the transaction's id, also by a transaction that writes nothing before: the floors rest on that. PostgreSQL
--               evaluates a CASE in its order. Nobody but the owner and the system gives one, and the sequence keeps CACHE 1;
--   event_id    names the event; an id alone does not (after a crash, a restore or a failover the same id is given out again). It begins with
--               the id that the event was given first, and the rest is random (UUID version 8): so an event is found without an index of its own;
--   slot        hash bucket of the aggregate, 32 of them, the same in every version and language, computed here only; a partition
--               (a JetStream stream) holds a range of slots;
--   delayed     waits for available_at: asked for by the writer, put off after a failure, or parked behind such a row;
--   behind      the row of the same aggregate that a parked row waits for;
--   partition   the partition that the event was published to, and stream_seq where it stands in that stream;
--   payload_bytes  of the payload's text, which the relay publishes. A claim reads no payload that it has no room for.
CREATE SEQUENCE outbox_messages_id_seq AS bigint;
CREATE TABLE outbox_messages (
  id             bigint      PRIMARY KEY DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('outbox_messages_id_seq') END,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   text        COLLATE "C" NOT NULL,
  event_type     text        NOT NULL,
  event_version  smallint    NOT NULL DEFAULT 1,
  payload        jsonb       NOT NULL,
  occurred_at    timestamptz NOT NULL DEFAULT now(),
  available_at   timestamptz NOT NULL DEFAULT now(),
  processed_at   timestamptz,
  attempts       smallint    NOT NULL DEFAULT 0,
  last_error     text,
  trace_id       text,
  event_id       uuid        NOT NULL DEFAULT
    (lpad(to_hex(currval('outbox_messages_id_seq')), 12, '0') || '8' || right(translate(gen_random_uuid()::text, '-', ''), 19))::uuid,
  stream_seq     bigint,
  inserted_at    timestamptz NOT NULL DEFAULT now(),
  behind         bigint,
  partition      integer,
  slot           smallint    NOT NULL GENERATED ALWAYS AS
    ((get_byte(decode(md5(tenant_id::text || '/' || aggregate_type || '/' || aggregate_id), 'hex'), 0) & 31)::smallint) STORED,
  delayed        boolean     NOT NULL GENERATED ALWAYS AS ((available_at > inserted_at OR attempts > 0 OR behind IS NOT NULL) AND processed_at IS NULL) STORED,
  payload_bytes  integer     NOT NULL GENERATED ALWAYS AS (octet_length(payload::text)) STORED,
  -- A time that no header can carry is refused where it is written: infinity is none to the relay, whose claims would fail.
  CONSTRAINT outbox_messages_occurred_at_check CHECK (occurred_at >= '0001-01-01 00:00:00Z' AND occurred_at < '10000-01-01 00:00:00Z'),
  CONSTRAINT outbox_messages_aggregate_id_check CHECK (octet_length(aggregate_id) <= 128 AND aggregate_id ~ '^[A-Za-z0-9_.~:@|+=-]+$' AND aggregate_id NOT IN ('.', '..')),
  CONSTRAINT outbox_messages_payload_check CHECK (payload_bytes <= 8388608)
) PARTITION BY RANGE (id);
ALTER SEQUENCE outbox_messages_id_seq OWNED BY outbox_messages.id;

-- outbox_ranges: the ranges of ids, each a table that is a partition of the outbox and later of the archive: archiving detaches it here and
-- attaches it there (docs/adr/0010-outbox-archive.md). Together they cover the ids from 1 on without a gap.
--   OPEN        a partition of outbox_messages; those above the last id are ahead of need
--   ARCHIVED    a partition of outbox_messages_archive
--   GONE        there is no table: it was dropped, or its ids were given out while no range stood ahead, and the default range has their rows
--   settled_at  by then everything in it was published or in the DLQ, and nothing can be added. Rows that come late raise it
--   indexed     it has the indexes of the archive, which are built after it was attached
--   first_at    when the message with its lowest id was inserted; first_occurred and last_occurred of all of them, once somebody asked
CREATE TABLE outbox_ranges (
  from_id        bigint      PRIMARY KEY CHECK (from_id > 0),
  to_id          bigint      NOT NULL CHECK (to_id > from_id), -- exclusive
  state          text        NOT NULL DEFAULT 'OPEN' CHECK (state IN ('OPEN', 'ARCHIVED', 'GONE')),
  made_at        timestamptz NOT NULL DEFAULT now(),
  settled_at     timestamptz,
  archived_at    timestamptz,
  gone_at        timestamptz,
  indexed        boolean     NOT NULL DEFAULT false,
  first_at       timestamptz,
  first_occurred timestamptz,
  last_occurred  timestamptz
);

-- outbox_messages_dlq: given up after too many attempts; kept until somebody retries or discards it. The tenant index stands here and on the
-- archive, not on the outbox, where it would cost a third of the relay's speed.
--   cause     last_error without what differs from event to event (package internal/deadletter); group_id names the messages of a type and cause
--   retries   how often the event was retried from the DLQ before
CREATE TABLE outbox_messages_dlq (
  id             bigint      PRIMARY KEY,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   text        COLLATE "C" NOT NULL,
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
  dead_at        timestamptz NOT NULL DEFAULT now(),
  cause          text        NOT NULL DEFAULT '',
  retries        integer     NOT NULL DEFAULT 0,
  group_id       uuid        NOT NULL GENERATED ALWAYS AS (md5(event_type || E'\n' || cause)::uuid) STORED
);

-- outbox_dlq_actions: who took what out of the DLQ, and why. Rows are added and never changed. A discarded message's payload is
-- kept nowhere, here neither; new_id is the outbox message that a retry made. Two actions are on a message that waits in the outbox, with the
-- same id there: retry_waiting made it due, kill moved it to the DLQ. token is the name and the fingerprint of the API token with which somebody acted,
-- empty for commands and the console; the actor is the caller's own word.
CREATE TABLE outbox_dlq_actions (
  id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at             timestamptz NOT NULL DEFAULT now(),
  actor          text        NOT NULL CHECK (actor <> ''),
  action         text        NOT NULL CHECK (action IN ('retry', 'discard', 'retry_waiting', 'kill')),
  dlq_id         bigint      NOT NULL,
  event_id       uuid        NOT NULL,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   text        COLLATE "C" NOT NULL,
  event_type     text        NOT NULL,
  new_id         bigint,
  reason         text        NOT NULL DEFAULT '',
  token          text        NOT NULL DEFAULT '',
  CONSTRAINT outbox_dlq_actions_new_id_check CHECK ((action = 'retry') = (new_id IS NOT NULL))
);

-- outbox_dlq_operations: retries and discards of many messages of the DLQ, as far as they have come (package deadletters). A slice acts and moves the row in one transaction.
-- The projections have such a table for the dead letters of consumers. Rows are kept: they say what was done to a group before.
--   tenant_id    whose messages it takes; 0: of all tenants
--   filter       which ones; what died since requested_at is never among them
--   total        how many there were; seen of them were acted on, done were taken away, and failed could not be
--   after_id     the last one that was seen
--   worker       who works on it, until lease_until; then anybody else does
CREATE TABLE outbox_dlq_operations (
  operation_id uuid        PRIMARY KEY,
  tenant_id    bigint      NOT NULL CHECK (tenant_id >= 0),
  action       text        NOT NULL CHECK (action IN ('retry', 'discard')),
  filter       jsonb       NOT NULL,
  actor        text        NOT NULL CHECK (actor <> ''),
  reason       text        NOT NULL DEFAULT '',
  requested_at timestamptz NOT NULL DEFAULT now(),
  total        bigint      NOT NULL,
  seen         bigint      NOT NULL DEFAULT 0,
  done         bigint      NOT NULL DEFAULT 0,
  failed       bigint      NOT NULL DEFAULT 0,
  after_id     bigint      NOT NULL DEFAULT 0,
  worker       text        NOT NULL DEFAULT '',
  lease_until  timestamptz NOT NULL DEFAULT '-infinity',
  worked_at    timestamptz,
  finished_at  timestamptz,
  stopped_by   text        NOT NULL DEFAULT '',
  last_error   text        NOT NULL DEFAULT ''
);

-- dead_letter_notes: what somebody wrote about a group of dead letters (group_id of outbox_messages_dlq or of consumer_dead_letters), for a tenant, or for
-- operators (tenant 0).
CREATE TABLE dead_letter_notes (
  tenant_id  bigint      NOT NULL CHECK (tenant_id >= 0),
  group_id   uuid        NOT NULL,
  note       text        NOT NULL CHECK (note <> ''),
  actor      text        NOT NULL CHECK (actor <> ''),
  written_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, group_id)
);

-- outbox_messages_archive: the ranges of the past. It has the outbox's columns, because its partitions are the outbox's of before.
CREATE TABLE outbox_messages_archive (LIKE outbox_messages INCLUDING GENERATED, PRIMARY KEY (id)) PARTITION BY RANGE (id);

-- outbox_messages_kept: archived messages whose range was dropped and that a hold keeps, and those that were restored from an export. They may be
-- of another database, whose ids are others'.
CREATE TABLE outbox_messages_kept (LIKE outbox_messages INCLUDING GENERATED, PRIMARY KEY (id, event_id));

-- outbox_requeued: events that a repair gave another id: their own does not tell it any more.
CREATE TABLE outbox_requeued (
  event_id uuid   PRIMARY KEY,
  id       bigint NOT NULL
);

-- outbox_archive_holds: what of the archive is not dropped whatever its age, because somebody says so. Rows stay after the release.
CREATE TABLE outbox_archive_holds (
  hold_id     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id   bigint      CHECK (tenant_id > 0), -- NULL: of every tenant
  from_month  date        CHECK (from_month = date_trunc('month', from_month)), -- NULL: from the beginning
  to_month    date        CHECK (to_month = date_trunc('month', to_month)),     -- and with this one; NULL: without end
  reason      text        NOT NULL CHECK (reason <> ''),
  created_by  text        NOT NULL CHECK (created_by <> ''),
  created_at  timestamptz NOT NULL DEFAULT now(),
  released_by text,
  released_at timestamptz,
  release_reason text   NOT NULL DEFAULT '',
  CONSTRAINT outbox_archive_holds_range_check CHECK (from_month <= to_month),
  CONSTRAINT outbox_archive_holds_released_check CHECK ((released_by IS NULL) = (released_at IS NULL))
);

-- outbox_archive_exports: which ranges of the archive stand outside the database, and where (package coldstore). Each attempt has a row
-- before it has a file, so that the files of one that died are known and removed. A range may have several that are COMPLETE:
-- what came late, after the range was dropped, is exported beside what was exported before. month is that of the range's first message, and
-- names the directory; first_occurred and last_occurred are the span of the events.
--   WRITING  begun; it counts for nothing
--   COMPLETE every file was written and read back
--   OVER     superseded, or given up: its files are being removed, and the row goes with them
CREATE TABLE outbox_archive_exports (
  export_id       text        COLLATE "C" PRIMARY KEY CHECK (export_id ~ '^[0-9]{8}t[0-9]{6}[.][0-9]{6}z-[a-z0-9]+$'),
  from_id         bigint      NOT NULL,
  month           date        NOT NULL CHECK (extract(day FROM month) = 1),
  url             text        NOT NULL CHECK (url <> ''),
  state           text        NOT NULL DEFAULT 'WRITING' CHECK (state IN ('WRITING', 'COMPLETE', 'OVER')),
  started_at      timestamptz NOT NULL DEFAULT now(),
  exported_at     timestamptz,
  verified_at     timestamptz, -- when its files were last read and found right
  stale_at        timestamptz, -- when it was found that the table holds something else, or that a file is damaged
  released_at     timestamptz, -- when the range was given free to be dropped: what it holds may be nowhere else since
  over_at         timestamptz,
  swept_at        timestamptz, -- when its files were last removed
  manifest_sha256 bytea,
  content_sha256  bytea,
  rows            bigint,
  bytes           bigint,
  first_occurred  timestamptz,
  last_occurred   timestamptz,
  CONSTRAINT outbox_archive_exports_complete_check CHECK (state <> 'COMPLETE' OR
    num_nulls(exported_at, verified_at, manifest_sha256, content_sha256, rows, bytes, first_occurred, last_occurred) = 0),
  CONSTRAINT outbox_archive_exports_over_check CHECK ((state = 'OVER') = (over_at IS NOT NULL))
);

-- outbox_partitions: the partitions, each a JetStream stream that holds a range of slots and has one writer at a time. A number
-- is never used again: a resize, or a repair of a stream that is lost, adds partitions with new numbers (docs/adr/0003-exactly-once-publish.md).
--   after       the partitions whose slots it takes over: it publishes nothing before they are closed;
--   stream, created   the stream that it is bound to, and when the broker made it; NULL before the first relay has met it;
--   tail_seq    the last sequence of the stream that the marks cover;
--   floor_id    no row of its slots with an id up to here is pending, unless it waits (delayed): a proof (docs/adr/0004-floor.md);
--   closing     its relay publishes what it has in hand, and then closes the stream;
--   final_seq   the last sequence of a closed stream;
--   heartbeat_at  when its last heartbeat was written, whichever relay did it; NULL before the first.
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
  heartbeat_at timestamptz,
  trouble    text,
  refused    boolean,
  trouble_at timestamptz,
  CONSTRAINT outbox_partitions_bound_check CHECK ((stream IS NULL) = (created IS NULL)),
  CONSTRAINT outbox_partitions_final_check CHECK (final_seq IS NULL OR closing)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);
INSERT INTO outbox_partitions (partition, first_slot, last_slot) VALUES (0, 0, 31);

-- leases and lease_members: who works on which partition, by this database's clock (package lease). The projections have
-- tables of the same names and shape: in one database they are the same tables, told apart by kind.
CREATE TABLE IF NOT EXISTS leases (
  kind          text        NOT NULL,
  partition     integer     NOT NULL,
  owner         text        NOT NULL DEFAULT '',
  epoch         bigint      NOT NULL DEFAULT 0,
  expires_at    timestamptz NOT NULL DEFAULT '-infinity',
  refused_by    text        NOT NULL DEFAULT '',          -- who could not serve it,
  refused_until timestamptz NOT NULL DEFAULT '-infinity', -- and does not take it back before
  PRIMARY KEY (kind, partition)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE IF NOT EXISTS lease_members (
  kind       text        NOT NULL,
  owner      text        NOT NULL,
  expires_at timestamptz NOT NULL,
  PRIMARY KEY (kind, owner)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);

-- job_runs: when each scheduled job last started and ended, and what came of it, for the whole fleet (package internal/jobs). Written
-- twice per run. A row whose started_at is the latest of its times is of a run that goes on, or that ended without a word.
CREATE TABLE job_runs (
  job          text        PRIMARY KEY,
  owner        text        NOT NULL,
  started_at   timestamptz NOT NULL,
  succeeded_at timestamptz,
  failed_at    timestamptz,
  last_error   text        NOT NULL DEFAULT '',
  reason       text        NOT NULL DEFAULT '', -- why somebody ran it by command
  counts       jsonb       NOT NULL DEFAULT '{}',
  parts        text[]      NOT NULL DEFAULT '{}' -- what runs that were cut short have done of it since the last one that ended
);

-- object_version_id: the versions of versioned objects (package versioned).
CREATE SEQUENCE object_version_id AS bigint START 100000000001;

-- archive_settings: what is archived and what is dropped, and when, as one versioned object of tenant 0 (tidings archive settings). Whoever does it goes by that.
CREATE TABLE archive_settings (
  tenant_id     bigint NOT NULL,
  object        jsonb  NOT NULL,
  metadata      jsonb  NOT NULL,
  name          text   COLLATE "C" GENERATED ALWAYS AS (object ->> 'name') STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                CONSTRAINT archive_settings_version_state_check CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
  PRIMARY KEY (tenant_id, name, version_id),
  CONSTRAINT archive_settings_created_by_check CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
  CONSTRAINT archive_settings_last_update_time_check CHECK (metadata ->> 'last_update_time' IS NOT NULL)
);

-- ==== Indexes ====

CREATE UNIQUE INDEX archive_settings_head_idx ON archive_settings (tenant_id, name) WHERE version_state IN ('LATEST', 'DELETED');
-- A claim walks the primary key from the partition's floor. Rows that wait are elsewhere, so any number of them costs a claim
-- nothing. These indexes hold waiting rows alone: by when they fall due, by age, and by aggregate, to hold back the later rows of theirs.
CREATE INDEX outbox_messages_delayed_idx ON outbox_messages (available_at, id) WHERE delayed;
CREATE INDEX outbox_messages_delayed_id_idx ON outbox_messages (id) WHERE delayed;
CREATE INDEX outbox_messages_held_idx ON outbox_messages (tenant_id, aggregate_type, aggregate_id, id) WHERE delayed;
CREATE INDEX outbox_messages_dlq_attempts_idx ON outbox_messages_dlq (attempts);
CREATE INDEX outbox_messages_dlq_tenant_aggregate_idx ON outbox_messages_dlq (tenant_id, aggregate_type, aggregate_id);
CREATE INDEX outbox_messages_dlq_occurred_idx ON outbox_messages_dlq (occurred_at, id);
CREATE INDEX outbox_messages_dlq_group_idx ON outbox_messages_dlq (group_id, dead_at, id) INCLUDE (retries);
CREATE INDEX outbox_messages_dlq_tenant_group_idx ON outbox_messages_dlq (tenant_id, group_id, dead_at, id) INCLUDE (retries);
CREATE INDEX outbox_dlq_operations_unfinished_idx ON outbox_dlq_operations (requested_at) WHERE finished_at IS NULL;
CREATE INDEX outbox_dlq_operations_requested_idx ON outbox_dlq_operations (requested_at);
CREATE INDEX outbox_dlq_operations_group_idx ON outbox_dlq_operations ((filter ->> 'group'), requested_at);
CREATE INDEX outbox_dlq_actions_event_idx ON outbox_dlq_actions (event_id);
-- The archive has no index but its key: attaching a range would build it, with the outbox locked. outbox_range_index adds what a range is
-- found by, once it is there.
CREATE INDEX outbox_messages_kept_tenant_aggregate_idx ON outbox_messages_kept (tenant_id, aggregate_type, aggregate_id, id);
CREATE INDEX outbox_messages_kept_actor_idx ON outbox_messages_kept (tenant_id, (payload ->> 'actor'), id) WHERE payload ->> 'actor' LIKE 'user:%';
CREATE INDEX outbox_messages_kept_occurred_idx ON outbox_messages_kept (occurred_at, id);
CREATE INDEX outbox_archive_exports_range_idx ON outbox_archive_exports (from_id);

-- ==== Row-level security ====

-- The relay and the commands see all by policy, never by BYPASSRLS (a superuser's to grant); direct SQL writers may append events for any tenant.
-- +goose StatementBegin
DO $$
DECLARE t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['archive_settings', 'outbox_messages', 'outbox_messages_dlq', 'outbox_dlq_actions', 'outbox_messages_archive', 'outbox_messages_kept',
                           'outbox_archive_holds', 'outbox_dlq_operations', 'dead_letter_notes'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', t);
    EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', t);
  END LOOP;
  FOREACH t IN ARRAY ARRAY['outbox_messages', 'outbox_messages_dlq', 'outbox_dlq_actions', 'outbox_messages_archive'] LOOP
    EXECUTE format('CREATE POLICY writer ON %I TO tidings_writer USING (true) WITH CHECK (true)', t);
  END LOOP;
  FOREACH t IN ARRAY ARRAY['outbox_messages_dlq', 'outbox_messages_archive'] LOOP
    EXECUTE format('CREATE POLICY relay ON %I TO tidings_relay USING (true) WITH CHECK (true)', t);
  END LOOP;
END $$;
-- +goose StatementEnd
CREATE POLICY relay ON outbox_messages FOR SELECT TO tidings_relay USING (true);
CREATE POLICY relay ON outbox_dlq_actions FOR SELECT TO tidings_relay USING (true);
CREATE POLICY relay_marks ON outbox_messages FOR UPDATE TO tidings_relay USING (true) WITH CHECK (true);
CREATE POLICY relay_buries ON outbox_messages FOR DELETE TO tidings_relay USING (true);
CREATE POLICY relay_beats ON outbox_messages FOR INSERT TO tidings_relay WITH CHECK (tenant_id = 0 AND aggregate_type = 'heartbeat'); -- no other event is a relay's to write

-- No row that a writer appends may keep its relay from updating it. The relay moves a row's available_at: for a retry, or to that of a row ahead, which
-- may have begun later. So the bound of 366 days is the writer's, and no longer the row's, and a type is short enough for the indexes of rows that wait.
CREATE POLICY available_at_within_366_days ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer
  WITH CHECK (available_at < inserted_at + interval '366 days');
CREATE POLICY types_within_1000_bytes ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer
  WITH CHECK (octet_length(aggregate_type) <= 1000 AND octet_length(event_type) <= 1000);
CREATE POLICY trace_id_within_64_kib ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer
  WITH CHECK (trace_id IS NULL OR octet_length(trace_id) <= 65536);
-- The system's own events measure the path of all others, so only a relay writes them.
CREATE POLICY heartbeats_are_the_relays ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer
  WITH CHECK (tenant_id <> 0 AND aggregate_type <> 'heartbeat');

-- ==== Rights ====

-- The relay changes what became of a message, and never the message. One that fails for good it moves to the DLQ.
GRANT SELECT, DELETE, UPDATE (processed_at, stream_seq, partition, attempts, last_error, available_at, behind) ON outbox_messages TO tidings_relay;
GRANT SELECT, INSERT ON outbox_messages_dlq TO tidings_relay;
GRANT SELECT (event_id, action) ON outbox_dlq_actions TO tidings_relay; -- how often a message that fails again was retried
GRANT SELECT ON outbox_messages_archive, outbox_ranges, outbox_messages_id_seq TO tidings_relay;
GRANT INSERT (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at) ON outbox_messages TO tidings_relay; -- heartbeats
GRANT USAGE ON SEQUENCE outbox_messages_id_seq TO tidings_relay;
GRANT SELECT, UPDATE (stream, created, tail_seq, floor_id, final_seq, heartbeat_at) ON outbox_partitions TO tidings_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON leases, lease_members TO tidings_relay;
-- trouble: why the partition's relay publishes nothing, at trouble_at; NULL after a mark. refused: not before an operator has repaired something.
GRANT UPDATE (trouble, refused, trouble_at) ON outbox_partitions TO tidings_relay;

GRANT SELECT, INSERT, UPDATE ON archive_settings TO tidings_system; -- every version stays
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_messages, outbox_messages_dlq, outbox_messages_archive, outbox_messages_kept, outbox_archive_exports,
  outbox_partitions, leases, lease_members, dead_letter_notes TO tidings_system;
GRANT SELECT, INSERT ON outbox_dlq_actions TO tidings_system; -- an audit: nobody changes it
GRANT SELECT, UPDATE ON outbox_ranges TO tidings_system;
GRANT SELECT, INSERT, UPDATE ON outbox_requeued, outbox_archive_holds, job_runs, outbox_dlq_operations TO tidings_system;
GRANT USAGE ON SEQUENCE object_version_id TO tidings_system;
GRANT USAGE ON SEQUENCE outbox_messages_id_seq TO tidings_writer, tidings_system;
GRANT SELECT ON SEQUENCE outbox_messages_id_seq TO tidings_system; -- for the floors

-- Direct SQL writers append events; nothing else. What the relay writes on an outbox row (processed_at, attempts, stream_seq...) and what names a row
-- (id, event_id) is not theirs, and neither is a row's key once it stands.
GRANT INSERT (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, trace_id)
  ON outbox_messages TO tidings_writer;
GRANT SELECT (id, event_id, slot, delayed) ON outbox_messages TO tidings_writer; -- for RETURNING

GRANT SELECT ON archive_settings, outbox_messages, outbox_messages_dlq, outbox_dlq_actions, outbox_ranges, outbox_messages_archive, outbox_messages_kept,
  outbox_requeued, outbox_archive_holds, outbox_archive_exports, outbox_partitions, leases, lease_members, job_runs, outbox_dlq_operations, dead_letter_notes TO tidings_reader;

-- Each role changes only the leases and members of its kinds, because the truth and the projections may share a database and then share these tables: the relay its
-- own, the consumers all but those of the relay and of the jobs. Nobody deletes a lease, changes its key or locks the table; an expired member is deleted by the
-- others of its kind. The projections have the same block: they may be in another database, and come before the truth or after it.
-- +goose StatementBegin
DO $$
DECLARE
  r record;
  t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['leases', 'lease_members'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    FOR r IN SELECT name, rows, 'tidings_' || name AS role
               FROM (VALUES ('relay', $q$kind = 'relay'$q$), ('consumer', $q$NOT (kind IN ('relay', 'jobs') OR starts_with(kind, 'jobs-'))$q$),
                            ('system', 'true'), ('reader', 'true')) AS of(name, rows)
               JOIN pg_roles ON rolname = 'tidings_' || name
    LOOP
      IF NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = t::regclass AND polname = r.name) THEN
        EXECUTE format('CREATE POLICY %I ON %I TO %I USING (%s) WITH CHECK (%s)', r.name, t, r.role, r.rows, r.rows);
      END IF;
      IF t = 'leases' AND r.name <> 'reader' THEN
        EXECUTE format('REVOKE UPDATE, DELETE ON leases FROM %I', r.role);
        EXECUTE format('GRANT UPDATE (owner, epoch, expires_at, refused_by, refused_until) ON leases TO %I', r.role);
      END IF;
    END LOOP;
  END LOOP;
END $$;
-- +goose StatementEnd

-- ==== Functions ====

-- Each function takes its search_path from here: this schema, whichever the operator chose, and the temporary schema last. PostgreSQL searches a
-- temporary schema that the path does not name before all others. The caller of a function that runs as its owner could then have the owner run
-- the caller's code, with a temporary view or type of a name that the function uses.
-- A name that a function makes from its arguments may be free in the schema, and the temporary schema's is found then. So it is qualified with
-- current_schema().
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- delivered tells up to when everything that was committed is on the streams, and where these end, as one snapshot has it. It runs as the owner of
-- the tables: whoever asks knows one tenant, and the streams are everybody's.
--   complete  every message whose write had committed by then is marked as published, but for what missing names. A pending message with a higher id
--             committed later than the one with the lowest id began. So the first ones are enough;
--   tails     by stream, its last sequence that a mark covers, and whether it is closed;
--   missing   by tenant and aggregate type, since when messages wait for a retry or behind one, or are in the DLQ. A message whose writer asked for a
--             later time is not missing before then. Where more wait than are counted, complete ends before the first of them.
-- +goose StatementBegin
CREATE FUNCTION outbox_delivered(most integer)
RETURNS TABLE (complete timestamptz, tails jsonb, missing jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off AS $$
  WITH fresh AS MATERIALIZED (
    SELECT inserted_at FROM outbox_messages
     WHERE id > (SELECT coalesce(min(floor_id), 0) FROM outbox_partitions WHERE final_seq IS NULL) AND processed_at IS NULL AND NOT delayed
     ORDER BY id LIMIT 100),
  waiting AS MATERIALIZED (
    SELECT tenant_id, aggregate_type, inserted_at, attempts > 0 OR behind IS NOT NULL OR available_at <= now() AS counts
      FROM outbox_messages WHERE delayed ORDER BY available_at, id LIMIT most),
  dead AS MATERIALIZED (SELECT tenant_id, aggregate_type, inserted_at FROM outbox_messages_dlq ORDER BY id LIMIT most)
  SELECT least(now(), (SELECT min(inserted_at) FROM fresh),
           CASE WHEN (SELECT count(*) FILTER (WHERE counts) FROM waiting) = most THEN (SELECT inserted_at FROM outbox_messages WHERE delayed ORDER BY id LIMIT 1) END,
           CASE WHEN (SELECT count(*) FROM dead) = most THEN (SELECT inserted_at FROM outbox_messages_dlq ORDER BY id LIMIT 1) END) - interval '1 microsecond',
         (SELECT coalesce(jsonb_agg(jsonb_build_object('stream', stream, 'seq', tail_seq, 'closed', final_seq IS NOT NULL) ORDER BY partition), '[]')
            FROM outbox_partitions WHERE stream IS NOT NULL AND tail_seq > 0),
         (SELECT coalesce(jsonb_agg(jsonb_build_object('tenant', tenant_id, 'type', aggregate_type, 'since', since)), '[]')
            FROM (SELECT tenant_id, aggregate_type, min(inserted_at) AS since
                    FROM (SELECT tenant_id, aggregate_type, inserted_at FROM waiting WHERE counts UNION ALL SELECT * FROM dead) m GROUP BY 1, 2) m)
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_delivered(integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox_delivered(integer) TO tidings_system;

-- Ranges are made, moved and dropped by functions of the owner's, so that the archiver needs no right to the tables themselves.
-- All but outbox_range_index are called with a lock_timeout: who waits for a lock on the outbox has every later writer wait behind it.

-- outbox_messages_columns: the columns of a message that are not generated.
-- +goose StatementBegin
CREATE FUNCTION outbox_messages_columns() RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
   WHERE attrelid = 'outbox_messages'::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
$$;
-- +goose StatementEnd

-- outbox_range_table: a table for a range that is no partition yet, and its name. The check lets it become one without a scan. Nobody has a right
-- to it, and no policy lets anybody in: it is read and written through its parent.
-- +goose StatementBegin
CREATE FUNCTION outbox_range_table(first bigint, past bigint) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  name text := 'outbox_messages_' || first;
BEGIN
  -- Each row is written twice, pending and published. No index has a column that the second version changes, so it goes into the
  -- room that the page has left and touches no index (heap-only; docs/adr/0011-heap-only-marks.md).
  EXECUTE format('CREATE TABLE %I (LIKE outbox_messages INCLUDING GENERATED INCLUDING CONSTRAINTS INCLUDING INDEXES,
                                   CONSTRAINT outbox_range_check CHECK (id >= %s AND id < %s))
                  WITH (fillfactor = 46, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05)',
    name, first, past);
  EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
  RETURN name;
END $$;
-- +goose StatementEnd

-- outbox_range_make adds a range ahead of need. Ids between the last range and this one have their rows in the default range: theirs is a range
-- that is GONE.
-- +goose StatementBegin
CREATE FUNCTION outbox_range_make(first bigint, past bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  gap bigint := (SELECT coalesce(max(to_id), first) FROM outbox_ranges);
BEGIN
  IF gap < first THEN
    INSERT INTO outbox_ranges (from_id, to_id, state, gone_at) VALUES (gap, first, 'GONE', now());
  END IF;
  INSERT INTO outbox_ranges (from_id, to_id) VALUES (first, past);
  EXECUTE format('ALTER TABLE outbox_messages ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', outbox_range_table(first, past), first, past);
END $$;
-- +goose StatementEnd

-- outbox_range_cut ends the range that is written: the next id is past. While it holds the lock, nobody inserts and so nobody takes an id for it.
-- +goose StatementBegin
CREATE FUNCTION outbox_range_cut(past bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
  LOCK TABLE ONLY outbox_messages IN SHARE ROW EXCLUSIVE MODE;
  IF (SELECT last_value FROM outbox_messages_id_seq) >= past - 1 THEN
    RETURN false;
  END IF;
  PERFORM setval('outbox_messages_id_seq', past - 1);
  RETURN true;
END $$;
-- +goose StatementEnd

-- outbox_range_archive moves a range to the archive: "archived". It is "pending" while a floor has not passed it, or does no longer; "waiting" while
-- more messages than most wait for their time; "gone" if it is not the outbox's. Those that wait go to the default range, under their ids.
-- The locks: the outbox, ACCESS EXCLUSIVE, for as long as the catalog is written. Both changes are one transaction, so every row is in one place.
-- +goose StatementBegin
CREATE FUNCTION outbox_range_archive(first bigint, most int) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  name    text := format('%I.%I', current_schema(), 'outbox_messages_' || first);
  columns text := outbox_messages_columns();
  r       outbox_ranges;
  waiting int;
  began   timestamptz;
BEGIN
  SELECT * INTO r FROM outbox_ranges WHERE from_id = first AND state = 'OPEN' FOR UPDATE;
  IF NOT FOUND THEN
    RETURN 'gone';
  END IF;
  LOCK TABLE ONLY outbox_messages IN ACCESS EXCLUSIVE MODE;
  IF EXISTS (SELECT FROM outbox_partitions WHERE final_seq IS NULL AND floor_id < r.to_id - 1) THEN
    UPDATE outbox_ranges SET settled_at = NULL WHERE from_id = first; -- a repair has taken the floor down
    RETURN 'pending';
  END IF;
  EXECUTE format('SELECT count(*) FROM (SELECT FROM %s WHERE delayed LIMIT %s) w', name, most + 1) INTO waiting;
  IF waiting > most THEN
    RETURN 'waiting';
  END IF;
  EXECUTE format('SELECT inserted_at FROM %s ORDER BY id LIMIT 1', name) INTO began;
  EXECUTE format('ALTER TABLE outbox_messages DETACH PARTITION %s', name);
  IF waiting > 0 THEN
    EXECUTE format('WITH out AS (DELETE FROM %s WHERE delayed RETURNING *) INSERT INTO outbox_messages (%s) SELECT %2$s FROM out', name, columns);
  END IF;
  EXECUTE format('ALTER TABLE outbox_messages_archive ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)', name, r.from_id, r.to_id);
  UPDATE outbox_ranges SET state = 'ARCHIVED', archived_at = clock_timestamp(), first_at = coalesce(began, made_at) WHERE from_id = first;
  RETURN 'archived';
END $$;
-- +goose StatementEnd

-- outbox_range_return gives a range of the archive back to the outbox, for a repair that publishes some of it again. Its rows that wait come from
-- the default range. It reports whether the range was the archive's.
-- +goose StatementBegin
CREATE FUNCTION outbox_range_return(first bigint) RETURNS boolean
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
  EXECUTE format('WITH back AS (DELETE FROM outbox_messages_default WHERE id >= %s AND id < %s RETURNING *) INSERT INTO %I (%s) SELECT %4$s FROM back',
    r.from_id, r.to_id, name, columns);
  EXECUTE format('ALTER TABLE outbox_messages ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', name, r.from_id, r.to_id);
  UPDATE outbox_ranges SET state = 'OPEN', settled_at = NULL, archived_at = NULL WHERE from_id = first;
  RETURN true;
END $$;
-- +goose StatementEnd

-- outbox_archive_late moves rows of the default range that were published before a time to the archive, at most as many as said, and returns how
-- many. Where their range has no table, it gets one again.
-- +goose StatementBegin
CREATE FUNCTION outbox_archive_late(before timestamptz, most int) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  columns text := outbox_messages_columns();
  r       outbox_ranges;
  moved   bigint;
BEGIN
  FOR r IN SELECT * FROM outbox_ranges o WHERE state = 'GONE'
              AND EXISTS (SELECT FROM outbox_messages_default d WHERE d.id >= o.from_id AND d.id < o.to_id AND d.processed_at < before) FOR UPDATE LOOP
    EXECUTE format('ALTER TABLE outbox_messages_archive ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', outbox_range_table(r.from_id, r.to_id), r.from_id, r.to_id);
    UPDATE outbox_ranges SET state = 'ARCHIVED', indexed = false, gone_at = NULL, settled_at = coalesce(settled_at, before), archived_at = now(),
           first_at = coalesce(first_at, (SELECT d.inserted_at FROM outbox_messages_default d WHERE d.id >= r.from_id ORDER BY d.id LIMIT 1)) WHERE from_id = r.from_id;
  END LOOP;
  EXECUTE format('WITH old AS (SELECT id FROM outbox_messages_default d WHERE processed_at < $1
                                  AND EXISTS (SELECT FROM outbox_ranges o WHERE o.state = ''ARCHIVED'' AND d.id >= o.from_id AND d.id < o.to_id) ORDER BY id LIMIT $2),
                       gone AS (DELETE FROM outbox_messages_default d USING old WHERE d.id = old.id RETURNING d.*),
                       here AS (INSERT INTO outbox_messages_archive (%s) SELECT %1$s FROM gone RETURNING id),
                       late AS (UPDATE outbox_ranges o SET archived_at = now(), first_occurred = NULL, last_occurred = NULL
                                 WHERE state = ''ARCHIVED'' AND EXISTS (SELECT FROM here WHERE here.id >= o.from_id AND here.id < o.to_id))
                  SELECT count(*) FROM here', columns) INTO moved USING before, most;
  RETURN moved;
END $$;
-- +goose StatementEnd

-- outbox_range_index builds what an archived range is found by. Readers go on; a repair or an erasure waits.
-- +goose StatementBegin
CREATE FUNCTION outbox_range_index(first bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  name text := 'outbox_messages_' || first;
BEGIN
  IF NOT EXISTS (SELECT FROM outbox_ranges WHERE from_id = first AND state = 'ARCHIVED' AND NOT indexed FOR UPDATE) THEN
    RETURN false;
  END IF;
  EXECUTE format('CREATE INDEX IF NOT EXISTS %I ON %I (tenant_id, aggregate_type, aggregate_id, id) WITH (fillfactor = 100)', name || '_aggregate_idx', name);
  -- What a user did is found by an erasure of theirs.
  EXECUTE format('CREATE INDEX IF NOT EXISTS %I ON %I (tenant_id, (payload ->> ''actor''), id) WITH (fillfactor = 100) WHERE payload ->> ''actor'' LIKE ''user:%%''', name || '_actor_idx', name);
  UPDATE outbox_ranges SET indexed = true WHERE from_id = first;
  RETURN true;
END $$;
-- +goose StatementEnd

-- outbox_range_span notes when the first and the last event of an archived range occurred, of an empty one when it was made. It reads all of the range, once.
-- +goose StatementBegin
CREATE FUNCTION outbox_range_span(first bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  earliest timestamptz;
  latest   timestamptz;
BEGIN
  IF EXISTS (SELECT FROM outbox_ranges WHERE from_id = first AND state = 'ARCHIVED' AND first_occurred IS NULL FOR UPDATE) THEN
    EXECUTE format('SELECT min(occurred_at), max(occurred_at) FROM %I.%I', current_schema(), 'outbox_messages_' || first) INTO earliest, latest;
    UPDATE outbox_ranges SET first_occurred = coalesce(earliest, first_at), last_occurred = coalesce(latest, first_at) WHERE from_id = first;
  END IF;
END $$;
-- +goose StatementEnd

-- outbox_holds_on: whether a hold of every tenant covers an event of a time, and the tenants that have one of their own.
-- +goose StatementBegin
CREATE FUNCTION outbox_holds_on(earliest timestamptz, latest timestamptz, OUT whole boolean, OUT tenants bigint[])
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT coalesce(bool_or(tenant_id IS NULL), false), coalesce(array_agg(DISTINCT tenant_id) FILTER (WHERE tenant_id IS NOT NULL), '{}')
    FROM outbox_archive_holds
   WHERE released_at IS NULL AND coalesce(latest >= from_month::timestamp AT TIME ZONE 'UTC', true)
     AND coalesce(earliest < (to_month + interval '1 month') AT TIME ZONE 'UTC', true)
$$;
-- +goose StatementEnd

-- outbox_range_drop drops a range of the archive: "dropped". A hold of every tenant on any of its events keeps it: "held". What tenants hold
-- themselves is copied to outbox_messages_kept first. "gone" if it is not the archive's, "unknown" while its span is not noted.
-- +goose StatementBegin
CREATE FUNCTION outbox_range_drop(first bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  name    text := format('%I.%I', current_schema(), 'outbox_messages_' || first);
  columns text := outbox_messages_columns();
  r       outbox_ranges;
  held    record;
BEGIN
  SELECT * INTO r FROM outbox_ranges WHERE from_id = first AND state = 'ARCHIVED' FOR UPDATE;
  IF NOT FOUND THEN
    RETURN 'gone';
  END IF;
  LOCK TABLE outbox_archive_holds IN SHARE MODE; -- a hold that is added meanwhile waits, and finds the range gone
  IF EXISTS (SELECT FROM outbox_archive_holds WHERE released_at IS NULL) THEN
    IF r.first_occurred IS NULL THEN
      RETURN 'unknown';
    END IF;
    SELECT * INTO held FROM outbox_holds_on(r.first_occurred, r.last_occurred);
    IF held.whole THEN
      RETURN 'held';
    END IF;
    IF held.tenants <> '{}' THEN
      EXECUTE format('INSERT INTO outbox_messages_kept (%s) SELECT %1$s FROM %s m
                       WHERE tenant_id = ANY($1) AND EXISTS (SELECT FROM outbox_archive_holds h WHERE h.released_at IS NULL AND h.tenant_id = m.tenant_id
                               AND coalesce(m.occurred_at >= h.from_month::timestamp AT TIME ZONE ''UTC'', true)
                               AND coalesce(m.occurred_at < (h.to_month + interval ''1 month'') AT TIME ZONE ''UTC'', true))
                      ON CONFLICT DO NOTHING', columns, name) USING held.tenants;
    END IF;
  END IF;
  EXECUTE format('DROP TABLE %s', name);
  UPDATE outbox_ranges SET state = 'GONE', gone_at = now() WHERE from_id = first;
  RETURN 'dropped';
END $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION outbox_messages_columns(), outbox_range_table(bigint, bigint), outbox_range_make(bigint, bigint), outbox_range_cut(bigint), outbox_range_archive(bigint, int),
  outbox_range_return(bigint), outbox_archive_late(timestamptz, int), outbox_range_index(bigint), outbox_range_span(bigint), outbox_holds_on(timestamptz, timestamptz),
  outbox_range_drop(bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox_range_make(bigint, bigint), outbox_range_cut(bigint), outbox_range_archive(bigint, int), outbox_range_return(bigint),
  outbox_archive_late(timestamptz, int), outbox_range_index(bigint), outbox_range_span(bigint), outbox_holds_on(timestamptz, timestamptz), outbox_range_drop(bigint) TO tidings_system;

-- The first ranges, and the default one: it has what waits for longer than its range is the outbox's, and what is written while there is no range.
CREATE TABLE outbox_messages_default PARTITION OF outbox_messages DEFAULT
  WITH (fillfactor = 46, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
ALTER TABLE outbox_messages_default ENABLE ROW LEVEL SECURITY;
SELECT outbox_range_make(1, 50000001), outbox_range_make(50000001, 100000001), outbox_range_make(100000001, 150000001);

-- outbox_partitions_apart refuses two partitions that share a slot unless one of them is closing. Two relays would publish the slot's events to two
-- streams, in no order. It looks when the transaction ends, because a resize first adds the new partitions and then lets the old ones close. The
-- lock is for transactions that do not see each other's rows. Marks change none of the columns that call it.
-- +goose StatementBegin
CREATE FUNCTION outbox_partitions_apart() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
  other int;
BEGIN
  PERFORM pg_advisory_xact_lock(x'74647074'::bigint); -- "tdpt"
  SELECT o.partition INTO other FROM outbox_partitions p JOIN outbox_partitions o
      ON o.partition <> p.partition AND NOT o.closing AND o.first_slot <= p.last_slot AND p.first_slot <= o.last_slot
   WHERE p.partition = NEW.partition AND NOT p.closing LIMIT 1;
  IF FOUND THEN
    RAISE exclusion_violation USING CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME,
      MESSAGE = format('partitions %s and %s share slots, and neither is closing', least(NEW.partition, other), greatest(NEW.partition, other));
  END IF;
  RETURN NULL;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_partitions_apart() FROM PUBLIC;
CREATE CONSTRAINT TRIGGER apart AFTER INSERT OR UPDATE OF first_slot, last_slot, closing ON outbox_partitions
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NOT NEW.closing) EXECUTE FUNCTION outbox_partitions_apart();

-- require_mark ends the round of a relay whose mark does not match the database. Between the statements of a batch, only the server can end it.
-- +goose StatementBegin
CREATE FUNCTION require_mark(matches boolean) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  IF NOT matches THEN
    RAISE EXCEPTION 'the mark does not match the database' USING ERRCODE = 'TD001';
  END IF;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION require_mark(boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION require_mark(boolean) TO tidings_relay;
