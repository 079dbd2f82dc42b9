-- +goose Up
-- What the loop of package consumers keeps for itself, wherever it runs: beside Tidings' projections, and beside anybody's (subscribe.Migrate). It names no
-- role; the projections give theirs rights and policies.

-- consumer_offsets: the last stream sequence that a consumer has applied, per partition (partition_key is the stream's name),
-- written in the transaction of its effect; stream_created says of which stream of that name, for a sequence means nothing on another.
-- closed: the stream has ended, and the consumer with it; its successors have rows from that same transaction on.
-- Small and written all the time, like the leases.
CREATE TABLE consumer_offsets (
  consumer_name     text        NOT NULL,
  partition_key     text        NOT NULL DEFAULT '',
  last_processed_id bigint      NOT NULL,
  last_processed_at timestamptz NOT NULL DEFAULT now(),
  as_of             timestamptz NOT NULL DEFAULT 'epoch',
  stream_created    timestamptz,
  closed            boolean     NOT NULL DEFAULT false,
  stored_id         bigint,
  stored_at         timestamptz,
  PRIMARY KEY (consumer_name, partition_key)
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0);

-- consumer_pauses: a consumer that is named here takes no events.
CREATE TABLE consumer_pauses (
  consumer_name text        PRIMARY KEY,
  paused_at     timestamptz NOT NULL DEFAULT now(),
  actor         text        NOT NULL CHECK (actor <> ''),
  reason        text        NOT NULL DEFAULT ''
);

-- consumer_dead_letters: poison events, and the later events of the same aggregate, with their payload. Within a partition the
-- ids are in the order of the stream, and of one stream after another: they are given under the lock of the partition's offset.
--   cause     error without what differs from event to event (package internal/deadletter); group_id names the letters of a consumer, type and cause
--   retries   how often a retry failed
CREATE TABLE consumer_dead_letters (
  id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  consumer_name  text        NOT NULL,
  stream_seq     bigint      NOT NULL,
  partition_key  text        NOT NULL,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   text        COLLATE "C" NOT NULL,
  event_id       uuid        NOT NULL,
  event_type     text        NOT NULL,
  event_version  smallint    NOT NULL,
  headers        jsonb       NOT NULL,
  payload        bytea       NOT NULL,
  error          text        NOT NULL,
  dead_at        timestamptz NOT NULL DEFAULT now(),
  cause          text        NOT NULL DEFAULT '',
  retries        integer     NOT NULL DEFAULT 0,
  group_id       uuid        NOT NULL GENERATED ALWAYS AS (md5(consumer_name || E'\n' || event_type || E'\n' || cause)::uuid) STORED
);

-- consumer_dead_letter_actions: who retried or discarded which dead letter, and why. A row with an error is a retry that failed
-- with it: the dead letter stayed. Rows are added and never changed.
CREATE TABLE consumer_dead_letter_actions (
  id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at             timestamptz NOT NULL DEFAULT now(),
  actor          text        NOT NULL CHECK (actor <> ''),
  action         text        NOT NULL CHECK (action IN ('retry', 'discard')),
  dead_letter_id bigint      NOT NULL,
  consumer_name  text        NOT NULL,
  stream_seq     bigint      NOT NULL,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   text        COLLATE "C" NOT NULL,
  event_id       uuid        NOT NULL,
  event_type     text        NOT NULL,
  error          text        NOT NULL DEFAULT '',
  reason         text        NOT NULL DEFAULT ''
);

-- leases and lease_members: who works on which partition. The same tables as in the truth, which may be in the same schema, and explained there.
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

CREATE INDEX consumer_dead_letters_aggregate_idx ON consumer_dead_letters (consumer_name, tenant_id, aggregate_type, aggregate_id, id);
CREATE INDEX consumer_dead_letters_group_idx ON consumer_dead_letters (group_id, dead_at, id) INCLUDE (retries);
CREATE INDEX consumer_dead_letters_tenant_group_idx ON consumer_dead_letters (tenant_id, group_id, dead_at, id) INCLUDE (retries);
CREATE INDEX consumer_dead_letter_actions_tenant_event_idx ON consumer_dead_letter_actions (tenant_id, event_id);

-- stored_at: when the stream stored the message stored_id, to the microsecond. Beside an offset (last_processed_id) of the same number it tells whether the
-- message at the offset is still the one that the consumer applied; beside any other it means nothing, for an older release moves the offset alone.
