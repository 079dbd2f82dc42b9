-- +goose Up
-- activity_texts: the newest version of each child, so that duplicate events change no day. counts: its author has not deleted it and was
-- not erased.
CREATE TABLE activity_texts (
  tenant_id bigint  NOT NULL,
  kind      text    COLLATE "C" NOT NULL,
  child_id  uuid    NOT NULL,
  object_id text    COLLATE "C" NOT NULL,
  author_id text    COLLATE "C" NOT NULL,
  day       date    NOT NULL,
  version   bigint  NOT NULL,
  counts    boolean NOT NULL,
  begins    text    NOT NULL,
  PRIMARY KEY (tenant_id, kind, child_id)
);
CREATE INDEX activity_texts_author_idx ON activity_texts (tenant_id, author_id, day) WHERE counts;

-- activity_days: how many children an author has written on a day.
CREATE TABLE activity_days (
  tenant_id bigint NOT NULL,
  author_id text   COLLATE "C" NOT NULL,
  day       date   NOT NULL,
  written   bigint NOT NULL,
  PRIMARY KEY (tenant_id, author_id, day)
);

SELECT open_read_table('activity_texts'), open_read_table('activity_days');
