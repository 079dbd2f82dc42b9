-- +goose Up
-- What edges say about what they lead to: sums, counts per value, and an order of children by them. All can be rebuilt.

-- edge_aggregates: of the active edges of a kind to an object, how many have an attribute that the kind aggregates, and the sum of its values (value
-- is then empty; only integers); and how many have each value of an enum.
CREATE TABLE edge_aggregates (
  tenant_id bigint NOT NULL,
  kind      text   COLLATE "C" NOT NULL,
  object_id text   COLLATE "C" NOT NULL,
  attribute text   COLLATE "C" NOT NULL,
  value     text   COLLATE "C" NOT NULL,
  count     bigint NOT NULL CHECK (count >= 0),
  sum       bigint NOT NULL,
  PRIMARY KEY (tenant_id, object_id, kind, attribute, value)
) WITH (fillfactor = 70);

-- child_ranks: the children of the kinds that edges rank, and their scores. A child and the edges to it are in different partitions, so each writes its own
-- columns: score counts from the first edge, the others are there from the child's first event (version 0 before it). kind is that of the child.
CREATE TABLE child_ranks (
  tenant_id  bigint  NOT NULL,
  kind       text    COLLATE "C" NOT NULL,
  child_id   uuid    NOT NULL,
  score      bigint  NOT NULL DEFAULT 0,
  version    bigint  NOT NULL DEFAULT 0,
  object_id  text    COLLATE "C",
  created_at timestamptz,
  visible    boolean NOT NULL DEFAULT false,
  PRIMARY KEY (tenant_id, child_id, kind)
) WITH (fillfactor = 70);
CREATE INDEX child_ranks_top_idx ON child_ranks (tenant_id, object_id, kind, score DESC, created_at DESC, child_id DESC) WHERE visible;

SELECT open_read_table(t) FROM unnest(ARRAY['edge_aggregates', 'child_ranks']) t;
