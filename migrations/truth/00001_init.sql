-- +goose Up
-- The truth: what upstream services wrote. The outbox (../outbox), which comes first, tells of it, and its conventions are those of these tables:
--   * tenant_id leads every key of every tenant table, and row-level security compares it with the setting tidings.tenant;
--   * a transaction writes the state row first, then the outbox row.
-- The roles are those of the outbox, and tidings_api, the API: the tenant of its transaction.

-- ==== Tables ====

-- edges: one row per kind and pair of objects, kept until a person at one of its ends is erased; REMOVED is a state. positioned_at moves only on REMOVED -> ACTIVE and orders pages.
-- Each kind has a partition, edges_KIND, with its key, and a view in the kind's own names (follows): make_edge_kind makes them. Statements name the partition.
CREATE TABLE edges (
  tenant_id     bigint      NOT NULL,
  kind          text        COLLATE "C" NOT NULL,
  from_id       text        COLLATE "C" NOT NULL CHECK (octet_length(from_id) <= 128 AND from_id ~ '^[A-Za-z0-9_.~:@|+=-]+$' AND from_id NOT IN ('.', '..')),
  to_id         text        COLLATE "C" NOT NULL CHECK (octet_length(to_id) <= 128 AND to_id ~ '^[A-Za-z0-9_.~:@|+=-]+$' AND to_id NOT IN ('.', '..')),
  status        text        NOT NULL DEFAULT 'ACTIVE' CHECK (status IN ('ACTIVE', 'REMOVED')),
  version       bigint      NOT NULL DEFAULT 1 CHECK (version > 0),
  created_at    timestamptz NOT NULL DEFAULT now(),
  positioned_at timestamptz NOT NULL DEFAULT now(),
  updated_at    timestamptz NOT NULL DEFAULT now(),
  attributes    jsonb       CHECK (jsonb_typeof(attributes) = 'object' AND octet_length(attributes::text) <= 4096)
) PARTITION BY LIST (kind);

-- children: entities with an author and a body under a parent object (object_id), of every kind; kind is the aggregate type of their events. Each kind
-- has a partition, children_KIND, with the keys and indexes that the kind needs, and a view in the kind's own names: make_child_kind makes them.
-- Statements name the partition. The author's axis (author_state) and the moderator's (moderation_state) are apart, so that neither undoes the other.
-- Of threaded kinds alone: parent_id, the child that it replies to; slug, of its permalink; and path, one segment per level joined by '/', each 14
-- hexadecimal digits of microseconds and the slug, which sorts as the thread reads.
CREATE TABLE children (
  tenant_id        bigint      NOT NULL,
  kind             text        COLLATE "C" NOT NULL,
  child_id         uuid        NOT NULL,
  object_id        text        COLLATE "C" NOT NULL CHECK (octet_length(object_id) <= 128 AND object_id ~ '^[A-Za-z0-9_.~:@|+=-]+$' AND object_id NOT IN ('.', '..')),
  parent_id        uuid,
  slug             text        COLLATE "C",
  path             text        COLLATE "C",
  author_id        text        COLLATE "C" NOT NULL CHECK (octet_length(author_id) <= 128 AND author_id ~ '^[A-Za-z0-9_.~:@|+=-]+$' AND author_id NOT IN ('.', '..')),
  body             text        NOT NULL,
  author_state     text        NOT NULL DEFAULT 'ACTIVE' CHECK (author_state IN ('ACTIVE', 'DELETED', 'ERASED')),
  moderation_state text        NOT NULL DEFAULT 'NONE' CHECK (moderation_state IN ('NONE', 'PENDING', 'APPROVED', 'HIDDEN', 'REMOVED')),
  version          bigint      NOT NULL DEFAULT 1 CHECK (version > 0),
  created_at       timestamptz NOT NULL DEFAULT now(),
  updated_at       timestamptz NOT NULL DEFAULT now(),
  attributes       jsonb       CHECK (jsonb_typeof(attributes) = 'object' AND octet_length(attributes::text) <= 4096)
) PARTITION BY LIST (kind);

-- child_kinds: the kinds that have a partition, with the names that their children and parent objects have in payloads.
CREATE TABLE child_kinds (
  kind        text COLLATE "C" PRIMARY KEY CHECK (kind ~ '^[a-z][a-z0-9_]{0,30}$'),
  id_name     text NOT NULL,
  parent_name text NOT NULL
);

-- child_keys: which create an Idempotency-Key already made. It outlives the archiving of its child. moderation_state is the child's
-- first one: with it and the repeated request the first answer can be given again.
CREATE TABLE child_keys (
  tenant_id        bigint NOT NULL,
  kind             text   COLLATE "C" NOT NULL,
  author_id        text        COLLATE "C" NOT NULL,
  idempotency_key  text   COLLATE "C" NOT NULL CHECK (length(idempotency_key) BETWEEN 1 AND 255),
  request_hash     bytea  NOT NULL,
  child_id         uuid   NOT NULL,
  moderation_state text   NOT NULL DEFAULT 'NONE',
  PRIMARY KEY (tenant_id, kind, author_id, idempotency_key)
);

-- The archive of children (ADR 0008): threads, which are all children of a kind under one object, that nobody has written in for long stand here,
-- out of the way of the table that is written. A child is in exactly one of the two tables at any time. What reads the truth reads both (all_PLURAL).

