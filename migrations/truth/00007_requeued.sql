-- +goose Up
-- A process of the API whose COMMIT had no answer asks whether its events exist (outbox.Appended): also those that a repair gave another id meanwhile.
GRANT SELECT (event_id) ON outbox_requeued TO tidings_api;
