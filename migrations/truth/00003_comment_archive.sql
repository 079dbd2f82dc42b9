-- +goose Up
-- The archive of comments (ADR 0008): threads that nobody has written in for long stand here, out of the way of the table that is written.
-- A comment is in exactly one of the two tables at any time. What reads the truth reads all_comments.

-- comments_archive: rows of comments, column for column, as they were. They are written once and read seldom: full pages, and the
-- two indexes that reads and the way back need. Redacting rows of both tables goes from here to comments: API instances bring threads back at
-- any time, and a row that does so in between is met in comments.
CREATE TABLE comments_archive (
  tenant_id        bigint      NOT NULL,
  comment_id       uuid        NOT NULL,
  post_id          bigint      NOT NULL,
  parent_id        uuid,
  slug             text        COLLATE "C" NOT NULL,
  path             text        COLLATE "C" NOT NULL,
  author_id        bigint      NOT NULL,
  body             text        NOT NULL,
  author_state     text        NOT NULL,
  moderation_state text        NOT NULL,
  version          bigint      NOT NULL,
  created_at       timestamptz NOT NULL,
  updated_at       timestamptz NOT NULL,
  PRIMARY KEY (tenant_id, comment_id) WITH (fillfactor = 100),
  CONSTRAINT comments_archive_path_key UNIQUE (tenant_id, post_id, path) WITH (fillfactor = 100)
);

-- archived_threads: each move of a thread. All but the RETURNED ones are stubs: they tell writers to bring the thread back first.
--   ARCHIVING   nobody writes in the thread any more; its comments are on their way to the archive
--   ARCHIVED    all of them are there
--   RETURNING   somebody wrote, or an operator took the archive back: they are on their way back
--   RETURNED    all of them are back: a record
CREATE TABLE archived_threads (
  tenant_id   bigint      NOT NULL,
  post_id     bigint      NOT NULL,
  archive_id  bigint      NOT NULL, -- of one run of the job, over all tenants: what an operator can take back
  state       text        NOT NULL DEFAULT 'ARCHIVING' CHECK (state IN ('ARCHIVING', 'ARCHIVED', 'RETURNING', 'RETURNED')),
  comments    bigint      NOT NULL DEFAULT 0, -- moved to the archive
  started_at  timestamptz NOT NULL DEFAULT now(),
  returned_at timestamptz,
  returned_by text        CHECK (returned_by IN ('write', 'undo', 'job')),
  PRIMARY KEY (tenant_id, post_id, archive_id),
  CONSTRAINT archived_threads_returned_check CHECK (state NOT IN ('RETURNING', 'RETURNED') OR returned_at IS NOT NULL AND returned_by IS NOT NULL)
);
CREATE UNIQUE INDEX archived_threads_stub_idx ON archived_threads (tenant_id, post_id) WHERE state <> 'RETURNED';
CREATE INDEX archived_threads_archive_idx ON archived_threads (archive_id, tenant_id, post_id);
CREATE INDEX archived_threads_unfinished_idx ON archived_threads (tenant_id, post_id) WHERE state IN ('ARCHIVING', 'RETURNING');
CREATE SEQUENCE comment_archive_id AS bigint;

-- comment_archive_walk: the thread up to which the search for quiet ones has come.
CREATE TABLE comment_archive_walk (
  singleton    boolean PRIMARY KEY DEFAULT true CHECK (singleton),
  after_tenant bigint  NOT NULL,
  after_post   bigint  NOT NULL
);

CREATE VIEW all_comments WITH (security_invoker = true) AS
SELECT tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at, updated_at FROM comments
UNION ALL
SELECT tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at, updated_at FROM comments_archive;

-- +goose StatementBegin
DO $$
DECLARE t text;
BEGIN
  FOREACH t IN ARRAY ARRAY['comments_archive', 'archived_threads'] LOOP
    EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t);
    EXECUTE format($p$CREATE POLICY tenant ON %I TO tidings_api
      USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
      WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)$p$, t);
    EXECUTE format('CREATE POLICY system ON %I TO tidings_system USING (true) WITH CHECK (true)', t);
    EXECUTE format('CREATE POLICY writer ON %I TO tidings_writer USING (true) WITH CHECK (true)', t);
  END LOOP;
END $$;
-- +goose StatementEnd

-- The API brings threads back and archives none.
GRANT SELECT ON all_comments, comments_archive, archived_threads TO tidings_api, tidings_writer;
GRANT DELETE ON comments_archive TO tidings_api;
GRANT UPDATE (state, returned_at, returned_by) ON archived_threads TO tidings_api;
GRANT SELECT, INSERT, UPDATE, DELETE ON comments_archive, archived_threads, comment_archive_walk TO tidings_system;
GRANT SELECT ON all_comments TO tidings_system;
GRANT USAGE ON SEQUENCE comment_archive_id TO tidings_system;
