-- +goose Up
-- consumer_filters: the aggregate types that a projection of package subscribe gets (its option Only); empty for all. The first start of the
-- projection writes the row, and Replay deletes it. Tidings' own projections have none.
CREATE TABLE consumer_filters (
  consumer_name   text   PRIMARY KEY,
  aggregate_types text[] NOT NULL
);
