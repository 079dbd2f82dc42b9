-- +goose Up

-- tidings_reader, as in the truth's migration 00004.
-- +goose StatementBegin
DO $$
DECLARE t text;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'tidings_reader') THEN
    BEGIN
      CREATE ROLE tidings_reader NOLOGIN;
    EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
    END;
  END IF;
  FOREACH t IN ARRAY ARRAY['consumer_offsets', 'consumer_pauses', 'consumer_dead_letters', 'consumer_dead_letter_actions', 'leases', 'lease_members',
                           'follow_edges', 'follower_shards', 'follower_counts', 'thread_comments', 'thread_buckets', 'thread_totals',
                           'thread_settings', 'comment_history', 'follow_history', 'tidings_projections_migrations'] LOOP
    EXECUTE format('GRANT SELECT ON %I TO tidings_reader', t);
    IF (SELECT relrowsecurity FROM pg_class WHERE oid = quote_ident(t)::regclass) THEN
      EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', t);
    END IF;
  END LOOP;
END $$;
-- +goose StatementEnd

-- Comments as they are by author, for `tidings history author`. On the expression, not on a generated column: to add one rewrites the
-- table under a lock that readers wait for. Building the index holds up the archiver alone, which writes the table and catches up.
CREATE INDEX comment_history_author_idx ON comment_history (tenant_id, ((object ->> 'author_id')::bigint), comment_id) WHERE version_state = 'LATEST';

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
-- +goose StatementBegin
DO $$
DECLARE t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['comment_history_purged', 'follow_history_purged'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
      USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
      WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, t);
    EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', t);
    EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', t);
    EXECUTE format('GRANT SELECT ON %I TO tidings_reader', t);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %I TO tidings_system', t);
  END LOOP;
END $$;
-- +goose StatementEnd

-- The same table as in the truth, where it is explained.
CREATE TABLE IF NOT EXISTS retention_cursors (
  table_name   text        PRIMARY KEY,
  step         text        NOT NULL CHECK (step IN ('delete', 'purge')),
  after_tenant bigint      NOT NULL DEFAULT 0,
  after_key    text[]      NOT NULL DEFAULT '{}',
  moved_at     timestamptz NOT NULL DEFAULT now()
);
GRANT SELECT ON retention_cursors TO tidings_reader;
GRANT SELECT, INSERT, UPDATE, DELETE ON retention_cursors TO tidings_system;
