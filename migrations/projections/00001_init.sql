-- +goose Up
-- The projections: all that the consumers write. Every table here but the histories can be rebuilt from the stream or the truth.

-- ==== Tables ====

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
CREATE TABLE consumer_dead_letters (
  id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  consumer_name  text        NOT NULL,
  stream_seq     bigint      NOT NULL,
  partition_key  text        NOT NULL,
  tenant_id      bigint      NOT NULL,
  aggregate_type text        NOT NULL,
  aggregate_id   bigint      NOT NULL,
  event_id       uuid        NOT NULL,
  event_type     text        NOT NULL,
  event_version  smallint    NOT NULL,
  headers        jsonb       NOT NULL,
  payload        bytea       NOT NULL,
  error          text        NOT NULL,
  dead_at        timestamptz NOT NULL DEFAULT now()
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
  aggregate_id   bigint      NOT NULL,
  event_id       uuid        NOT NULL,
  event_type     text        NOT NULL,
  error          text        NOT NULL DEFAULT '',
  reason         text        NOT NULL DEFAULT ''
);

-- The same tables as in the truth, where they are explained.
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

-- follow_edges: followercounts' own copy of every pair it has heard of, so that counts are exact under duplicates and replays.
CREATE TABLE follow_edges (
  tenant_id     bigint      NOT NULL,
  follower_id   bigint      NOT NULL,
  followee_id   bigint      NOT NULL,
  active        boolean     NOT NULL,
  version       bigint      NOT NULL,
  positioned_at timestamptz NOT NULL,
  shard_id      int         NOT NULL DEFAULT 0,
  PRIMARY KEY (tenant_id, follower_id, followee_id)
);

-- follower_shards: the accounts whose followers are spread over several shards of follow_edges_reverse_idx; every other one has
-- one. It only ever rises, and edges stay in the shard that they were written to.
CREATE TABLE follower_shards (
  tenant_id bigint   NOT NULL,
  user_id   bigint   NOT NULL,
  shards    smallint NOT NULL CHECK (shards IN (2, 4, 8, 16, 32, 64)),
  PRIMARY KEY (tenant_id, user_id)
);

CREATE TABLE follower_counts (
  tenant_id  bigint      NOT NULL,
  user_id    bigint      NOT NULL,
  followers  bigint      NOT NULL DEFAULT 0 CHECK (followers >= 0),
  following  bigint      NOT NULL DEFAULT 0 CHECK (following >= 0),
  updated_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, user_id)
) WITH (fillfactor = 70);

-- thread_comments: threadcache's row per comment. visible is what its two states say together; shown says whether a
-- threaded page has the row, as itself or as a tombstone above something visible.
CREATE TABLE thread_comments (
  tenant_id           bigint      NOT NULL,
  comment_id          uuid        NOT NULL,
  post_id             bigint      NOT NULL,
  parent_id           uuid,
  slug                text        COLLATE "C" NOT NULL,
  path                text        COLLATE "C" NOT NULL,
  author_id           bigint      NOT NULL,
  body                text        NOT NULL,
  author_state        text        NOT NULL,
  moderation_state    text        NOT NULL,
  version             bigint      NOT NULL,
  created_at          timestamptz NOT NULL,
  updated_at          timestamptz NOT NULL,
  visible             boolean     NOT NULL,
  visible_descendants int         NOT NULL DEFAULT 0 CHECK (visible_descendants >= 0),
  shown               boolean     NOT NULL,
  PRIMARY KEY (tenant_id, comment_id),
  CONSTRAINT thread_comments_shown_check CHECK (shown = (visible OR visible_descendants > 0))
) WITH (fillfactor = 85);

-- thread_buckets: how many visible comments there are in each range of a post's chronological order. Level 0 are buckets of
-- 100 to 200 comments, level 1 groups of 100 to 200 buckets; fewer after deletions, for ranges are split and never joined. A range
-- begins at its key and ends below the next of its level; the first of a post begins at -infinity.
CREATE TABLE thread_buckets (
  tenant_id bigint      NOT NULL,
  post_id   bigint      NOT NULL,
  level     smallint    NOT NULL CHECK (level IN (0, 1)),
  first_at  timestamptz NOT NULL,
  first_id  uuid        NOT NULL,
  visible   int         NOT NULL CHECK (visible >= 0),
  PRIMARY KEY (tenant_id, post_id, level, first_at, first_id)
) WITH (fillfactor = 70);

