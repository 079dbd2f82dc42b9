-- +goose Up
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
