-- +goose Up
-- stored_at: when the stream stored the message stored_id, to the microsecond. Beside an offset (last_processed_id) of the same number it tells whether the
-- message at the offset is still the one that the consumer applied; beside any other it means nothing, for an older release moves the offset alone.
ALTER TABLE consumer_offsets ADD COLUMN stored_id bigint, ADD COLUMN stored_at timestamptz;