-- thread_totals: how many comments a post has had, whatever became of them.
CREATE TABLE thread_totals (
  tenant_id bigint NOT NULL,
  post_id   bigint NOT NULL,
  total     bigint NOT NULL CHECK (total > 0),
  PRIMARY KEY (tenant_id, post_id)
) WITH (fillfactor = 70);

-- thread_settings: the settings of threads, apart from the counts: their events are in another partition.
CREATE TABLE thread_settings (
  tenant_id    bigint  NOT NULL,
  post_id      bigint  NOT NULL,
  locked       boolean NOT NULL,
  premoderated boolean NOT NULL,
  title        text    NOT NULL,
  version      bigint  NOT NULL,
  PRIMARY KEY (tenant_id, post_id)
);

-- comment_history and follow_history: who did what, when (package versioned). Records, not projections: never rebuilt.
CREATE SEQUENCE history_version_id AS bigint START 100000000001;
CREATE TABLE comment_history (
  tenant_id     bigint NOT NULL,
  object        jsonb  NOT NULL,
  metadata      jsonb  NOT NULL,
  comment_id    uuid   GENERATED ALWAYS AS ((object ->> 'comment_id')::uuid) STORED NOT NULL,
  version       bigint GENERATED ALWAYS AS ((object ->> 'version')::bigint) STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                CONSTRAINT comment_history_version_state_check CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
  PRIMARY KEY (tenant_id, comment_id, version_id),
  CONSTRAINT comment_history_created_by_check CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
  CONSTRAINT comment_history_last_update_time_check CHECK (metadata ->> 'last_update_time' IS NOT NULL)
);
CREATE TABLE follow_history (
  tenant_id     bigint NOT NULL,
  object        jsonb  NOT NULL,
  metadata      jsonb  NOT NULL,
  follower_id   bigint GENERATED ALWAYS AS ((object ->> 'follower_id')::bigint) STORED NOT NULL,
  followee_id   bigint GENERATED ALWAYS AS ((object ->> 'followee_id')::bigint) STORED NOT NULL,
  version       bigint GENERATED ALWAYS AS ((object ->> 'version')::bigint) STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                CONSTRAINT follow_history_version_state_check CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
  PRIMARY KEY (tenant_id, follower_id, followee_id, version_id),
  CONSTRAINT follow_history_created_by_check CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
  CONSTRAINT follow_history_last_update_time_check CHECK (metadata ->> 'last_update_time' IS NOT NULL)
);

-- comment_history_purged and follow_history_purged: up to which version a history was physically deleted. No event brings those
-- versions back, and nobody misses them.
CREATE TABLE comment_history_purged (
  tenant_id  bigint      NOT NULL,
  comment_id uuid        NOT NULL,
  version    bigint      NOT NULL,
  purged_at  timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, comment_id)
);
CREATE TABLE follow_history_purged (
  tenant_id   bigint      NOT NULL,
  follower_id bigint      NOT NULL,
  followee_id bigint      NOT NULL,
  version     bigint      NOT NULL,
  purged_at   timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, follower_id, followee_id)
);

-- The same table as in the truth, where it is explained.
CREATE TABLE IF NOT EXISTS retention_cursors (
  table_name   text        PRIMARY KEY,
  step         text        NOT NULL CHECK (step IN ('delete', 'purge')),
  after_tenant bigint      NOT NULL DEFAULT 0,
  after_key    text[]      NOT NULL DEFAULT '{}',
  moved_at     timestamptz NOT NULL DEFAULT now()
);

-- ==== Indexes ====

CREATE INDEX consumer_dead_letters_aggregate_idx ON consumer_dead_letters (consumer_name, tenant_id, aggregate_type, aggregate_id, id);
CREATE INDEX consumer_dead_letter_actions_tenant_event_idx ON consumer_dead_letter_actions (tenant_id, event_id);
CREATE INDEX follow_edges_forward_idx ON follow_edges (tenant_id, follower_id, positioned_at DESC, followee_id DESC) WHERE active;
CREATE INDEX follow_edges_reverse_idx ON follow_edges (tenant_id, followee_id, shard_id, positioned_at DESC, follower_id DESC) WHERE active;
CREATE UNIQUE INDEX thread_comments_path_idx ON thread_comments (tenant_id, post_id, path);
CREATE INDEX thread_comments_threaded_idx ON thread_comments (tenant_id, post_id, path) WHERE shown;
CREATE INDEX thread_comments_oldest_idx ON thread_comments (tenant_id, post_id, created_at, comment_id) WHERE visible;
CREATE INDEX thread_comments_author_idx ON thread_comments (tenant_id, author_id, created_at, comment_id) WHERE visible;
-- Without the post: the writer's probes by path are to find one index that begins with tenant and post, and a slug is rare enough.
CREATE INDEX thread_comments_slug_idx ON thread_comments (tenant_id, slug);
CREATE INDEX thread_comments_pending_idx ON thread_comments (tenant_id, created_at, comment_id)
  WHERE moderation_state = 'PENDING' AND author_state = 'ACTIVE';