-- children_archive: rows of children, column for column, as they were. They are written once and read seldom: full pages, and the
-- two indexes that reads and the way back need. Redacting rows of both tables goes from here to children: API instances bring threads back at
-- any time, and a row that does so in between is met in children.
CREATE TABLE children_archive (
  tenant_id        bigint      NOT NULL,
  kind             text        COLLATE "C" NOT NULL,
  child_id         uuid        NOT NULL,
  object_id        text        COLLATE "C" NOT NULL,
  parent_id        uuid,
  slug             text        COLLATE "C",
  path             text        COLLATE "C",
  author_id        text        COLLATE "C" NOT NULL,
  body             text        NOT NULL,
  author_state     text        NOT NULL,
  moderation_state text        NOT NULL,
  version          bigint      NOT NULL,
  created_at       timestamptz NOT NULL,
  updated_at       timestamptz NOT NULL,
  attributes       jsonb
) PARTITION BY LIST (kind);

-- archived_threads: each move of a thread. All but the RETURNED ones are stubs: they tell writers to bring the thread back first.
--   ARCHIVING   nobody writes in the thread any more; its children are on their way to the archive
--   ARCHIVED    all of them are there
--   RETURNING   somebody wrote, or an operator took the archive back: they are on their way back
--   RETURNED    all of them are back: a record
CREATE TABLE archived_threads (
  tenant_id   bigint      NOT NULL,
  kind        text        COLLATE "C" NOT NULL,
  object_id   text        COLLATE "C" NOT NULL,
  archive_id  bigint      NOT NULL, -- of one run of the job, over all tenants: what an operator can take back
  state       text        NOT NULL DEFAULT 'ARCHIVING' CHECK (state IN ('ARCHIVING', 'ARCHIVED', 'RETURNING', 'RETURNED')),
  children    bigint      NOT NULL DEFAULT 0, -- moved to the archive
  started_at  timestamptz NOT NULL DEFAULT now(),
  returned_at timestamptz,
  returned_by text        CHECK (returned_by IN ('write', 'undo', 'job')),
  PRIMARY KEY (tenant_id, kind, object_id, archive_id),
  CONSTRAINT archived_threads_returned_check CHECK (state NOT IN ('RETURNING', 'RETURNED') OR returned_at IS NOT NULL AND returned_by IS NOT NULL)
);
CREATE SEQUENCE child_archive_id AS bigint;

-- child_archive_walk: the thread up to which the search for quiet ones has come, of each kind.
CREATE TABLE child_archive_walk (
  kind         text   COLLATE "C" PRIMARY KEY,
  after_tenant bigint NOT NULL,
  after_object text   COLLATE "C" NOT NULL
);

-- threads: the settings of a thread as a versioned object (package versioned). A comment's kind is not in its object: it has been there longer.
CREATE TABLE threads (
  tenant_id     bigint NOT NULL,
  object        jsonb  NOT NULL,
  metadata      jsonb  NOT NULL,
  post_id       text   COLLATE "C" GENERATED ALWAYS AS (object ->> 'post_id') STORED NOT NULL, -- the object that has the thread, whatever it is
  kind          text   COLLATE "C" GENERATED ALWAYS AS (coalesce(object ->> 'kind', 'comment')) STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                CONSTRAINT threads_version_state_check CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
  PRIMARY KEY (tenant_id, post_id, kind, version_id),
  CONSTRAINT threads_created_by_check CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
  CONSTRAINT threads_last_update_time_check CHECK (metadata ->> 'last_update_time' IS NOT NULL)
);

-- threads_purged: the version that purged settings of a thread were at. They were the defaults, so nothing else of them is in force,
-- and the next settings go on from that version: consumers know it.
CREATE TABLE threads_purged (
  tenant_id bigint      NOT NULL,
  post_id   text        COLLATE "C" NOT NULL,
  kind      text        COLLATE "C" NOT NULL,
  version   bigint      NOT NULL,
  purged_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, post_id, kind)
);

-- kinds: the kinds that `tidings kinds apply` added to the built-in ones, as one versioned object of tenant 0, which stands for the installation.
CREATE TABLE kinds (
  tenant_id     bigint NOT NULL,
  object        jsonb  NOT NULL,
  metadata      jsonb  NOT NULL,
  name          text   COLLATE "C" GENERATED ALWAYS AS (object ->> 'name') STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                CONSTRAINT kinds_version_state_check CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
  PRIMARY KEY (tenant_id, name, version_id),
  CONSTRAINT kinds_created_by_check CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
  CONSTRAINT kinds_last_update_time_check CHECK (metadata ->> 'last_update_time' IS NOT NULL)
);

