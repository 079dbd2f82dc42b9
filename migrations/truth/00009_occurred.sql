-- +goose Up
-- A time that no header can carry is refused where it is written: infinity is none to the relay, whose claims would fail.
ALTER TABLE outbox_messages ADD CONSTRAINT outbox_messages_occurred_at_check
  CHECK (occurred_at >= '0001-01-01 00:00:00Z' AND occurred_at < '10000-01-01 00:00:00Z') NOT VALID;