CREATE INDEX thread_comments_pending_post_idx ON thread_comments (tenant_id, post_id, created_at, comment_id)
  WHERE moderation_state = 'PENDING' AND author_state = 'ACTIVE';
CREATE UNIQUE INDEX comment_history_head_idx ON comment_history (tenant_id, comment_id) WHERE version_state IN ('LATEST', 'DELETED');
CREATE UNIQUE INDEX comment_history_version_idx ON comment_history (tenant_id, comment_id, version);
-- Comments as they are by author, for `tidings history author`.
CREATE INDEX comment_history_author_idx ON comment_history (tenant_id, ((object ->> 'author_id')::bigint), comment_id) WHERE version_state = 'LATEST';
CREATE UNIQUE INDEX follow_history_head_idx ON follow_history (tenant_id, follower_id, followee_id) WHERE version_state IN ('LATEST', 'DELETED');
CREATE UNIQUE INDEX follow_history_version_idx ON follow_history (tenant_id, follower_id, followee_id, version);

-- ==== Roles ====

-- The same as in the truth, where they are explained.
-- +goose StatementBegin
DO $$
DECLARE r text;
BEGIN
  FOREACH r IN ARRAY ARRAY['tidings_api', 'tidings_system', 'tidings_reader'] LOOP
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = r) THEN
      BEGIN
        EXECUTE format('CREATE ROLE %I NOLOGIN', r);
      EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
      END;
    END IF;
    IF r <> 'tidings_reader' AND NOT pg_has_role(current_user, r, 'MEMBER') THEN
      EXECUTE format('GRANT %I TO %I', r, current_user);
    END IF;
  END LOOP;
END $$;
-- +goose StatementEnd

-- ==== Row-level security ====

-- +goose StatementBegin
DO $$
DECLARE t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['consumer_dead_letters', 'consumer_dead_letter_actions', 'follow_edges', 'follower_shards', 'follower_counts', 'thread_comments',
                           'thread_buckets', 'thread_totals', 'thread_settings', 'comment_history', 'follow_history', 'comment_history_purged', 'follow_history_purged'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
      USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
      WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, t);
    EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', t);
    EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', t);
  END LOOP;
END $$;
-- +goose StatementEnd

-- ==== Rights ====

GRANT SELECT ON consumer_dead_letters, follow_edges, follower_shards, follower_counts, thread_comments,
  thread_buckets, thread_totals, thread_settings, comment_history, follow_history, consumer_offsets TO tidings_api;
-- The API writes only in transactions that it rolls back: it reads as if a projection had applied something (docs/adr/0007-reading-ones-writes.md).
GRANT INSERT, UPDATE ON follow_edges, follower_shards, follower_counts, thread_comments, thread_buckets, thread_totals, thread_settings TO tidings_api;

GRANT USAGE ON SEQUENCE history_version_id TO tidings_system;
GRANT SELECT, INSERT ON consumer_dead_letter_actions TO tidings_system; -- an audit: nobody changes it
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_pauses TO tidings_system;
GRANT SELECT, INSERT, UPDATE, DELETE ON consumer_offsets, consumer_dead_letters, leases, lease_members, follow_edges, follower_shards, follower_counts,
  thread_comments, thread_buckets, thread_totals, thread_settings, comment_history, follow_history, comment_history_purged, follow_history_purged,
  retention_cursors TO tidings_system;

GRANT SELECT ON consumer_offsets, consumer_pauses, consumer_dead_letters, consumer_dead_letter_actions, leases, lease_members, follow_edges, follower_shards,
  follower_counts, thread_comments, thread_buckets, thread_totals, thread_settings, comment_history, follow_history, comment_history_purged,
  follow_history_purged, retention_cursors, tidings_projections_migrations TO tidings_reader;
