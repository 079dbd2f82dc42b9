-- +goose Up
-- samples: figures of the installation, every ten seconds for a day (package ops/samples). A missing row is a gap: nobody could read the figures then.
--   at       a multiple of ten seconds, by this database's clock: the row of a moment is written once, whichever process comes first
--   source   '' for the whole installation, or a process of the API, which writes its own requests; the bound is 8,640 rows a day for each source
--   version  of the process that wrote the row
CREATE TABLE samples (
  at      timestamptz NOT NULL,
  source  text        COLLATE "C" NOT NULL,
  version text        NOT NULL,
  figures jsonb       NOT NULL,
  PRIMARY KEY (at, source)
);

ALTER TABLE samples ENABLE ROW LEVEL SECURITY;
CREATE POLICY system ON samples TO tidings_system USING (true) WITH CHECK (true);
CREATE POLICY reader ON samples FOR SELECT TO tidings_reader USING (true);
-- A process of the API adds its own rows, and deletes those whose day is over.
CREATE POLICY api ON samples TO tidings_api USING (at < now() - interval '1 day') WITH CHECK (source <> '');
GRANT SELECT, INSERT, DELETE ON samples TO tidings_system, tidings_api;
GRANT SELECT ON samples TO tidings_reader;
