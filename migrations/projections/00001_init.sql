-- +goose Up
-- The projections: all that the consumers write, but for what they keep for themselves (../consumers), which comes first. Every table here but the histories can be rebuilt from the stream or the truth.
-- The roles are those of the truth (../truth), and tidings_consumer, the consumers: they write read tables and offsets of all tenants.

-- ==== Tables ====

-- edge_lists: followercounts' own copy of every edge it has heard of, so that counts are exact under duplicates and replays. filter is the
-- value of the attribute that lists of the kind can be filtered by; attributes are what lists show.
CREATE TABLE edge_lists (
  tenant_id     bigint      NOT NULL,
  kind          text        COLLATE "C" NOT NULL,
  from_id       text        COLLATE "C" NOT NULL,
  to_id         text        COLLATE "C" NOT NULL,
  active        boolean     NOT NULL,
  version       bigint      NOT NULL,
  positioned_at timestamptz NOT NULL,
  shard_id      int         NOT NULL DEFAULT 0,
  filter        text        COLLATE "C",
  attributes    jsonb,
  PRIMARY KEY (tenant_id, kind, from_id, to_id)
);

-- edge_shards: the objects whose incoming edges of a kind are spread over several shards of edge_lists_reverse_idx; every other one has
-- one. It only ever rises, and edges stay in the shard that they were written to.
CREATE TABLE edge_shards (
  tenant_id bigint   NOT NULL,
  kind      text     COLLATE "C" NOT NULL,
  object_id text     COLLATE "C" NOT NULL,
  shards    smallint NOT NULL CHECK (shards IN (2, 4, 8, 16, 32, 64)),
  PRIMARY KEY (tenant_id, object_id, kind)
);

-- edge_counts: how many edges of a kind come to an object and go out from it. Where a kind's ends are of two objects, the two columns of a
-- row are about two objects with the same id.
CREATE TABLE edge_counts (
  tenant_id  bigint      NOT NULL,
  kind       text        COLLATE "C" NOT NULL,
  object_id  text        COLLATE "C" NOT NULL,
  incoming   bigint      NOT NULL DEFAULT 0 CHECK (incoming >= 0),
  outgoing   bigint      NOT NULL DEFAULT 0 CHECK (outgoing >= 0),
  updated_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, object_id, kind)
) WITH (fillfactor = 70);

-- child_lists: threadcache's row per child of any kind. visible is what its two states say together; shown says whether a
-- threaded page has the row, as itself or as a tombstone above something visible. Kinds that are not threaded have no slugs and paths, and no
-- entries in the indexes on those. Rows stay for ever, so every index begins with an object or a time: a new child then touches pages of new
-- children, however many there are (docs/adr/0006-buckets-are-counts.md). created_year is in UTC.
CREATE TABLE child_lists (
  tenant_id           bigint      NOT NULL,
  kind                text        COLLATE "C" NOT NULL,
  child_id            uuid        NOT NULL,
  object_id           text        COLLATE "C" NOT NULL,
  parent_id           uuid,
  slug                text        COLLATE "C",
  path                text        COLLATE "C",
  author_id           text        COLLATE "C" NOT NULL,
  body                text        NOT NULL,
  attributes          jsonb,
  author_state        text        NOT NULL,
  moderation_state    text        NOT NULL,
  version             bigint      NOT NULL,
  created_at          timestamptz NOT NULL,
  updated_at          timestamptz NOT NULL,
  visible             boolean     NOT NULL,
  visible_descendants int         NOT NULL DEFAULT 0 CHECK (visible_descendants >= 0),
  shown               boolean     NOT NULL,
  created_year        int         GENERATED ALWAYS AS (extract(year FROM created_at AT TIME ZONE 'UTC')::int) STORED NOT NULL,
  PRIMARY KEY (tenant_id, child_id, kind),
  CONSTRAINT child_lists_shown_check CHECK (shown = (visible OR visible_descendants > 0))
) WITH (fillfactor = 85);

