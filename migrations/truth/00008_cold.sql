-- +goose Up
-- outbox_archive_exports: which months of the archive stand outside the database, and where (package coldstore). Each attempt has a row
-- before it has a file, so that the files of one that died are known and removed. A month may have several that are COMPLETE:
-- what came late, after the month was dropped, is exported beside what was exported before.
--   WRITING  begun; it counts for nothing
--   COMPLETE every file was written and read back
--   OVER     superseded, or given up: its files are being removed, and the row goes with them
CREATE TABLE outbox_archive_exports (
  export_id       text        COLLATE "C" PRIMARY KEY CHECK (export_id ~ '^[0-9]{8}t[0-9]{6}[.][0-9]{6}z-[a-z0-9]+$'),
  month           date        NOT NULL CHECK (extract(day FROM month) = 1),
  url             text        NOT NULL CHECK (url <> ''),
  state           text        NOT NULL DEFAULT 'WRITING' CHECK (state IN ('WRITING', 'COMPLETE', 'OVER')),
  started_at      timestamptz NOT NULL DEFAULT now(),
  exported_at     timestamptz,
  verified_at     timestamptz, -- when its files were last read and found right
  stale_at        timestamptz, -- when it was found that the table holds something else, or that a file is damaged
  released_at     timestamptz, -- when the month was given free to be dropped: what it holds may be nowhere else since
  over_at         timestamptz,
  swept_at        timestamptz, -- when its files were last removed
  manifest_sha256 bytea,
  content_sha256  bytea,
  rows            bigint,
  bytes           bigint,
  CONSTRAINT outbox_archive_exports_complete_check CHECK (state <> 'COMPLETE' OR
    num_nulls(exported_at, verified_at, manifest_sha256, content_sha256, rows, bytes) = 0),
  CONSTRAINT outbox_archive_exports_over_check CHECK ((state = 'OVER') = (over_at IS NOT NULL))
);
CREATE INDEX outbox_archive_exports_month_idx ON outbox_archive_exports (month);
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_archive_exports TO tidings_system;
GRANT SELECT ON outbox_archive_exports TO tidings_reader;
