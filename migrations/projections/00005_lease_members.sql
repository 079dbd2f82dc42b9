-- +goose Up
-- The members by kind, as the leases (00004_lease_rows.sql). An expired member is deleted by the others of its kind.
-- +goose StatementBegin
DO $$
DECLARE r record;
BEGIN
  ALTER TABLE lease_members ENABLE ROW LEVEL SECURITY;
  FOR r IN SELECT name, rows, 'tidings_' || name AS role
             FROM (VALUES ('relay', $q$kind = 'relay'$q$), ('consumer', $q$NOT (kind IN ('relay', 'jobs') OR starts_with(kind, 'jobs-'))$q$),
                          ('system', 'true'), ('reader', 'true')) AS of(name, rows)
             JOIN pg_roles ON rolname = 'tidings_' || name
  LOOP
    IF NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = 'lease_members'::regclass AND polname = r.name) THEN
      EXECUTE format('CREATE POLICY %I ON lease_members TO %I USING (%s) WITH CHECK (%s)', r.name, r.role, r.rows, r.rows);
    END IF;
  END LOOP;
END $$;
-- +goose StatementEnd
