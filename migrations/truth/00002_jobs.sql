-- +goose Up

-- job_runs: when each scheduled job last started and ended, and what came of it, for the whole fleet (package internal/jobs). Written
-- twice per run. A row whose started_at is the latest of its times is of a run that goes on, or that ended without a word.
CREATE TABLE job_runs (
  job          text        PRIMARY KEY,
  owner        text        NOT NULL,
  started_at   timestamptz NOT NULL,
  succeeded_at timestamptz,
  failed_at    timestamptz,
  last_error   text        NOT NULL DEFAULT '',
  counts       jsonb       NOT NULL DEFAULT '{}'
);
GRANT SELECT, INSERT, UPDATE ON job_runs TO tidings_system;
