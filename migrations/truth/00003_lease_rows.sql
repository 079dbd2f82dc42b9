-- +goose Up
-- Each role changes only the leases of its kinds, because the truth and the projections may share a database and then share these tables: the relay its own, the
-- consumers all but those of the relay and of the jobs. Nobody deletes a row, changes its key or locks the table. The same for the roles of the projections, which
-- may exist already or come later (projections/00004_lease_rows.sql).
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
