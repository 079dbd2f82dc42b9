-- +goose Up
-- token: the name and the fingerprint of the API token with which somebody acted; empty for commands and the console. The actor is the caller's own word.
ALTER TABLE outbox_dlq_actions ADD COLUMN token text NOT NULL DEFAULT '';
