-- +goose Up

-- tidings_reader: what a person who looks at rows acts as (docs/runbook/looking-at-rows.md). It reads every table of every tenant and
-- writes none. A table that is made later grants it SELECT, and has a policy for it where it has row-level security.
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
  FOREACH t IN ARRAY ARRAY['follows', 'comments', 'comment_keys', 'threads', 'outbox_messages', 'outbox_messages_dlq', 'outbox_dlq_actions',
                           'outbox_messages_archive', 'outbox_partitions', 'outbox_stream', 'leases', 'lease_members', 'tidings_truth_migrations',
                           'job_runs', 'outbox_archive_cursor', 'outbox_archive_months', 'outbox_archive_holds', 'comments_archive', 'archived_threads', 'comment_archive_walk', 'all_comments'] LOOP
    CONTINUE WHEN to_regclass(quote_ident(t)) IS NULL;
    EXECUTE format('GRANT SELECT ON %I TO tidings_reader', t);
    IF (SELECT relrowsecurity FROM pg_class WHERE oid = quote_ident(t)::regclass) THEN
      EXECUTE format('CREATE POLICY reader ON %I FOR SELECT TO tidings_reader USING (true)', t);
    END IF;
  END LOOP;
END $$;
-- +goose StatementEnd
-- Not the hashes: nobody who looks at rows needs them, and whoever has one can tell whether a token that was found somewhere is it.
GRANT SELECT (tenant_id, name, roles, created_at, expires_at, revoked_at) ON api_tokens TO tidings_reader;
CREATE POLICY reader ON api_tokens FOR SELECT TO tidings_reader USING (true);

-- threads_purged: the version that purged settings of a thread were at. They were the defaults, so nothing else of them is in force,
-- and the next settings go on from that version: consumers know it.
CREATE TABLE threads_purged (
  tenant_id bigint      NOT NULL,
  post_id   bigint      NOT NULL,
  version   bigint      NOT NULL,
  purged_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, post_id)
);
ALTER TABLE threads_purged ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON threads_purged TO tidings_api
  USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
  WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint);
CREATE POLICY system ON threads_purged TO tidings_system USING (true) WITH CHECK (true);
CREATE POLICY reader ON threads_purged FOR SELECT TO tidings_reader USING (true);
GRANT SELECT ON threads_purged TO tidings_api, tidings_reader;
GRANT SELECT, INSERT, UPDATE, DELETE ON threads_purged TO tidings_system;

-- retention_cursors: in which step retention of a table is, and how far among its heads; no row while it rests. The projections have a
-- table of the same name and shape.
CREATE TABLE IF NOT EXISTS retention_cursors (
  table_name   text        PRIMARY KEY,
  step         text        NOT NULL CHECK (step IN ('delete', 'purge')),
  after_tenant bigint      NOT NULL DEFAULT 0,
  after_key    text[]      NOT NULL DEFAULT '{}',
  moved_at     timestamptz NOT NULL DEFAULT now()
);
GRANT SELECT ON retention_cursors TO tidings_reader;
GRANT SELECT, INSERT, UPDATE, DELETE ON retention_cursors TO tidings_system;
