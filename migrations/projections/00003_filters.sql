-- +goose Up
GRANT SELECT ON consumer_filters, consumer_bootstraps TO tidings_reader;
