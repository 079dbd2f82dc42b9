-- +goose Up

-- erasures: whose comments were erased, when, on whose word, and what was redacted where (package erasure). Written first, before
-- anything is redacted, so that an erasure that was interrupted is known and goes on when it is asked for again. counts is by store,
-- over all its runs. Rows are kept for good: they answer an auditor, and hold nothing of what was erased.
CREATE TABLE erasures (
  tenant_id    bigint      NOT NULL,
  author_id    bigint      NOT NULL CHECK (author_id > 0),
  requested_at timestamptz NOT NULL DEFAULT now(),
  requested_by text        NOT NULL CHECK (requested_by <> ''),
  reason       text        NOT NULL DEFAULT '',
  runs         int         NOT NULL DEFAULT 1,
  finished_at  timestamptz,
  counts       jsonb       NOT NULL DEFAULT '{}',
  PRIMARY KEY (tenant_id, author_id, requested_at)
);
CREATE UNIQUE INDEX erasures_unfinished_idx ON erasures (tenant_id, author_id) WHERE finished_at IS NULL;

-- +goose StatementBegin
DO $$
BEGIN
  ALTER TABLE erasures ENABLE ROW LEVEL SECURITY;
  CREATE POLICY tenant ON erasures TO tidings_api
    USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
    WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint);
  CREATE POLICY system ON erasures TO tidings_system USING (true) WITH CHECK (true);
  CREATE POLICY reader ON erasures FOR SELECT TO tidings_reader USING (true);
END $$;
-- +goose StatementEnd

GRANT SELECT ON erasures TO tidings_reader;
GRANT SELECT, INSERT, UPDATE ON erasures TO tidings_system; -- the API has no business with it
