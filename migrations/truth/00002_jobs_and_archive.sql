-- +goose Up

-- The search_path of the functions, as in 00001.
SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- job_runs: when each scheduled job last started and ended, and what came of it, for the whole fleet (package internal/jobs). Written
-- twice per run. A row whose started_at is the latest of its times is of a run that goes on, or that ended without a word.
CREATE TABLE job_runs (
  job          text        PRIMARY KEY,
  owner        text        NOT NULL,
  started_at   timestamptz NOT NULL,
  succeeded_at timestamptz,
  failed_at    timestamptz,
  last_error   text        NOT NULL DEFAULT '',
  counts       jsonb       NOT NULL DEFAULT '{}'
);
GRANT SELECT, INSERT, UPDATE ON job_runs TO tidings_system;

-- outbox_archive_cursor: how far the archiving of processed outbox messages has come (outbox/archive.go). Written once per slice.
--   front   the messages up to this id were looked at
--   rewalk  from here the next run looks again: what was a moment too young then
--   sweep   a sweep over everything below rewalk has come this far; swept_at is when the last one ended
CREATE TABLE outbox_archive_cursor (
  singleton boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
  front     bigint      NOT NULL DEFAULT 0,
  rewalk    bigint      NOT NULL DEFAULT 0,
  sweep     bigint      NOT NULL DEFAULT 0,
  swept_at  timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0);
INSERT INTO outbox_archive_cursor DEFAULT VALUES;

-- outbox_archive_months: the months of the archive that have a partition. rows is how many were moved there, and
-- last_processed_at when the last of them was published: a month whose rows came late is kept as much longer.
CREATE TABLE outbox_archive_months (
  month             date        PRIMARY KEY CHECK (month = date_trunc('month', month)),
  rows              bigint      NOT NULL DEFAULT 0,
  last_processed_at timestamptz NOT NULL DEFAULT '-infinity'
);

-- outbox_archive_holds: what of the archive is not dropped whatever its age, because somebody says so. Rows stay after the release.
CREATE TABLE outbox_archive_holds (
  hold_id     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id   bigint      CHECK (tenant_id > 0), -- NULL: of every tenant
  from_month  date        CHECK (from_month = date_trunc('month', from_month)), -- NULL: from the beginning
  to_month    date        CHECK (to_month = date_trunc('month', to_month)),     -- and with this one; NULL: without end
  reason      text        NOT NULL CHECK (reason <> ''),
  created_by  text        NOT NULL CHECK (created_by <> ''),
  created_at  timestamptz NOT NULL DEFAULT now(),
  released_by text,
  released_at timestamptz,
  CONSTRAINT outbox_archive_holds_range_check CHECK (from_month <= to_month),
  CONSTRAINT outbox_archive_holds_released_check CHECK ((released_by IS NULL) = (released_at IS NULL))
);
ALTER TABLE outbox_archive_holds ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON outbox_archive_holds TO tidings_api -- which has no right to the table today
  USING (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint)
  WITH CHECK (tenant_id = NULLIF(current_setting('tidings.tenant', true), '')::bigint);
CREATE POLICY system ON outbox_archive_holds TO tidings_system USING (true) WITH CHECK (true);

-- The archive is found by aggregate in the order of ids, and by event. Both are built on an archive that nothing has written yet.
DROP INDEX outbox_messages_archive_tenant_aggregate_idx;
CREATE INDEX outbox_messages_archive_tenant_aggregate_idx ON outbox_messages_archive (tenant_id, aggregate_type, aggregate_id, id);
CREATE INDEX outbox_messages_archive_event_idx ON outbox_messages_archive (event_id);
CREATE INDEX outbox_messages_dlq_occurred_idx ON outbox_messages_dlq (occurred_at, id);

-- Partitions are made and dropped by functions of the owner's, so that the archiver needs no right to the tables themselves.
-- All are called with a lock_timeout: who waits for ACCESS EXCLUSIVE has every later reader wait behind it.

-- outbox_archive_holds_month: whether a hold of every tenant covers the month, and the tenants that have one of their own.
-- +goose StatementBegin
CREATE FUNCTION outbox_archive_holds_month(first date, OUT whole boolean, OUT tenants bigint[])
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
  SELECT coalesce(bool_or(tenant_id IS NULL), false), coalesce(array_agg(DISTINCT tenant_id) FILTER (WHERE tenant_id IS NOT NULL), '{}')
    FROM outbox_archive_holds
   WHERE released_at IS NULL AND coalesce(from_month <= first, true) AND coalesce(to_month >= first, true)
$$;
-- +goose StatementEnd

-- outbox_archive_new_month: a table for the month that is not a partition yet. The check lets it become one without a scan.
-- +goose StatementBegin
CREATE FUNCTION outbox_archive_new_month(first date, name text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  EXECUTE format('CREATE TABLE %I (LIKE outbox_messages_archive INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES,
                                   CONSTRAINT month CHECK (occurred_at >= %L AND occurred_at < %L))',
    name, first::timestamp AT TIME ZONE 'UTC', (first + interval '1 month') AT TIME ZONE 'UTC');