-- child_buckets: how many visible children there are in each range of an object's chronological order. Level 0 are buckets of
-- 100 to 200 children, level 1 groups of 100 to 200 buckets; fewer after deletions, for ranges are split and never joined. A range
-- begins at its key and ends below the next of its level; the first of an object begins at -infinity.
CREATE TABLE child_buckets (
  tenant_id bigint      NOT NULL,
  kind      text        COLLATE "C" NOT NULL,
  object_id text        COLLATE "C" NOT NULL,
  level     smallint    NOT NULL CHECK (level IN (0, 1)),
  first_at  timestamptz NOT NULL,
  first_id  uuid        NOT NULL,
  visible   int         NOT NULL CHECK (visible >= 0),
  PRIMARY KEY (tenant_id, kind, object_id, level, first_at, first_id)
) WITH (fillfactor = 70);

-- child_totals: how many children of a kind an object has had, whatever became of them.
CREATE TABLE child_totals (
  tenant_id bigint NOT NULL,
  kind      text   COLLATE "C" NOT NULL,
  object_id text   COLLATE "C" NOT NULL,
  total     bigint NOT NULL CHECK (total > 0),
  PRIMARY KEY (tenant_id, kind, object_id)
) WITH (fillfactor = 70);

-- child_aggregates: how many of an object's visible children have an attribute that the kind aggregates, and the sum of its values.
CREATE TABLE child_aggregates (
  tenant_id bigint NOT NULL,
  kind      text   COLLATE "C" NOT NULL,
  object_id text   COLLATE "C" NOT NULL,
  attribute text   COLLATE "C" NOT NULL,
  count     bigint NOT NULL CHECK (count >= 0),
  sum       bigint NOT NULL,
  PRIMARY KEY (tenant_id, kind, object_id, attribute)
) WITH (fillfactor = 70);

-- child_settings: what is set for the children of a kind under an object, apart from the counts: their events are in another partition.
CREATE TABLE child_settings (
  tenant_id    bigint  NOT NULL,
  kind         text    COLLATE "C" NOT NULL,
  object_id    text    COLLATE "C" NOT NULL,
  locked       boolean NOT NULL,
  premoderated boolean NOT NULL,
  title        text    NOT NULL,
  version      bigint  NOT NULL,
  PRIMARY KEY (tenant_id, kind, object_id)
);

-- KIND_history and KIND_history_purged, of every kind: who did what, when (package versioned). Records, not projections: never rebuilt. make_history
-- makes them.
CREATE SEQUENCE history_version_id AS bigint START 100000000001;

-- projection_kinds: kinds of the truth, as far as `tidings kinds apply` has come: it writes them here first. The name differs because both
-- schemas may be in one database.
CREATE TABLE projection_kinds (
  tenant_id     bigint NOT NULL,
  object        jsonb  NOT NULL,
  metadata      jsonb  NOT NULL,
  name          text   COLLATE "C" GENERATED ALWAYS AS (object ->> 'name') STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                CONSTRAINT projection_kinds_version_state_check CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
  PRIMARY KEY (tenant_id, name, version_id),
  CONSTRAINT projection_kinds_created_by_check CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
  CONSTRAINT projection_kinds_last_update_time_check CHECK (metadata ->> 'last_update_time' IS NOT NULL)
);

-- The same table as in the truth, where it is explained.
CREATE TABLE IF NOT EXISTS retention_cursors (
  table_name   text        PRIMARY KEY,
  step         text        NOT NULL CHECK (step IN ('delete', 'purge')),
  after_tenant bigint      NOT NULL DEFAULT 0,
  after_key    text[]      NOT NULL DEFAULT '{}',
  moved_at     timestamptz NOT NULL DEFAULT now()
);

