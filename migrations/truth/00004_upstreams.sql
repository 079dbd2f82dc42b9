-- +goose Up
-- Upstreams: services with tables of their own, which append their events to the outbox themselves. The table refuses events that nobody declared.

-- upstreams: a versioned object of tenant 0 for each (package kinds/upstreams). Its name is the aggregate type of its events.
CREATE TABLE upstreams (
  tenant_id     bigint NOT NULL,
  object        jsonb  NOT NULL,
  metadata      jsonb  NOT NULL,
  name          text   COLLATE "C" GENERATED ALWAYS AS (object ->> 'name') STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL
                CONSTRAINT upstreams_version_state_check CHECK (version_state IN ('LATEST', 'ARCHIVED', 'DELETED')),
  PRIMARY KEY (tenant_id, name, version_id),
  CONSTRAINT upstreams_created_by_check CHECK (coalesce(metadata ->> 'created_by', '') <> ''),
  CONSTRAINT upstreams_last_update_time_check CHECK (metadata ->> 'last_update_time' IS NOT NULL)
);
CREATE UNIQUE INDEX upstreams_head_idx ON upstreams (tenant_id, name) WHERE version_state IN ('LATEST', 'DELETED');

-- tidings_upstream is the role of logins of upstreams: they append the events that they are declared for, and read nothing.
-- +goose StatementBegin
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'tidings_upstream') THEN
    BEGIN
      CREATE ROLE tidings_upstream NOLOGIN;
    EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
    END;
  END IF;
END $$;
-- +goose StatementEnd
ALTER TABLE upstreams ENABLE ROW LEVEL SECURITY;
CREATE POLICY all_read ON upstreams FOR SELECT TO tidings_api, tidings_relay, tidings_system, tidings_reader USING (true);
CREATE POLICY system ON upstreams TO tidings_system USING (true) WITH CHECK (true);
GRANT SELECT ON upstreams TO tidings_api, tidings_relay, tidings_reader;
GRANT SELECT, INSERT, UPDATE ON upstreams TO tidings_system; -- every version stays

SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- upstream_misfit returns why a value violates a JSON Schema (2020-12), or NULL. at is the JSON Pointer of the value. It knows the keywords that
-- upstreamfile.Read allows. It calls itself, and only upstream_accepts calls it, whose search_path it has.
-- +goose StatementBegin
CREATE FUNCTION upstream_misfit(s jsonb, v jsonb, at text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  t     text := jsonb_typeof(v);
  place text := CASE at WHEN '' THEN 'the payload' ELSE at END;
  bad   text;
  k     text;
  m     jsonb;
  sub   jsonb;
  n     numeric;
  hits  int := 0;
BEGIN
  IF jsonb_typeof(s) = 'boolean' THEN
    RETURN CASE WHEN s = 'false' THEN place || ' is not allowed' END;
  END IF;
  IF s ? 'type' AND NOT (s -> 'type' ? t OR t = 'number' AND s -> 'type' ? 'integer' AND trunc((v #>> '{}')::numeric) = (v #>> '{}')::numeric) THEN
    RETURN format('%s is %s: want %s', place, t, s ->> 'type');
  END IF;
  IF s ? 'const' AND v <> s -> 'const' THEN
    RETURN format('%s is not %s', place, left(s ->> 'const', 80));
  END IF;
  IF s ? 'enum' AND NOT EXISTS (SELECT FROM jsonb_array_elements(s -> 'enum') e WHERE e = v) THEN
    RETURN format('%s is none of %s', place, left(s ->> 'enum', 200));
  END IF;
  IF t = 'object' THEN
    IF s ? 'required' THEN
      SELECT r INTO bad FROM jsonb_array_elements_text(s -> 'required') r WHERE NOT v ? r LIMIT 1;
      IF FOUND THEN
        RETURN format('%s/%s is missing', at, bad);
      END IF;
    END IF;
    IF s ?| ARRAY['properties', 'additionalProperties'] THEN
      FOR k, m IN SELECT * FROM jsonb_each(v) LOOP
        sub := coalesce(s -> 'properties' -> k, s -> 'additionalProperties');
        IF sub IS NOT NULL THEN
          bad := upstream_misfit(sub, m, at || '/' || left(replace(replace(k, '~', '~0'), '/', '~1'), 80));
          IF bad IS NOT NULL THEN
            RETURN bad;
          END IF;
        END IF;
      END LOOP;
    END IF;
    IF s ? 'minProperties' OR s ? 'maxProperties' THEN
      SELECT count(*) INTO hits FROM jsonb_object_keys(v);
      IF hits < (s ->> 'minProperties')::numeric OR hits > (s ->> 'maxProperties')::numeric THEN
        RETURN format('%s has %s members', place, hits);
      END IF;
    END IF;
  ELSIF t = 'array' THEN
    hits := jsonb_array_length(v);
    IF hits < (s ->> 'minItems')::numeric OR hits > (s ->> 'maxItems')::numeric THEN
      RETURN format('%s has %s elements', place, hits);
    END IF;
    IF s ? 'items' THEN
      FOR i IN 0 .. hits - 1 LOOP
        bad := upstream_misfit(s -> 'items', v -> i, at || '/' || i);
        IF bad IS NOT NULL THEN
          RETURN bad;
        END IF;
      END LOOP;
    END IF;
    IF s -> 'uniqueItems' = 'true' AND hits <> (SELECT count(DISTINCT e) FROM jsonb_array_elements(v) e) THEN
      RETURN format('%s has an element twice', place);
    END IF;
  ELSIF t = 'string' THEN
    hits := length(v #>> '{}');
    IF hits < (s ->> 'minLength')::numeric OR hits > (s ->> 'maxLength')::numeric THEN
      RETURN format('%s has %s characters', place, hits);
    END IF;
    IF s ? 'pattern' AND (v #>> '{}') !~ (s ->> 'pattern') THEN
      RETURN format('%s does not match %s', place, s ->> 'pattern');
    END IF;
  ELSIF t = 'number' THEN
    n := (v #>> '{}')::numeric;
    IF n < (s ->> 'minimum')::numeric OR n <= (s ->> 'exclusiveMinimum')::numeric THEN
      RETURN format('%s is too small', place);
    END IF;
    IF n > (s ->> 'maximum')::numeric OR n >= (s ->> 'exclusiveMaximum')::numeric THEN
      RETURN format('%s is too large', place);
    END IF;
    IF mod(n, (s ->> 'multipleOf')::numeric) <> 0 THEN
      RETURN format('%s is not a multiple of %s', place, s ->> 'multipleOf');
    END IF;
  END IF;
  IF s ? 'allOf' THEN
    FOR sub IN SELECT * FROM jsonb_array_elements(s -> 'allOf') LOOP
      bad := upstream_misfit(sub, v, at);
      IF bad IS NOT NULL THEN
        RETURN bad;
      END IF;
    END LOOP;
  END IF;
  IF s ? 'anyOf' AND NOT EXISTS (SELECT FROM jsonb_array_elements(s -> 'anyOf') e WHERE upstream_misfit(e, v, at) IS NULL) THEN
    RETURN format('%s fits none of the alternatives (anyOf)', place);
  END IF;
  IF s ? 'oneOf' THEN
    SELECT count(*) INTO hits FROM jsonb_array_elements(s -> 'oneOf') e WHERE upstream_misfit(e, v, at) IS NULL;
    IF hits <> 1 THEN
      RETURN format('%s fits %s of the alternatives (oneOf): want one', place, hits);
    END IF;
  END IF;
  IF s ? 'not' AND upstream_misfit(s -> 'not', v, at) IS NULL THEN
    RETURN format('%s fits what the schema excludes (not)', place);
  END IF;
  RETURN NULL;
END $$;
-- +goose StatementEnd

-- upstream_of returns the upstream of an aggregate type if the role login may append its events, and NULL if not.
-- +goose StatementBegin
CREATE FUNCTION upstream_of(login name, aggregate_type text) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT u.object FROM upstreams u
   WHERE u.tenant_id = 0 AND u.name = aggregate_type AND u.version_state = 'LATEST' AND NOT u.object ? 'removed'
     AND EXISTS (SELECT FROM jsonb_array_elements_text(u.object -> 'logins') AS l(name) WHERE pg_has_role(login, to_regrole(quote_ident(l.name)), 'USAGE'))
$$;
-- +goose StatementEnd

-- upstream_accepts returns true if the role login may append this event. Otherwise it raises an error with the reason, a check_violation of the
-- constraint outbox_messages_upstream. The table calls it for each row of an upstream's login, before the row is there.
-- +goose StatementBegin
CREATE FUNCTION upstream_accepts(login name, tenant bigint, aggregate_type text, aggregate_id text, event_type text, event_version smallint,
  payload jsonb, payload_bytes integer, trace_id text) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  u      jsonb := upstream_of(login, aggregate_type);
  schema jsonb;
  bad    text;
  help   text := '`tidings upstream show ' || left(aggregate_type, 80) || '` prints the declaration.';
BEGIN
  IF u IS NULL THEN
    bad := format('the role %s may not append events of %s', login, left(quote_ident(aggregate_type), 80));
    help := 'Declare the upstream with its login: `tidings upstream add`.';
  ELSIF tenant IS NULL OR tenant <= 0 OR u ? 'tenants' AND NOT u -> 'tenants' @> to_jsonb(tenant) THEN
    bad := format('%s may not have events of tenant %s', aggregate_type, tenant);
  ELSIF NOT u -> 'events' ? event_type THEN
    bad := format('%s has no event type %s', aggregate_type, left(quote_ident(event_type), 80));
  ELSIF NOT u -> 'events' -> event_type -> 'versions' ? event_version::text THEN
    bad := format('%s.%s has no version %s', aggregate_type, event_type, event_version);
  ELSIF aggregate_id !~ (u ->> 'id_pattern') THEN
    bad := format('%s is not an id of %s: want %s', aggregate_id, aggregate_type, u ->> 'id');
  ELSIF payload_bytes > (u ->> 'max_payload')::int THEN
    bad := format('the payload has %s bytes: %s has a limit of %s', payload_bytes, aggregate_type, u ->> 'max_payload');
  ELSIF jsonb_typeof(payload) <> 'object' THEN
    bad := format('the payload is %s: want an object', jsonb_typeof(payload));
  ELSIF trace_id !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' THEN
    bad := 'the trace_id is not a W3C traceparent';
  ELSE
    schema := u -> 'events' -> event_type -> 'versions' -> event_version::text;
    bad := upstream_misfit(schema, payload, '');
    IF bad IS NULL THEN
      RETURN true;
    END IF;
    bad := format('%s.%s.v%s: %s', aggregate_type, event_type, event_version, bad);
  END IF;
  RAISE check_violation USING MESSAGE = bad, HINT = help, TABLE = 'outbox_messages', CONSTRAINT = 'outbox_messages_upstream';
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION upstream_misfit(jsonb, jsonb, text), upstream_of(name, text),
  upstream_accepts(name, bigint, text, text, text, smallint, jsonb, integer, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION upstream_of(name, text), upstream_accepts(name, bigint, text, text, text, smallint, jsonb, integer, text) TO tidings_upstream;

GRANT INSERT (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, trace_id)
  ON outbox_messages TO tidings_upstream;
GRANT USAGE ON SEQUENCE outbox_messages_id_seq TO tidings_upstream;
GRANT SELECT (id, event_id, slot) ON outbox_messages TO tidings_upstream; -- for RETURNING
-- now() is when the transaction began, and only the table sets inserted_at: so a login sees the rows of its transaction, and their ids alone.
CREATE POLICY upstream_returning ON outbox_messages FOR SELECT TO tidings_upstream
  USING (inserted_at = now() AND upstream_of(current_user, aggregate_type) IS NOT NULL);
CREATE POLICY writer_upstream ON outbox_messages FOR INSERT TO tidings_upstream
  WITH CHECK (upstream_accepts(current_user, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, payload_bytes, trace_id));
CREATE POLICY upstream_times ON outbox_messages AS RESTRICTIVE FOR INSERT TO tidings_upstream WITH CHECK (available_at < inserted_at + interval '366 days');
