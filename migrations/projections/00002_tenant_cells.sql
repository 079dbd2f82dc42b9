-- +goose Up
-- tenant_cells: in which truth a tenant is, where several truths (cells) write to these projections: cell is the name of its streams (NATS_STREAM). The row of
-- tenant 0 is for all tenants without one. It is empty where there is one truth. docs/adr/0018-cells.md
CREATE TABLE tenant_cells (
  tenant_id bigint PRIMARY KEY CHECK (tenant_id >= 0),
  cell      text   NOT NULL CHECK (cell <> '')
);

-- +goose StatementBegin
DO $$
DECLARE r text;
BEGIN
  ALTER TABLE tenant_cells ENABLE ROW LEVEL SECURITY;
  CREATE POLICY tenant ON tenant_cells TO tidings_api USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint);
  FOREACH r IN ARRAY ARRAY['system', 'consumer', 'reader'] LOOP
    EXECUTE format('CREATE POLICY %I ON tenant_cells TO %I USING (true) WITH CHECK (true)', r, 'tidings_' || r);
  END LOOP;
END $$;
-- +goose StatementEnd

GRANT SELECT ON tenant_cells TO tidings_consumer, tidings_reader;
GRANT SELECT, INSERT, UPDATE, DELETE ON tenant_cells TO tidings_system;
