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

ALTER TABLE upstreams ENABLE ROW LEVEL SECURITY;
CREATE POLICY reader ON upstreams FOR SELECT TO tidings_relay, tidings_reader USING (true);
CREATE POLICY system ON upstreams TO tidings_system USING (true) WITH CHECK (true);
GRANT SELECT ON upstreams TO tidings_relay, tidings_reader;
GRANT SELECT, INSERT, UPDATE ON upstreams TO tidings_system; -- every version stays

SELECT set_config('search_path', format('%I, pg_temp', current_schema()), true);

-- upstream_misfit returns why a value violates a JSON Schema (2020-12), or NULL. at is the JSON Pointer of the value. The schema is as upstreams.Compile
-- makes it: of its keywords, required is there as a text array (=required), and the names of properties are in =names. It calls itself, and only
-- upstream_accepts calls it. Expressions without a SELECT cost a tenth, and one guard stands before each group of keywords.
-- +goose StatementBegin
CREATE FUNCTION upstream_misfit(s jsonb, v jsonb, at text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT AS $$
DECLARE
  t    text := jsonb_typeof(v);
  bad  text;
  k    text;
  m    jsonb;
  more jsonb;
  n    numeric;
  hits int;
BEGIN
  IF s ? 'type' AND NOT (s -> 'type' ? t OR t = 'number' AND s -> 'type' ? 'integer' AND trunc((v #>> '{}')::numeric) = (v #>> '{}')::numeric) THEN
    RETURN format('%s is %s: want %s', coalesce(nullif(at, ''), 'the payload'), t, s ->> 'type');
  END IF;
  IF t = 'object' THEN
    IF NOT v ?& (s ->> '=required')::text[] THEN
      RETURN format('%s/%s is missing', at, (SELECT r FROM unnest((s ->> '=required')::text[]) r WHERE NOT v ? r LIMIT 1));
    END IF;
    IF s ? '=names' THEN
      more := s -> 'properties';
      FOREACH k IN ARRAY (s ->> '=names')::text[] LOOP
        m := v -> k;
        IF m IS NOT NULL THEN
          bad := upstream_misfit(more -> k, m, at || '/' || replace(replace(k, '~', '~0'), '/', '~1'));
          IF bad IS NOT NULL THEN
            RETURN bad;
          END IF;
        END IF;
      END LOOP;
    END IF;
    IF s ? 'additionalProperties' THEN
      more := v - coalesce((s ->> '=names')::text[], '{}');
      IF more <> '{}' THEN
        FOR k, m IN SELECT * FROM jsonb_each(more) LOOP
          bad := upstream_misfit(s -> 'additionalProperties', m, at || '/' || left(replace(replace(k, '~', '~0'), '/', '~1'), 80));
          IF bad IS NOT NULL THEN
            RETURN bad;
          END IF;
        END LOOP;
      END IF;
    END IF;
    IF s ?| '{minProperties,maxProperties}' THEN
      SELECT count(*) INTO hits FROM jsonb_object_keys(v);
      IF hits < (s ->> 'minProperties')::numeric OR hits > (s ->> 'maxProperties')::numeric THEN
        RETURN format('%s has %s members', coalesce(nullif(at, ''), 'the payload'), hits);
      END IF;
    END IF;
  ELSIF t = 'string' THEN
    IF s ?| '{minLength,maxLength}' AND (length(v #>> '{}') < (s ->> 'minLength')::numeric OR length(v #>> '{}') > (s ->> 'maxLength')::numeric) THEN
      RETURN format('%s has %s characters', at, length(v #>> '{}'));
    END IF;
    IF s ? 'pattern' AND (v #>> '{}') !~ (s ->> 'pattern') THEN
      RETURN format('%s does not match %s', at, s ->> 'pattern');
    END IF;
  ELSIF t = 'number' THEN
    IF s ?| '{minimum,exclusiveMinimum,maximum,exclusiveMaximum,multipleOf}' THEN
      n := (v #>> '{}')::numeric;
      IF n < (s ->> 'minimum')::numeric OR n <= (s ->> 'exclusiveMinimum')::numeric THEN
        RETURN format('%s is too small', at);
      END IF;
      IF n > (s ->> 'maximum')::numeric OR n >= (s ->> 'exclusiveMaximum')::numeric THEN
        RETURN format('%s is too large', at);
      END IF;
      IF mod(n, (s ->> 'multipleOf')::numeric) <> 0 THEN
        RETURN format('%s is not a multiple of %s', at, s ->> 'multipleOf');
      END IF;
    END IF;
  ELSIF t = 'array' AND s ?| '{items,minItems,maxItems,uniqueItems}' THEN
    hits := jsonb_array_length(v);
    IF hits < (s ->> 'minItems')::numeric OR hits > (s ->> 'maxItems')::numeric THEN
      RETURN format('%s has %s elements', at, hits);
    END IF;
    IF s ? 'items' THEN
      more := s -> 'items';
      FOR i IN 0 .. hits - 1 LOOP
        bad := upstream_misfit(more, v -> i, at || '/' || i);
        IF bad IS NOT NULL THEN
          RETURN bad;
        END IF;
      END LOOP;
    END IF;
    IF s -> 'uniqueItems' = 'true' AND hits <> (SELECT count(DISTINCT e) FROM jsonb_array_elements(v) e) THEN
      RETURN format('%s has an element twice', at);
    END IF;
  END IF;
  IF NOT s ?| '{const,enum,allOf,anyOf,oneOf,not}' THEN
    RETURN NULL;
  END IF;
  IF s -> 'not' = '{}' THEN
    RETURN coalesce(nullif(at, ''), 'the payload') || ' is not allowed';
  END IF;
  IF v <> s -> 'const' THEN
    RETURN format('%s is not %s', coalesce(nullif(at, ''), 'the payload'), left(s ->> 'const', 80));
  END IF;
  IF s ? 'enum' AND NOT EXISTS (SELECT FROM jsonb_array_elements(s -> 'enum') e WHERE e = v) THEN
    RETURN format('%s is none of %s', coalesce(nullif(at, ''), 'the payload'), left(s ->> 'enum', 200));
  END IF;
  FOR m IN SELECT * FROM jsonb_array_elements(s -> 'allOf') LOOP
    bad := upstream_misfit(m, v, at);
    IF bad IS NOT NULL THEN
      RETURN bad;
    END IF;
  END LOOP;
  IF s ? 'anyOf' AND NOT EXISTS (SELECT FROM jsonb_array_elements(s -> 'anyOf') e WHERE upstream_misfit(e, v, at) IS NULL) THEN
    RETURN format('%s fits none of the alternatives (anyOf)', coalesce(nullif(at, ''), 'the payload'));
  END IF;
  IF s ? 'oneOf' THEN
    SELECT count(*) INTO hits FROM jsonb_array_elements(s -> 'oneOf') e WHERE upstream_misfit(e, v, at) IS NULL;
    IF hits <> 1 THEN
      RETURN format('%s fits %s of the alternatives (oneOf): want one', coalesce(nullif(at, ''), 'the payload'), hits);
    END IF;
  END IF;
  IF s ? 'not' AND upstream_misfit(s -> 'not', v, at) IS NULL THEN
    RETURN format('%s fits what the schema excludes (not)', coalesce(nullif(at, ''), 'the payload'));
  END IF;
  RETURN NULL;
END $$;
-- +goose StatementEnd

-- upstream_of returns the upstream of an aggregate type if the login of this session may append its events, and NULL if not. It goes by the login and
-- not by the role that the session has set, because it runs as the owner of the tables.
-- +goose StatementBegin
CREATE FUNCTION upstream_of(aggregate_type text) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
  SELECT u.object FROM upstreams u
   WHERE u.tenant_id = 0 AND u.name = aggregate_type AND u.version_state = 'LATEST' AND NOT u.object ? 'removed'
     AND EXISTS (SELECT FROM jsonb_array_elements_text(u.object -> 'logins') AS l(name) WHERE pg_has_role(session_user, to_regrole(quote_ident(l.name)), 'USAGE'))
$$;
-- +goose StatementEnd

-- upstream_accepts returns true if the login of this session may append this event. Otherwise it raises an error with the reason, a check_violation of the
-- constraint outbox_messages_upstream. The table calls it for each row of an upstream's login, before the row is there.
-- +goose StatementBegin
CREATE FUNCTION upstream_accepts(tenant bigint, aggregate_type text, aggregate_id text, event_type text, event_version smallint,
  payload jsonb, payload_bytes integer, trace_id text) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  u    jsonb := upstream_of(aggregate_type) || '{}'; -- decompressed once, and not at each use
  e    jsonb := u -> 'events' -> event_type;
  bad  text;
  help text;
BEGIN
  IF u IS NULL THEN
    bad := format('the login %s may not append events of %s', session_user, left(quote_ident(aggregate_type), 80));
    help := 'Declare the upstream with its login: `tidings upstream add`.';
  ELSIF tenant IS NULL OR tenant <= 0 OR u ? 'tenants' AND NOT u -> 'tenants' @> to_jsonb(tenant) THEN
    bad := format('%s may not have events of tenant %s', aggregate_type, tenant);
  ELSIF e IS NULL THEN
    bad := format('%s has no event type %s', aggregate_type, left(quote_ident(event_type), 80));
  ELSIF NOT e -> 'checks' ? event_version::text THEN
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
    bad := upstream_misfit(e -> 'checks' -> event_version::text, payload, '');
    IF bad IS NULL THEN
      RETURN true;
    END IF;
    bad := format('%s.%s.v%s: %s', aggregate_type, event_type, event_version, bad);
  END IF;
  RAISE check_violation USING MESSAGE = bad, HINT = coalesce(help, '`tidings upstream show ' || left(aggregate_type, 80) || '` prints the declaration.'), TABLE = 'outbox_messages', CONSTRAINT = 'outbox_messages_upstream';
END $$;
-- +goose StatementEnd
-- contract: the functions are new
REVOKE ALL ON FUNCTION upstream_misfit(jsonb, jsonb, text), upstream_of(text),
  upstream_accepts(bigint, text, text, text, smallint, jsonb, integer, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION upstream_of(text), upstream_accepts(bigint, text, text, text, smallint, jsonb, integer, text)
  TO tidings_upstream, tidings_writer;

-- Who has the role tidings_upstream appends the events of upstreams that name its login, and reads nothing. tidings_writer, which writes kinds, does so too.
GRANT INSERT (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, trace_id)
  ON outbox_messages TO tidings_upstream;
GRANT USAGE ON SEQUENCE outbox_messages_id_seq TO tidings_upstream;
GRANT SELECT (id, event_id, slot) ON outbox_messages TO tidings_upstream; -- for RETURNING
-- contract: writer_appends takes its place, and no release is out whose writers append undeclared events
DROP POLICY writer ON outbox_messages;
CREATE POLICY writer ON outbox_messages FOR SELECT TO tidings_writer USING (true);
CREATE POLICY writer_appends ON outbox_messages FOR INSERT TO tidings_writer
  WITH CHECK (upstream_accepts(tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, payload_bytes, trace_id));
-- A login with both roles has what tidings_writer may, which includes this.
CREATE POLICY upstream_appends ON outbox_messages FOR INSERT TO tidings_upstream
  WITH CHECK (NOT pg_has_role('tidings_writer', 'USAGE') AND upstream_accepts(tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, payload_bytes, trace_id));
-- now() is when the transaction began, and only the table sets inserted_at: so a login sees the rows of its transaction, and their ids alone.
CREATE POLICY upstream_returning ON outbox_messages FOR SELECT TO tidings_upstream
  USING (inserted_at = now() AND upstream_of(aggregate_type) IS NOT NULL);
ALTER POLICY available_at_within_366_days ON outbox_messages TO tidings_writer, tidings_upstream;