-- api_tokens: bearer tokens by their SHA-256; looked up through find_token(), before the tenant is known.
-- A name has one current token and any number of former ones: revoked, or replaced and working until their end, so that a service can be given
-- another token without an outage, and a name that is free again can be used again.
--   tenant_id             0 of a system token, which an operator signs in to the console with and which no route of the API takes;
--   replaced_at           when another token of the name took its place; it goes on working until expires_at;
--   rate_read, rate_write the token's own limits instead of the configured ones: "N/WINDOW" with the window in seconds, or "off";
--   change                counts the changes of all tokens; of one that was never changed it is null. Whoever has seen a number has seen the
--                         changes before it: transactions take their numbers one after the other (number_token_change).
CREATE TABLE api_tokens (
  token_hash  bytea       PRIMARY KEY CHECK (length(token_hash) = 32),
  tenant_id   bigint      NOT NULL CHECK (tenant_id >= 0),
  name        text        NOT NULL CHECK (name <> ''),
  roles       text[]      NOT NULL CHECK (roles <@ ARRAY['read', 'write', 'moderate', 'admin', 'export']),
  created_at  timestamptz NOT NULL DEFAULT now(),
  expires_at  timestamptz,
  revoked_at  timestamptz,
  replaced_at timestamptz,
  rate_read   text        CONSTRAINT api_tokens_rate_read_check CHECK (rate_read ~ '^(off|[1-9][0-9]{0,6}/[1-9][0-9]{0,4}s)$'),
  rate_write  text        CONSTRAINT api_tokens_rate_write_check CHECK (rate_write ~ '^(off|[1-9][0-9]{0,6}/[1-9][0-9]{0,4}s)$'),
  change      bigint,
  made_by     bytea,
  limits_of   text
);
CREATE SEQUENCE api_token_change;

-- operator_acts: what operators and moderators did in the console, each recorded before it is done. One row per act, whatever became of its answer.
--   act_id      made with the form: the same form sent twice is one act;
--   tenant_id   whom the act concerns; 0: the whole installation;
--   finished_at null while it is under way, or since the process that did it ended;
--   outcome     a sentence; failed: it is that of an error.
CREATE TABLE operator_acts (
  id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  act_id      uuid        NOT NULL CONSTRAINT operator_acts_act_key UNIQUE,
  started_at  timestamptz NOT NULL DEFAULT now(),
  finished_at timestamptz,
  tenant_id   bigint      NOT NULL CHECK (tenant_id >= 0),
  token_tenant bigint     NOT NULL CHECK (token_tenant >= 0),
  token_name  text        NOT NULL CHECK (token_name <> ''),
  fingerprint text        NOT NULL CHECK (fingerprint ~ '^[0-9a-f]{12}$'),
  act         text        NOT NULL CHECK (act <> ''),
  target      text        NOT NULL,
  reason      text        NOT NULL CHECK (reason <> ''),
  outcome     text,
  failed      boolean     NOT NULL DEFAULT false,
  CHECK ((finished_at IS NULL) = (outcome IS NULL))
);

-- retention_cursors: in which step retention of a table is, and how far among its heads; no row while it rests. The projections have a
-- table of the same name and shape.
CREATE TABLE IF NOT EXISTS retention_cursors (
  table_name   text        PRIMARY KEY,
  step         text        NOT NULL CHECK (step IN ('delete', 'purge')),
  after_tenant bigint      NOT NULL DEFAULT 0,
  after_key    text[]      NOT NULL DEFAULT '{}',
  moved_at     timestamptz NOT NULL DEFAULT now()
);

-- edge_removals: who asked for the edges of an object to be removed, and how far that has come (store.Remover). Kinds and direction are as they were
-- asked for; a slice locks the row, removes some edges and moves the cursor, in one transaction. Rows are kept: they say who did it.
--   again       it was asked for once more while it ran: the walk begins anew when it has ended
--   step        which end of which kind the walk is at, and after_from and after_to behind which edge
--   removed     how many edges, by kind
CREATE TABLE edge_removals (
  tenant_id    bigint      NOT NULL,
  removal_id   uuid        NOT NULL DEFAULT gen_random_uuid(),
  object       text        COLLATE "C" NOT NULL,
  object_id    text        COLLATE "C" NOT NULL CHECK (octet_length(object_id) <= 128 AND object_id ~ '^[A-Za-z0-9_.~:@|+=-]+$' AND object_id NOT IN ('.', '..')),
  kinds        text[]      COLLATE "C" NOT NULL CHECK (kinds <> '{}'),
  direction    text        NOT NULL CHECK (direction IN ('from', 'to', 'both')),
  actor        text        NOT NULL CHECK (actor <> ''),
  reason       text        NOT NULL DEFAULT '',
  trace_parent text        NOT NULL DEFAULT '',
  requested_at timestamptz NOT NULL DEFAULT now(),
  worked_at    timestamptz, -- when a slice was last committed
  finished_at  timestamptz,
  again        boolean     NOT NULL DEFAULT false,
  step         int         NOT NULL DEFAULT 0,
  after_from   text        COLLATE "C" NOT NULL DEFAULT '',
  after_to     text        COLLATE "C" NOT NULL DEFAULT '',
  removed      jsonb       NOT NULL DEFAULT '{}',
  PRIMARY KEY (tenant_id, removal_id)
);

-- erasures: whose comments and edges were erased, when, on whose word, and what was redacted where (package erasure). Written first, before
-- anything is redacted, so that an erasure that was interrupted is known and goes on when it is asked for again. counts is by store,
-- over all its runs. Rows are kept for good: they answer an auditor, and hold nothing of what was erased.
CREATE TABLE erasures (
  tenant_id    bigint      NOT NULL,
  author_id    text        COLLATE "C" NOT NULL CHECK (octet_length(author_id) <= 128 AND author_id ~ '^[A-Za-z0-9_.~:@|+=-]+$' AND author_id NOT IN ('.', '..')),
  requested_at timestamptz NOT NULL DEFAULT now(),
  requested_by text        NOT NULL CHECK (requested_by <> ''),
  reason       text        NOT NULL DEFAULT '',
  runs         int         NOT NULL DEFAULT 1,
  finished_at  timestamptz,
  counts       jsonb       NOT NULL DEFAULT '{}',
  PRIMARY KEY (tenant_id, author_id, requested_at)
);