-- consumer_dead_letter_operations: retries and discards of many dead letters; as outbox_dlq_operations of the truth, where the columns are explained. A retry
-- counts the aggregates whose first letter it takes as seen, and their letters as done.
CREATE TABLE consumer_dead_letter_operations (
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

-- ==== Indexes ====

-- The kind comes behind the id that it goes with, wherever nobody reads all of a kind: an insertion compares keys of fixed width first, and a key's
-- columns behind a text are slow to reach. Verification reads a kind at a time, by edge_lists_pkey.
CREATE INDEX edge_lists_forward_idx ON edge_lists (tenant_id, from_id, kind, positioned_at DESC, to_id DESC) WHERE active;
CREATE INDEX edge_lists_reverse_idx ON edge_lists (tenant_id, to_id, kind, shard_id, positioned_at DESC, from_id DESC) WHERE active;
-- Kinds without a filter have no entries here.
CREATE INDEX edge_lists_filter_idx ON edge_lists (tenant_id, to_id, kind, shard_id, filter, positioned_at DESC, from_id DESC)
  WHERE active AND filter IS NOT NULL;
-- child_lists_pkey has the kind at its end: with tenant and kind at its beginning the planner, while it has no statistics, takes it for a way to what is below
-- a child, and walks the whole kind for each (TestCostsDoNotGrowWithTheThread). So verification of flat kinds has an index of its own.
CREATE INDEX child_lists_flat_idx ON child_lists (tenant_id, kind, child_id) WHERE path IS NULL;
CREATE UNIQUE INDEX child_lists_path_idx ON child_lists (tenant_id, kind, object_id, path) WHERE path IS NOT NULL;
CREATE INDEX child_lists_threaded_idx ON child_lists (tenant_id, kind, object_id, path) WHERE shown AND path IS NOT NULL;
CREATE INDEX child_lists_oldest_idx ON child_lists (tenant_id, kind, object_id, created_at, child_id) WHERE visible;
-- By the year first: authors write in no order, and those of all years would make each new child change a page of its own.
CREATE INDEX child_lists_author_idx ON child_lists (tenant_id, kind, created_year, author_id, created_at, child_id) WHERE visible;
-- The condition keeps the writer's probes by path off it, which are to find one index that begins with tenant, kind and object.
CREATE INDEX child_lists_slug_idx ON child_lists (tenant_id, kind, object_id, slug) WHERE slug IS NOT NULL;
-- What moderators look at: children that their authors left and nobody sees. A child that everybody sees has no entries here.
CREATE INDEX child_lists_moderated_idx ON child_lists (tenant_id, kind, moderation_state, created_at, child_id) WHERE author_state = 'ACTIVE' AND NOT visible;
CREATE INDEX child_lists_moderated_object_idx ON child_lists (tenant_id, kind, moderation_state, object_id, created_at, child_id) WHERE author_state = 'ACTIVE' AND NOT visible;
CREATE INDEX child_lists_moderated_author_idx ON child_lists (tenant_id, kind, moderation_state, author_id, created_at, child_id) WHERE author_state = 'ACTIVE' AND NOT visible;
CREATE INDEX consumer_dead_letter_operations_unfinished_idx ON consumer_dead_letter_operations (requested_at) WHERE finished_at IS NULL;
CREATE INDEX consumer_dead_letter_operations_requested_idx ON consumer_dead_letter_operations (requested_at);
CREATE INDEX consumer_dead_letter_operations_group_idx ON consumer_dead_letter_operations ((filter ->> 'group'), requested_at);
CREATE UNIQUE INDEX projection_kinds_head_idx ON projection_kinds (tenant_id, name) WHERE version_state IN ('LATEST', 'DELETED');

-- ==== Row-level security ====

-- +goose StatementBegin
DO $$
DECLARE t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['consumer_dead_letters', 'consumer_dead_letter_actions', 'consumer_dead_letter_operations', 'projection_kinds'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
      USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
      WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, t);
    EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', t);
    EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', t);
  END LOOP;
  FOREACH t IN ARRAY ARRAY['consumer_dead_letters', 'projection_kinds'] LOOP
    EXECUTE format('CREATE POLICY consumer ON %I TO tidings_consumer USING (true) WITH CHECK (true)', t);
  END LOOP;
END $$;
-- +goose StatementEnd

-- ==== Rights ====

GRANT SELECT ON consumer_dead_letters, consumer_offsets TO tidings_api;
GRANT USAGE ON SEQUENCE history_version_id TO tidings_consumer, tidings_system;
GRANT SELECT ON projection_kinds, consumer_pauses TO tidings_consumer;
GRANT SELECT, INSERT ON consumer_dead_letters TO tidings_consumer;
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_offsets, leases, lease_members TO tidings_consumer;
GRANT SELECT ON projection_kinds TO tidings_api;
GRANT SELECT, INSERT, UPDATE ON projection_kinds, consumer_dead_letter_operations TO tidings_system;
GRANT SELECT, INSERT ON consumer_dead_letter_actions TO tidings_system; -- an audit: nobody changes it
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_pauses TO tidings_system;
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_offsets, consumer_dead_letters, leases, lease_members, retention_cursors TO tidings_system;

GRANT SELECT ON consumer_offsets, consumer_pauses, consumer_dead_letters, consumer_dead_letter_actions, consumer_dead_letter_operations, leases, lease_members, projection_kinds,
  retention_cursors TO tidings_reader;

-- ==== Functions ====

-- The search_path of the functions from here on: see the outbox.
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- open_read_table gives a table of a projection its policies, by its column tenant_id, and its rights. The API writes only in transactions that it
-- rolls back: it reads as if a projection had applied something (docs/adr/0007-reading-ones-writes.md).
-- +goose StatementBegin
CREATE FUNCTION open_read_table(name text) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
  EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
    USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
    WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, name);
  EXECUTE format('CREATE POLICY consumer ON %I TO tidings_consumer USING (true) WITH CHECK (true)', name);
  EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', name);
  EXECUTE format('GRANT SELECT, INSERT, UPDATE ON %I TO tidings_api', name);
  EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %I TO tidings_consumer', name);
  EXECUTE format('GRANT SELECT ON %I TO tidings_reader', name);
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION open_read_table(text) FROM PUBLIC;

