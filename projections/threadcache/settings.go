package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// settingsSQL writes the settings that are newer than the projection's.
// Index: child_settings_pkey. Locks: the objects' rows.
const settingsSQL = `
INSERT /* threadcache.settings */ INTO child_settings AS t (tenant_id, kind, object_id, locked, premoderated, title, version)
SELECT * FROM unnest(@tenants::bigint[], @kinds::text[], @objects::text[], @lockeds::boolean[], @premoderateds::boolean[],
	@titles::text[], @versions::bigint[])
    ON CONFLICT (tenant_id, kind, object_id) DO UPDATE
       SET locked = excluded.locked, premoderated = excluded.premoderated, title = excluded.title, version = excluded.version
     WHERE excluded.version > t.version`

func writeSettings(ctx context.Context, tx pgx.Tx, last map[object]event.Thread) error {
	if len(last) == 0 {
		return nil
	}
	var objects columns
	var versions []int64
	var lockeds, premoderateds []bool
	var titles []string
	for o, t := range last {
		objects.add(o)
		versions, titles = append(versions, t.Version), append(titles, t.Title)
		lockeds, premoderateds = append(lockeds, t.Locked), append(premoderateds, t.Premoderate)
	}
	if err := postgres.Later(ctx, tx, settingsSQL, objects.args(pgx.StrictNamedArgs{
		"lockeds": lockeds, "premoderateds": premoderateds, "titles": titles, "versions": versions,
	})); err != nil {
		return fmt.Errorf("write the settings of %d threads: %w", len(last), err)
	}
	return nil
}

// Settings are the settings of a thread. The zero value means that the thread has none.
type Settings struct {
	Locked       bool
	Premoderated bool
	Title        string
	Version      int64
}

// readSettingsSQL reads one thread's settings. Index: child_settings_pkey. Locks: none.
const readSettingsSQL = `
SELECT /* threadcache.read_settings */ locked, premoderated, title, version FROM child_settings
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind AND object_id = @object`

// ReadSettings returns the settings of the object's thread of the kind. The transaction's tenant is
// set.
func ReadSettings(ctx context.Context, tx pgx.Tx, kind string, object event.ID) (Settings, error) {
	rows, _ := tx.Query(ctx, readSettingsSQL, pgx.StrictNamedArgs{"kind": kind, "object": object})
	s, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Settings])
	if err != nil {
		return Settings{}, fmt.Errorf("read the settings of the thread of %s under %s: %w", kind, object, err)
	}
	if len(s) == 0 {
		return Settings{}, nil
	}
	return s[0], nil
}
