-- +goose Up
-- The leases by kind for the roles of the projections, and for those of the truth if it shares the database and comes later: see truth/00003_lease_rows.sql, which
-- does the same.
-- +goose StatementBegin
DO $$
DECLARE r record;
BEGIN
  ALTER TABLE leases ENABLE ROW LEVEL SECURITY;
  FOR r IN SELECT name, rows, 'tidings_' || name AS role
             FROM (VALUES ('relay', $q$kind = 'relay'$q$), ('consumer', $q$NOT (kind IN ('relay', 'jobs') OR starts_with(kind, 'jobs-'))$q$),
                          ('system', 'true'), ('reader', 'true')) AS of(name, rows)
             JOIN pg_roles ON rolname = 'tidings_' || name
  LOOP
    IF NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = 'leases'::regclass AND polname = r.name) THEN
      EXECUTE format('CREATE POLICY %I ON leases TO %I USING (%s) WITH CHECK (%s)', r.name, r.role, r.rows, r.rows);
    END IF;
    IF r.name <> 'reader' THEN
-- contract: no release has deleted a lease or changed its key
      EXECUTE format('REVOKE UPDATE, DELETE ON leases FROM %I', r.role);
      EXECUTE format('GRANT UPDATE (owner, epoch, expires_at, refused_by, refused_until) ON leases TO %I', r.role);
    END IF;
  END LOOP;
END $$;
-- +goose StatementEnd