SELECT open_read_table(t) FROM unnest(ARRAY['edge_lists', 'edge_shards', 'edge_counts', 'child_lists', 'child_buckets', 'child_totals',
                                            'child_aggregates', 'child_settings']) t;

-- make_history makes the two tables of a kind's history: KIND_history has its versions, and KIND_history_purged up to which version a history was physically
-- deleted: no event brings those back, and nobody misses them. They come with their keys, indexes, policies and rights. It returns false when they are
-- there, and changes nothing.
--   keys    the members of the object that name an entity of the kind, of one type, text or uuid
--   author  whether there are indexes by the member author_id, of entities as they are, for `tidings history author`; and of the versions that
--           moderators may have made, for the audit of their decisions
-- +goose StatementBegin
CREATE FUNCTION make_history(kind text, keys text[], type text, author boolean) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  history  text := kind || '_history';
  purged   text := kind || '_history_purged';
  columns  text := (SELECT string_agg(format('%I', k), ', ' ORDER BY n) FROM unnest(keys) WITH ORDINALITY u(k, n));
  typed    text := CASE type WHEN 'text' THEN 'text COLLATE "C"' ELSE type END;
  made     text := (SELECT string_agg(format('%I %s GENERATED ALWAYS AS ((object ->> %L)::%2$s) STORED NOT NULL', k, typed, k), ', ' ORDER BY n)
                      FROM unnest(keys) WITH ORDINALITY u(k, n));
  plain    text := (SELECT string_agg(format('%I %s NOT NULL', k, typed), ', ' ORDER BY n) FROM unnest(keys) WITH ORDINALITY u(k, n));
  t        text;
