-- +goose Up
GRANT SELECT ON consumer_filters TO tidings_reader;
