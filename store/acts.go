package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// actsWindow is the number of rows that one statement reads in search of an actor's acts.
const actsWindow = 20_000

// threadActsSQL replaces an actor in the tenant's next versions of settings of threads. It returns
// how many versions name the actor, and the last version that it read. Index: threads_pkey, one
// range. Locks: the actor's versions.
const threadActsSQL = `
WITH next AS MATERIALIZED (
  SELECT post_id, kind, version_id, @actor::text IN (metadata ->> 'created_by', object ->> 'actor') AS mine FROM threads
   WHERE tenant_id = @tenant::bigint AND (post_id, kind, version_id) > (@a::text, @b::text COLLATE "C", @c::bigint)
   ORDER BY post_id, kind, version_id LIMIT @window
), changed AS (
  UPDATE threads t
     SET metadata = t.metadata || jsonb_build_object('created_by', @erased::text),
         object = t.object || jsonb_build_object('actor', @erased::text)
    FROM next n
   WHERE NOT @dry_run AND n.mine AND t.tenant_id = @tenant::bigint AND t.post_id = n.post_id AND t.kind = n.kind
     AND t.version_id = n.version_id
)
SELECT /* store.thread_acts */ (SELECT count(*) FROM next WHERE mine), post_id, kind, version_id FROM next
 ORDER BY post_id DESC, kind DESC, version_id DESC LIMIT 1`

// removalActsSQL does the same for requests to remove edges.
// Index: edge_removals_pkey, one range. Locks: the actor's requests.
const removalActsSQL = `
WITH next AS MATERIALIZED (
  SELECT removal_id, actor = @actor::text AS mine FROM edge_removals
   WHERE tenant_id = @tenant::bigint AND removal_id > @b::uuid AND @a::text = '' AND @c::bigint = 0 ORDER BY removal_id LIMIT @window
), changed AS (
  UPDATE edge_removals r SET actor = @erased FROM next n
   WHERE NOT @dry_run AND n.mine AND r.tenant_id = @tenant::bigint AND r.removal_id = n.removal_id
)
SELECT /* store.removal_acts */ (SELECT count(*) FROM next WHERE mine), '', removal_id::text, 0::bigint FROM next
 ORDER BY removal_id DESC LIMIT 1`

// RedactActor replaces an actor by event.ErasedActor in the truth's records of actors: the versions
// of settings of threads, and requests to remove edges. It returns how many records it changed or,
// with dryRun, how many it would change. Each page is one transaction, which calls fence first.
func (s *Store) RedactActor(ctx context.Context, tenant int64, actor string, dryRun bool,
	fence func(context.Context, pgx.Tx) error) (n int64, err error) {
	for sql, first := range map[string]string{threadActsSQL: "", removalActsSQL: noChild} {
		args := pgx.StrictNamedArgs{"tenant": tenant, "actor": actor, "erased": event.ErasedActor, "dry_run": dryRun, "window": actsWindow,
			"a": "", "b": first, "c": int64(0)}
		for more := true; more; {
			var some, c int64
			var a, b string
			if err = s.write(ctx, of(tenant), func(tx *unit) error {
				if !dryRun {
					if err := fence(ctx, tx.Tx); err != nil {
						return err
					}
				}
				err := tx.QueryRow(ctx, sql, args).Scan(&some, &a, &b, &c)
				if more = !errors.Is(err, pgx.ErrNoRows); !more {
					some, err = 0, nil
				}
				return err
			}); err != nil {
				return n, fmt.Errorf("redact actor %s of tenant %d: %w", actor, tenant, err)
			}
			n += some
			args["a"], args["b"], args["c"] = a, b, c
		}
	}
	return n, nil
}