BEGIN
  IF type NOT IN ('text', 'uuid') THEN
    RAISE invalid_parameter_value USING MESSAGE = format('keys of a history are text or uuid, not %s', type);
  END IF;
  PERFORM pg_advisory_xact_lock(x'74646869'::bigint); -- "tdhi": one at a time
  IF to_regclass(format('%I.%I', current_schema(), history)) IS NOT NULL THEN
    RETURN false;
  END IF;
  EXECUTE format($c$CREATE TABLE %1$I (
    tenant_id     bigint NOT NULL,
    object        jsonb  NOT NULL,
    metadata      jsonb  NOT NULL,
    %2$s,
    version       bigint GENERATED ALWAYS AS ((object ->> 'version')::bigint) STORED NOT NULL,
    version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
    version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                  CONSTRAINT %3$I CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
    PRIMARY KEY (tenant_id, %6$s, version_id),
    CONSTRAINT %4$I CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
    CONSTRAINT %5$I CHECK (metadata ->> 'last_update_time' IS NOT NULL)
  )$c$, history, made, history || '_version_state_check', history || '_created_by_check', history || '_last_update_time_check', columns);
  EXECUTE format('CREATE TABLE %I (tenant_id bigint NOT NULL, %s, version bigint NOT NULL, purged_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (tenant_id, %s))',
    purged, plain, columns);
  EXECUTE format($c$CREATE UNIQUE INDEX %I ON %I (tenant_id, %s) WHERE version_state IN ('LATEST', 'DELETED')$c$, history || '_head_idx', history, columns);
  EXECUTE format('CREATE UNIQUE INDEX %I ON %I (tenant_id, %s, version)', history || '_version_idx', history, columns);
  IF author THEN
    EXECUTE format($c$CREATE INDEX %I ON %I (tenant_id, (object ->> 'author_id'), %s) WHERE version_state = 'LATEST'$c$,
      history || '_author_idx', history, columns);
    EXECUTE format($c$CREATE INDEX %I ON %I (tenant_id, version_id) WHERE object ->> 'moderation_state' <> 'NONE'$c$, history || '_moderated_idx', history);
  END IF;
  FOREACH t IN ARRAY ARRAY[history, purged] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
      USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
      WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, t);
    EXECUTE format('CREATE POLICY consumer ON %I TO tidings_consumer USING (true) WITH CHECK (true)', t);
    EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', t);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %I TO tidings_consumer', t);
    EXECUTE format('GRANT SELECT ON %I TO tidings_reader', t);
  END LOOP;
  EXECUTE format('GRANT SELECT ON %I TO tidings_api', history);
  RETURN true;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION make_history(text, text[], text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION make_history(text, text[], text, boolean) TO tidings_system;

-- drop_history drops the tables of a history that nothing was ever written to, and says whether there were any.
-- +goose StatementBegin
CREATE FUNCTION drop_history(kind text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  t     text;
  found boolean;
  gone  boolean := false;
BEGIN
  FOREACH t IN ARRAY ARRAY[kind || '_history', kind || '_history_purged'] LOOP
    IF to_regclass(format('%I.%I', current_schema(), t)) IS NOT NULL THEN
      EXECUTE format('LOCK TABLE %I.%I IN ACCESS EXCLUSIVE MODE', current_schema(), t);
      EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I)', current_schema(), t) INTO found;
      IF found THEN
        RAISE object_in_use USING MESSAGE = format('the history %I has rows', t);
      END IF;
      EXECUTE format('DROP TABLE %I.%I', current_schema(), t);
      gone := true;
    END IF;
  END LOOP;
  RETURN gone;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION drop_history(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION drop_history(text) TO tidings_system;

-- tenant_cells: in which truth a tenant is, where several truths (cells) write to these projections: cell is the name of its streams (NATS_STREAM). The row of
-- tenant 0 is for all tenants without one. It is empty where there is one truth. docs/adr/0018-cells.md
CREATE TABLE tenant_cells (
  tenant_id bigint PRIMARY KEY CHECK (tenant_id >= 0),
  cell      text   NOT NULL CHECK (cell <> '')
);

-- +goose StatementBegin
DO $$
DECLARE r text;
BEGIN
  ALTER TABLE tenant_cells ENABLE ROW LEVEL SECURITY;
  CREATE POLICY tenant ON tenant_cells TO tidings_api USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint);
  FOREACH r IN ARRAY ARRAY['system', 'consumer', 'reader'] LOOP
    EXECUTE format('CREATE POLICY %I ON tenant_cells TO %I USING (true) WITH CHECK (true)', r, 'tidings_' || r);
  END LOOP;
END $$;
-- +goose StatementEnd

GRANT SELECT ON tenant_cells TO tidings_consumer, tidings_reader;
GRANT SELECT, INSERT, UPDATE, DELETE ON tenant_cells TO tidings_system;

-- comparisons: how far the continuous comparison of each projection with the truth of each cell (NATS_STREAM) is. A round goes through all entities once.
--   checked, different   of the round that runs; last_checked, last_different: of the last one that ended, at ended_at
-- Of several instances that compare, the one that wrote last shows.
CREATE TABLE comparisons (
  consumer_name  text        NOT NULL,
  cell           text        NOT NULL,
  began_at       timestamptz NOT NULL,
  looked_at      timestamptz NOT NULL DEFAULT now(),
  checked        bigint      NOT NULL,
  different      bigint      NOT NULL,
  ended_at       timestamptz,
  last_checked   bigint,
  last_different bigint,
  PRIMARY KEY (consumer_name, cell)
);
GRANT SELECT, INSERT, UPDATE ON comparisons TO tidings_consumer;
GRANT SELECT ON comparisons TO tidings_reader;
GRANT SELECT, INSERT, UPDATE, DELETE ON comparisons TO tidings_system;

-- The leases and members by kind, for the roles of the projections, and for those of the truth if it shares the database and comes later: explained in the truth,
-- which has the same block.
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

-- An erasure blanks the errors of failed retries, which may quote what was erased. Everything else of the audit stays as it was written.
GRANT UPDATE (error) ON consumer_dead_letter_actions TO tidings_system;
