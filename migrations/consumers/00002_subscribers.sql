-- +goose Up
-- consumer_filters: the aggregate types that a projection of package subscribe gets (its option Only); empty for all. The first start of the
-- projection writes the row, and Replay deletes it. Tidings' own projections have none.
CREATE TABLE consumer_filters (
  consumer_name   text   PRIMARY KEY,
  aggregate_types text[] NOT NULL
);

-- consumer_bootstraps: the exports with which a projection begins (projector.Bootstrap), while it reads them. The row of tenant 0 is the claim of the
-- instance that reads them; the others have how far an export of a kind is read, as of the transaction that stored its states.
CREATE TABLE consumer_bootstraps (
  consumer_name text        NOT NULL,
  tenant        bigint      NOT NULL,
  kind          text        NOT NULL,
  owner         text        NOT NULL DEFAULT '',    -- of the claim
  moved_at      timestamptz NOT NULL DEFAULT now(), -- of the claim: the owner's last sign of life
  cursor        text        NOT NULL DEFAULT '',
  after         text        NOT NULL DEFAULT '',
  streams       jsonb       NOT NULL DEFAULT '[]',  -- where the streams continue after the export
  done          boolean     NOT NULL DEFAULT false,
  PRIMARY KEY (consumer_name, tenant, kind)
);