-- ==== Indexes ====

CREATE UNIQUE INDEX archived_threads_stub_idx ON archived_threads (tenant_id, kind, object_id) WHERE state <> 'RETURNED';
CREATE INDEX archived_threads_archive_idx ON archived_threads (archive_id, tenant_id, kind, object_id);
CREATE INDEX archived_threads_unfinished_idx ON archived_threads (kind, tenant_id, object_id) WHERE state IN ('ARCHIVING', 'RETURNING');
CREATE UNIQUE INDEX threads_head_idx ON threads (tenant_id, post_id, kind) WHERE version_state IN ('LATEST', 'DELETED');
CREATE UNIQUE INDEX kinds_head_idx ON kinds (tenant_id, name) WHERE version_state IN ('LATEST', 'DELETED');
CREATE UNIQUE INDEX api_tokens_current_key ON api_tokens (tenant_id, name) WHERE revoked_at IS NULL AND replaced_at IS NULL;
CREATE INDEX api_tokens_name_idx ON api_tokens (tenant_id, name);
CREATE INDEX api_tokens_expires_idx ON api_tokens (expires_at) WHERE revoked_at IS NULL AND replaced_at IS NULL;
CREATE INDEX operator_acts_tenant_idx ON operator_acts (tenant_id, id);
CREATE INDEX operator_acts_target_idx ON operator_acts (act, target, id);
CREATE INDEX api_tokens_change_idx ON api_tokens (change) WHERE change IS NOT NULL;
CREATE UNIQUE INDEX edge_removals_unfinished_idx ON edge_removals (tenant_id, object, object_id, kinds, direction) WHERE finished_at IS NULL;
CREATE UNIQUE INDEX erasures_unfinished_idx ON erasures (tenant_id, author_id) WHERE finished_at IS NULL;

-- ==== Row-level security ====

-- The API, as tidings_api, sees the tenant of its transaction, in the outbox too; the commands see all by policy, never by BYPASSRLS (a superuser's to grant);
-- direct SQL writers may write state for any tenant.
-- +goose StatementBegin
DO $$
DECLARE
  t      text;
  theirs text[] := ARRAY['archive_settings', 'outbox_messages', 'outbox_messages_dlq', 'outbox_dlq_actions', 'outbox_messages_archive', 'outbox_messages_kept',
                         'outbox_archive_holds', 'outbox_dlq_operations', 'dead_letter_notes']; -- they have the other policies
  ours   text[] := ARRAY['edges', 'children', 'child_keys', 'children_archive', 'archived_threads', 'threads', 'threads_purged', 'kinds', 'api_tokens',
                         'edge_removals', 'erasures', 'operator_acts'];
BEGIN
  FOREACH t IN ARRAY theirs || ours LOOP
    EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
      USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
      WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, t);
  END LOOP;
  FOREACH t IN ARRAY ours LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', t);
    EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', t);
  END LOOP;
  FOREACH t IN ARRAY ARRAY['edges', 'children', 'child_keys', 'children_archive', 'archived_threads', 'threads', 'api_tokens'] LOOP
    EXECUTE format('CREATE POLICY writer ON %I TO tidings_writer USING (true) WITH CHECK (true)', t);
  END LOOP;
END $$;
-- +goose StatementEnd
-- The API appends events as writers do.
ALTER POLICY available_at_within_366_days ON outbox_messages TO tidings_writer, tidings_api;
ALTER POLICY types_within_1000_bytes ON outbox_messages TO tidings_writer, tidings_api;
ALTER POLICY trace_id_within_64_kib ON outbox_messages TO tidings_writer, tidings_api;
ALTER POLICY heartbeats_are_the_relays ON outbox_messages TO tidings_writer, tidings_api;

-- ==== Rights ====

GRANT SELECT, INSERT, UPDATE ON edges, child_keys, threads TO tidings_api;
GRANT DELETE ON child_keys TO tidings_api; -- the key of a create that is refused after all is given back
GRANT SELECT ON outbox_messages_archive, threads_purged, kinds TO tidings_api; -- not api_tokens: find_token and changed_tokens say what it may know
GRANT SELECT, INSERT, UPDATE ON kinds TO tidings_system; -- every version stays
GRANT SELECT ON outbox_messages TO tidings_api;
GRANT INSERT (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, trace_id, event_id)
  ON outbox_messages TO tidings_api;
GRANT SELECT, DELETE ON outbox_messages_dlq TO tidings_api;
GRANT UPDATE (last_error) ON outbox_messages_dlq TO tidings_api; -- SELECT FOR UPDATE wants it for some column
GRANT SELECT, INSERT ON outbox_dlq_actions TO tidings_api; -- an audit: nobody changes it
GRANT USAGE ON SEQUENCE object_version_id, outbox_messages_id_seq TO tidings_api;
-- The API takes requests, and has none worked off.
GRANT SELECT ON edge_removals TO tidings_api;
GRANT INSERT (tenant_id, object, object_id, kinds, direction, actor, trace_parent, reason), UPDATE (again) ON edge_removals TO tidings_api;
-- The API brings threads back and archives none.
GRANT SELECT ON archived_threads TO tidings_api, tidings_writer;
GRANT UPDATE (state, returned_at, returned_by) ON archived_threads TO tidings_api;

