-- +goose Up
-- PostgreSQL stores thousands of objects and arrays in each other, but parsers end sooner (Go's after 10,000, Python's after 1,000), and a list or an export that
-- comes across such a payload fails as a whole, with the events of others. 500 levels have 1,000 brackets, so a short payload costs nothing.
CREATE POLICY payload_nests_less_than_500_deep ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_writer, tidings_upstream
  WITH CHECK (payload_bytes < 1000 OR NOT payload @? '$.**{500}');
