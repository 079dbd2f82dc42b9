package cli

// wrongVersionsSQL finds entities without exactly one event per version, in order, up to the
// version of the truth.
const wrongVersionsSQL = `
WITH events AS (
  SELECT coalesce(payload->>'comment_id', 'thread ' || (payload->>'post_id')) AS entity, (payload->>'version')::bigint AS version,
         row_number() OVER (PARTITION BY coalesce(payload->>'comment_id', 'thread ' || (payload->>'post_id')) ORDER BY stream_seq) AS place
    FROM outbox_messages
), truth AS (
  SELECT comment_id::text AS entity, version FROM comments
  UNION ALL SELECT 'thread ' || post_id, (object->>'version')::bigint FROM threads WHERE version_state = 'LATEST'
)
SELECT entity || ' has version ' || version || ' at place ' || place FROM events WHERE version <> place
UNION ALL
SELECT entity || ' ends at ' || coalesce(e.last::text, '-') || ', the truth is ' || coalesce(t.version::text, '-')
  FROM (SELECT entity, max(version) AS last FROM events GROUP BY entity) e FULL JOIN truth t USING (entity)
 WHERE e.last IS DISTINCT FROM t.version`