GRANT SELECT, INSERT, UPDATE, DELETE ON edges, child_keys, archived_threads, child_archive_walk, threads, threads_purged,
  api_tokens, retention_cursors TO tidings_system;
GRANT SELECT, INSERT, UPDATE ON edge_removals, erasures TO tidings_system;
GRANT SELECT, INSERT, UPDATE (finished_at, outcome, failed) ON operator_acts TO tidings_system; -- an audit: nobody changes what was done by whom, and why
-- An export begins where the streams stand, and is over when an erasure has begun: the API sees that much and no more.
GRANT SELECT (tenant_id, runs, finished_at) ON erasures TO tidings_api;
GRANT SELECT (partition, stream, created, tail_seq, final_seq) ON outbox_partitions TO tidings_api;
GRANT SELECT ON children, children_archive TO tidings_system; -- of all kinds at once; their partitions have the other rights
GRANT USAGE ON SEQUENCE api_token_change, child_archive_id TO tidings_system;

-- Direct SQL writers write edges (make_edge_kind) and children (make_child_kind). A row's key is not theirs once it stands.
GRANT SELECT, INSERT ON edges TO tidings_writer;
GRANT UPDATE (status, version, positioned_at, updated_at, attributes) ON edges TO tidings_writer;

GRANT SELECT ON edges, children, child_kinds, child_keys, children_archive, archived_threads, child_archive_walk, threads, threads_purged, kinds,
  retention_cursors, edge_removals, erasures, operator_acts TO tidings_reader;
-- Not the hashes: nobody who looks at rows needs them, and whoever has one can tell whether a token that was found somewhere is it.
GRANT SELECT (tenant_id, name, roles, created_at, expires_at, revoked_at, replaced_at, rate_read, rate_write, change) ON api_tokens TO tidings_reader;

-- ==== Functions ====

-- The search_path of the functions from here on: see the outbox.
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

GRANT EXECUTE ON FUNCTION outbox_delivered(integer) TO tidings_api;

-- find_token finds a token by its hash for a caller that has no tenant yet, and in how many seconds it expires. It runs as the owner of the tables.
-- +goose StatementBegin
CREATE FUNCTION find_token(hash bytea)
RETURNS TABLE (tenant_id bigint, name text, roles text[], rate_read text, rate_write text, expires_in double precision)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT t.tenant_id, t.name, t.roles, t.rate_read, t.rate_write, CASE WHEN isfinite(t.expires_at) THEN extract(epoch FROM t.expires_at - now())::double precision END
    FROM api_tokens t
   WHERE t.token_hash = hash AND t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > now())
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION find_token(bytea) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION find_token(bytea) TO tidings_api, tidings_system;

