-- +goose Up
-- An erasure blanks the errors of failed retries, which may quote what was erased. Everything else of the audit stays as it was written.
GRANT UPDATE (error) ON consumer_dead_letter_actions TO tidings_system;