END $$;
-- +goose StatementEnd

-- outbox_archive_attach_month: makes it a partition. It locks the default partition, ACCESS EXCLUSIVE, and reads it: it is small.
-- +goose StatementBegin
CREATE FUNCTION outbox_archive_attach_month(first date, name text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  EXECUTE format('ALTER TABLE outbox_messages_archive ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
    name, first::timestamp AT TIME ZONE 'UTC', (first + interval '1 month') AT TIME ZONE 'UTC');
  EXECUTE format('ALTER TABLE %I DROP CONSTRAINT month', name);
END $$;
-- +goose StatementEnd

-- outbox_archive_make_month makes the month's partition and returns how many rows it took over from the default partition. The
-- move and the attaching are one transaction: between two, the rows would be nowhere. Only the attaching keeps readers waiting.
-- +goose StatementBegin
CREATE FUNCTION outbox_archive_make_month(first date) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  name  text := 'outbox_messages_archive_' || to_char(first, 'YYYYMM');
  moved bigint;
BEGIN
  IF EXISTS (SELECT FROM outbox_archive_months WHERE month = first) THEN
    RETURN 0;
  END IF;
  PERFORM outbox_archive_new_month(first, name);
  EXECUTE format('WITH gone AS (DELETE FROM outbox_messages_archive_default WHERE occurred_at >= $1 AND occurred_at < $2 RETURNING *),
                       here AS (INSERT INTO %I SELECT * FROM gone RETURNING processed_at)
                  INSERT INTO outbox_archive_months (month, rows, last_processed_at) SELECT $3, count(*), coalesce(max(processed_at), ''-infinity'') FROM here', name)
    USING first::timestamp AT TIME ZONE 'UTC', (first + interval '1 month') AT TIME ZONE 'UTC', first;
  SELECT rows INTO moved FROM outbox_archive_months WHERE month = first;
  PERFORM outbox_archive_attach_month(first, name);
  RETURN moved;
END $$;
-- +goose StatementEnd

-- outbox_archive_drop_month drops the month's partition unless a hold covers it: "dropped". Of tenants with a hold of their own the
-- rows stay, in a partition made anew: "shrunk"; or all of it where no others are left: "held". "gone" when there is none.
-- +goose StatementBegin
CREATE FUNCTION outbox_archive_drop_month(first date) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  name    text := 'outbox_messages_archive_' || to_char(first, 'YYYYMM');
  held    record;
  present bigint[];
BEGIN
  IF NOT EXISTS (SELECT FROM outbox_archive_months WHERE month = first) THEN
    RETURN 'gone';
  END IF;
  LOCK TABLE outbox_archive_holds IN SHARE MODE; -- a hold that is added meanwhile waits, and finds the month gone
  SELECT * INTO held FROM outbox_archive_holds_month(first);
  IF held.whole THEN
    RETURN 'held';
  END IF;
  IF held.tenants <> '{}' THEN
    EXECUTE format('LOCK TABLE %I IN SHARE ROW EXCLUSIVE MODE', name);
    EXECUTE format('WITH RECURSIVE t AS ((SELECT min(tenant_id) AS id FROM %1$I)
                      UNION ALL SELECT (SELECT min(tenant_id) FROM %1$I WHERE tenant_id > t.id) FROM t WHERE t.id IS NOT NULL)
                    SELECT coalesce(array_agg(id), ''{}'') FROM t WHERE id IS NOT NULL', name) INTO present;
    IF present <> '{}' AND present <@ held.tenants THEN
      RETURN 'held';
    END IF;
    IF present && held.tenants THEN
      PERFORM outbox_archive_new_month(first, name || '_held');
      EXECUTE format('WITH kept AS (INSERT INTO %I SELECT * FROM %I WHERE tenant_id = ANY($1) RETURNING 1)
                      UPDATE outbox_archive_months SET rows = (SELECT count(*) FROM kept) WHERE month = $2', name || '_held', name) USING held.tenants, first;
      EXECUTE format('DROP TABLE %I', name);
      EXECUTE format('ALTER TABLE %I RENAME TO %I', name || '_held', name);
      PERFORM outbox_archive_attach_month(first, name);
      RETURN 'shrunk';
    END IF;
  END IF;
  DELETE FROM outbox_archive_months WHERE month = first;
  EXECUTE format('DROP TABLE %I', name);
  RETURN 'dropped';
END $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION outbox_archive_holds_month(date), outbox_archive_new_month(date, text), outbox_archive_attach_month(date, text),
  outbox_archive_make_month(date), outbox_archive_drop_month(date) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox_archive_holds_month(date), outbox_archive_make_month(date), outbox_archive_drop_month(date) TO tidings_system;
GRANT SELECT, UPDATE ON outbox_archive_cursor, outbox_archive_months TO tidings_system;
GRANT SELECT, INSERT, UPDATE ON outbox_archive_holds TO tidings_system;
GRANT SELECT, DELETE ON outbox_messages_archive_default TO tidings_system; -- its rows of dropped months are deleted there, and nowhere else