-- changed_tokens tells which tokens have changed since a change, the last ones first, to whoever remembers tokens of all tenants. It runs as the
-- owner of the tables.
-- +goose StatementBegin
CREATE FUNCTION changed_tokens(since bigint, most integer)
RETURNS TABLE (change bigint, token_hash bytea)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT t.change, t.token_hash FROM api_tokens t WHERE t.change > since ORDER BY t.change DESC LIMIT most
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION changed_tokens(bigint, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION changed_tokens(bigint, integer) TO tidings_api;

-- number_token_change gives each change of a token its number. The lock is held until the transaction has ended, so that nobody sees a number before
-- the changes with lower ones are there to be seen.
-- +goose StatementBegin
CREATE FUNCTION number_token_change() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM pg_advisory_xact_lock('api_tokens'::regclass::bigint);
  NEW.change := nextval('api_token_change');
  RETURN NEW;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION number_token_change() FROM PUBLIC;
CREATE TRIGGER number_change BEFORE UPDATE ON api_tokens FOR EACH ROW EXECUTE FUNCTION number_token_change();

-- make_edge_kind makes what a kind of edges needs: its partition, with the key, policies and rights, and a view of it in the kind's own names, called by the
-- plural, which SQL writers write too. It returns false when they are there, and changes nothing. The partition is made beside the table and attached, empty, which keeps no
-- writer of another kind waiting. A view whose name another relation has is an error.
--   self        whether an edge may lead from an id to the same one; where the ends are of different objects it may
--   partitions  how many hash partitions, by origin, the kind's table itself has; 0 for none
-- +goose StatementBegin
CREATE FUNCTION make_edge_kind(kind text, plural text, from_name text, to_name text, self boolean, partitions int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  part  text := 'edges_' || kind;
  t     text;
BEGIN
  PERFORM pg_advisory_xact_lock(x'7464656b'::bigint); -- "tdek": one at a time
  IF EXISTS (SELECT FROM pg_inherits WHERE inhparent = 'edges'::regclass AND inhrelid = to_regclass(part)) THEN
    RETURN false;
  END IF;
  IF EXISTS (SELECT FROM pg_class WHERE relnamespace = quote_ident(current_schema())::regnamespace AND relname = plural) THEN
    RAISE duplicate_table USING MESSAGE = format('the view %I of the kind %s cannot be made: a relation of that name exists', plural, kind);
  END IF;
  EXECUTE format('CREATE TABLE %I (LIKE edges INCLUDING DEFAULTS INCLUDING CONSTRAINTS) %s', part,
    CASE WHEN partitions > 0 THEN 'PARTITION BY HASH (tenant_id, from_id)' ELSE '' END);
  EXECUTE format('ALTER TABLE %I ALTER kind SET DEFAULT %L, ADD PRIMARY KEY (tenant_id, from_id, to_id)', part, kind);
  IF NOT self THEN
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT %I CHECK (from_id <> to_id)', part, part || '_no_self');
  END IF;
  FOR n IN 0 .. partitions - 1 LOOP
    EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES WITH (MODULUS %s, REMAINDER %s)', part || '_' || n, part, partitions, n);
  END LOOP;
  EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', part);
  EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
    USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
    WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, part);
  EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', part);
  EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', part);
  EXECUTE format('CREATE POLICY writer ON %I TO tidings_writer USING (true) WITH CHECK (true)', part);
  EXECUTE format('CREATE VIEW %I WITH (security_invoker = true) AS
    SELECT tenant_id, from_id AS %I, to_id AS %I, status, version, created_at, positioned_at, updated_at, attributes FROM %I', plural, from_name, to_name, part);
  FOREACH t IN ARRAY ARRAY[part, plural] LOOP
    EXECUTE format('GRANT SELECT, INSERT, UPDATE ON %I TO tidings_api', t);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %I TO tidings_system', t);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE (status, version, positioned_at, updated_at, attributes) ON %I TO tidings_writer', t);
    EXECUTE format('GRANT SELECT ON %I TO tidings_reader', t);
  END LOOP;
  EXECUTE format('ALTER TABLE edges ATTACH PARTITION %I FOR VALUES IN (%L)', part, kind);
  RETURN true;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION make_edge_kind(text, text, text, text, boolean, int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION make_edge_kind(text, text, text, text, boolean, int) TO tidings_system;

-- make_child_kind makes what a kind of children needs: its partitions, with the keys, indexes, policies and rights, and two views in the kind's own
-- names: one of the table that is written, named by the plural, which SQL writers write too, and one with the archive. It says whether it made them: a kind that is
-- there is left alone.
-- Both partitions are made beside the tables and attached, empty, which keeps no writer of another kind waiting. A view whose name something else has is an error.
--   threaded        its children have parent_id, slug and path; those of others have none, and no index for them;
--   one_per_author  an author has one child of an object that is not withdrawn;
--   partitions      how many hash partitions, by object, the kind's table itself has; 0 for none. child_id is then unique in each of them.
-- +goose StatementBegin
CREATE FUNCTION make_child_kind(kind text, plural text, id_name text, parent_name text, threaded boolean, one_per_author boolean, partitions int) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  here    text := 'children_' || kind;
  there   text := 'children_archive_' || kind;
  leaves  text[] := '{}';
  leaf    text;
  names   text;
  name    text;
  about   text := 'children of the kind ' || kind;
BEGIN
  PERFORM pg_advisory_xact_lock(x'74646b64'::bigint); -- "tdkd": one at a time
  IF EXISTS (SELECT FROM child_kinds k WHERE k.kind = make_child_kind.kind) THEN
    RETURN false;
  END IF;
  FOREACH name IN ARRAY ARRAY[plural, 'all_' || plural] LOOP
    IF EXISTS (SELECT FROM pg_class WHERE relnamespace = quote_ident(current_schema())::regnamespace AND relname = name) THEN
      RAISE duplicate_table USING MESSAGE = format('the view %I of the kind %s cannot be made: a relation of that name exists', name, kind);
    END IF;
  END LOOP;
  INSERT INTO child_kinds VALUES (kind, id_name, parent_name);

  EXECUTE format('CREATE TABLE %I (LIKE children INCLUDING DEFAULTS INCLUDING CONSTRAINTS) %s', here, CASE WHEN partitions > 0 THEN 'PARTITION BY HASH (tenant_id, object_id)' END);
  EXECUTE format('ALTER TABLE %I ALTER kind SET DEFAULT %L', here, kind);
  EXECUTE format('CREATE TABLE %I (LIKE children_archive)', there);
  EXECUTE format('ALTER TABLE %I ALTER kind SET DEFAULT %L', there, kind);
  FOR n IN 0 .. partitions - 1 LOOP
    leaves := leaves || (here || '_' || n);
    EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES WITH (MODULUS %s, REMAINDER %s)', leaves[n + 1], here, partitions, n);
  END LOOP;
  IF threaded THEN
    EXECUTE format('ALTER TABLE %I ALTER slug SET NOT NULL, ALTER path SET NOT NULL, ADD CONSTRAINT %I CHECK (length(path) BETWEEN 22 AND 64 * 23 - 1),
      ADD CONSTRAINT %I UNIQUE (tenant_id, object_id, slug), ADD CONSTRAINT %I UNIQUE (tenant_id, object_id, path)', here, here || '_path_check', here || '_slug_key', here || '_path_key');
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT %I UNIQUE (tenant_id, object_id, path) WITH (fillfactor = 100)', there, there || '_path_key');
  ELSE
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT %I CHECK (num_nonnulls(parent_id, slug, path) = 0)', here, here || '_flat_check');
    EXECUTE format('CREATE INDEX %I ON %I (tenant_id, object_id, child_id)', here || '_object_idx', here);
    EXECUTE format('CREATE INDEX %I ON %I (tenant_id, object_id, child_id) WITH (fillfactor = 100)', there || '_object_idx', there);
  END IF;
  IF one_per_author THEN
    EXECUTE format('CREATE UNIQUE INDEX %I ON %I (tenant_id, object_id, author_id) WHERE author_state = ''ACTIVE''', here || '_author_key', here);
  END IF;
  -- The primary keys come last. In an empty table every index costs the same to the planner, which takes the youngest; a plan that it makes then for a child
  -- by its id would walk all children of the tenant in any other index, until it is made anew.
  -- A key of a partitioned table has the columns that it is partitioned by, so each hash partition has its own.
  FOREACH leaf IN ARRAY CASE WHEN partitions > 0 THEN leaves ELSE ARRAY[here] END || there LOOP
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT %I PRIMARY KEY (tenant_id, child_id)', leaf, leaf || '_pkey');
  END LOOP;
  EXECUTE format('ALTER INDEX %I SET (fillfactor = 100)', there || '_pkey');

  FOREACH name IN ARRAY ARRAY[here, there] || leaves LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
    EXECUTE format('CREATE POLICY tenant ON %I TO tidings_api
      USING (tenant_id = NULLIF(current_setting(''tidings.tenant'', true), '''')::bigint)
      WITH CHECK (tenant_id = NULLIF(current_setting(''tidings.tenant'', true), '''')::bigint)', name);
    EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', name);
    EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', name);
    EXECUTE format('CREATE POLICY writer ON %I TO tidings_writer USING (true) WITH CHECK (true)', name);
  END LOOP;

  names := format('tenant_id, child_id AS %I, object_id AS %I, %sauthor_id, body, author_state, moderation_state, version, created_at, updated_at, attributes',
    id_name, parent_name, CASE WHEN threaded THEN 'parent_id, slug, path, ' END);
  EXECUTE format('CREATE VIEW %I WITH (security_invoker = true) AS SELECT %s FROM %I', plural, names, here);
  EXECUTE format('CREATE VIEW %I WITH (security_invoker = true) AS SELECT %s FROM %I UNION ALL SELECT %2$s FROM %4$I', 'all_' || plural, names, here, there);
  FOREACH name IN ARRAY ARRAY[here, plural] LOOP
    EXECUTE format('GRANT SELECT, INSERT, UPDATE ON %I TO tidings_api', name);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %I TO tidings_system', name);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE (body, attributes, author_state, version, updated_at) ON %I TO tidings_writer', name);
  END LOOP;
  EXECUTE format('GRANT SELECT, DELETE ON %I TO tidings_api', there); -- it brings threads back and archives none
  EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %I TO tidings_system', there);
  EXECUTE format('GRANT SELECT ON %I, %I TO tidings_writer, tidings_reader', there, 'all_' || plural);
  EXECUTE format('GRANT SELECT ON %I TO tidings_api, tidings_system', 'all_' || plural);
  EXECUTE format('GRANT SELECT ON %I, %I TO tidings_reader', here, plural);

  EXECUTE format('ALTER TABLE children ATTACH PARTITION %I FOR VALUES IN (%L)', here, kind);
  EXECUTE format('ALTER TABLE children_archive ATTACH PARTITION %I FOR VALUES IN (%L)', there, kind);
  RETURN true;
END $$;
-- +goose StatementEnd

-- child_event_fits tells whether the event that a direct SQL writer appends may be one of a child. What such a writer says of a child is said of one that
-- there is, with its object and its author, in the one form that is compared everywhere: a UUID in lower case with hyphens, an object's id as a string.
-- In another form, consumers, erasures and whoever looks for a child would not see the same; and an erasure goes to the partition of the
-- object, and finds the events of an author by their children. A kind is known by its row, so this is no CHECK, which could not look it up.
-- It costs the writer of a child's event some 75 us, that of another event some 4 us, and the API nothing (TestWhatThePolicyOfWritersCosts).
-- +goose StatementBegin
CREATE FUNCTION child_event_fits(tenant bigint, kind text, object text, payload jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  k child_kinds;
  id uuid;
  author text;
  tab text;
  present boolean;
BEGIN
  SELECT * INTO k FROM child_kinds c WHERE c.kind = child_event_fits.kind;
  IF NOT FOUND THEN
    RETURN true;
  END IF;
  IF ((payload -> k.id_name)::text ~ '^"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"$'
      AND coalesce((payload -> 'parent_id')::text, 'null') ~ '^(null|"([0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12})?")$'
      AND (payload -> k.parent_name)::text = '"' || object || '"'
      AND (payload -> 'author_id')::text ~ '^"[A-Za-z0-9_.~:@|+=-]{1,128}"$') IS NOT TRUE THEN
    RAISE check_violation USING CONSTRAINT = 'outbox_messages_child_check', TABLE = 'outbox_messages', MESSAGE = format(
      'the payload of an event of a %s has %s and parent_id as UUIDs in lower case with hyphens, %s as the aggregate_id, and author_id, both as strings', kind, k.id_name, k.parent_name);
  END IF;
  id := payload ->> k.id_name;
  author := payload ->> 'author_id';
  -- The kind's own tables are named: a statement about all kinds is planned anew for each row, which costs five times as much.
  FOREACH tab IN ARRAY ARRAY['children_' || kind, 'children_archive_' || kind] LOOP
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I WHERE tenant_id = $1 AND child_id = $2 AND object_id = $3 AND author_id = $4)', current_schema(), tab) INTO present USING tenant, id, object, author;
    IF present THEN
      RETURN true;
    END IF;
  END LOOP;
  RETURN false;
END $$;
-- +goose StatementEnd
CREATE POLICY writer_child ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer WITH CHECK (child_event_fits(tenant_id, aggregate_type, aggregate_id, payload));

REVOKE ALL ON FUNCTION make_child_kind(text, text, text, text, boolean, boolean, int), child_event_fits(bigint, text, text, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION make_child_kind(text, text, text, text, boolean, boolean, int) TO tidings_system;
GRANT EXECUTE ON FUNCTION child_event_fits(bigint, text, text, jsonb) TO tidings_writer;

-- drop_kind drops the tables and views of a kind, which has no rows: a kind that was never written may go, or come back with other tables. One that
-- has rows is an error. It says whether there was anything to drop. It locks the tables that the kind's are partitions of, ACCESS EXCLUSIVE: call it with a lock_timeout.
-- +goose StatementBegin
CREATE FUNCTION drop_kind(kind text, plural text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  parts text[] := ARRAY(SELECT p FROM unnest(ARRAY['edges_' || kind, 'children_' || kind, 'children_archive_' || kind]) p
                         WHERE to_regclass(format('%I.%I', current_schema(), p)) IS NOT NULL);
  name  text;
  found boolean;
BEGIN
  FOREACH name IN ARRAY parts LOOP
    EXECUTE format('LOCK TABLE %I.%I IN ACCESS EXCLUSIVE MODE', current_schema(), name);
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I)', current_schema(), name) INTO found;
    IF found THEN
      RAISE restrict_violation USING MESSAGE = format('the kind %s cannot be dropped: %I has rows', kind, name);
    END IF;
  END LOOP;
  IF parts <> '{}' THEN
    FOREACH name IN ARRAY ARRAY['all_' || plural, plural] LOOP
      EXECUTE format('DROP VIEW IF EXISTS %I.%I', current_schema(), name);
    END LOOP;
  END IF;
  FOREACH name IN ARRAY parts LOOP
    EXECUTE format('DROP TABLE %I.%I', current_schema(), name);
  END LOOP;
  DELETE FROM child_kinds k WHERE k.kind = drop_kind.kind;
  DELETE FROM child_archive_walk w WHERE w.kind = drop_kind.kind;
  RETURN parts <> '{}';
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION drop_kind(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION drop_kind(text, text) TO tidings_system;

-- console_sessions: who is signed in to the console. id is the SHA-256 of the session's cookie. Signing out deletes the row, and then no process accepts the
-- cookie. A token has few sessions (tokens.MaxSessions); expired ones are deleted when somebody signs in.
CREATE TABLE console_sessions (
  id         bytea       PRIMARY KEY CHECK (length(id) = 32),
  token_hash bytea       NOT NULL,
  started_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz NOT NULL
);
CREATE INDEX console_sessions_token_idx ON console_sessions (token_hash, started_at);
CREATE INDEX console_sessions_expires_idx ON console_sessions (expires_at);
GRANT SELECT, INSERT, DELETE, UPDATE (expires_at) ON console_sessions TO tidings_system; -- UPDATE: SELECT FOR UPDATE wants it for some column
GRANT SELECT (id, started_at, expires_at) ON console_sessions TO tidings_reader; -- not the hash of the token: see api_tokens

-- A token that another token made in the console is never more than its maker.
--   made_by    the hash of the token of the same tenant that made it; null: an operator made it. Whoever revokes the maker revokes it;
--   limits_of  the name of the token whose limits it shares, which is the first of the makers; null: it has limits of its own.
GRANT SELECT (limits_of) ON api_tokens TO tidings_reader; -- made_by is a hash

-- token_limits names the token whose limits a token shares, for a caller that has no tenant yet. It runs as the owner of the tables.
-- +goose StatementBegin
CREATE FUNCTION token_limits(hash bytea) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT coalesce(t.limits_of, t.name) FROM api_tokens t WHERE t.token_hash = hash
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION token_limits(bytea) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION token_limits(bytea) TO tidings_api, tidings_system;

-- revoke_made_tokens revokes what revoked tokens made, and what that made, whichever release or person revokes them. Each level is a statement of its
-- own, which sees every token that was made while the one before it waited: whoever makes a token holds its maker's row. Tokens are few, and seldom
-- revoked: a level reads all of them.
-- +goose StatementBegin
CREATE FUNCTION revoke_made_tokens() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE makers bytea[];
BEGIN
  SELECT array_agg(n.token_hash) INTO makers FROM after n JOIN before o ON o.token_hash = n.token_hash
   WHERE o.revoked_at IS NULL AND n.revoked_at IS NOT NULL;
  WHILE makers IS NOT NULL LOOP
    WITH ended AS (UPDATE api_tokens SET revoked_at = now() WHERE made_by = ANY (makers) AND revoked_at IS NULL RETURNING token_hash)
    SELECT array_agg(token_hash) INTO makers FROM ended;
  END LOOP;
  RETURN NULL;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION revoke_made_tokens() FROM PUBLIC;
CREATE TRIGGER revoke_made AFTER UPDATE ON api_tokens REFERENCING OLD TABLE AS before NEW TABLE AS after FOR EACH STATEMENT
  WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION revoke_made_tokens();
