package threadcache

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// settingsSQL writes the settings that are newer than ours.
// Index: thread_settings_pkey.   Locks: the posts' rows.
const settingsSQL = `
INSERT /* threadcache.settings */ INTO thread_settings AS t (tenant_id, post_id, locked, premoderated, title, version)
SELECT * FROM unnest(@tenants::bigint[], @posts::bigint[], @lockeds::boolean[], @premoderateds::boolean[], @titles::text[], @versions::bigint[])
    ON CONFLICT (tenant_id, post_id) DO UPDATE
       SET locked = excluded.locked, premoderated = excluded.premoderated, title = excluded.title, version = excluded.version
     WHERE excluded.version > t.version`

func writeSettings(ctx context.Context, tx pgx.Tx, last map[thread]event.Thread) error {
	if len(last) == 0 {
		return nil
	}
	var tenants, posts, versions []int64
	var lockeds, premoderateds []bool
	var titles []string
	for k, t := range last {
		tenants, posts, versions = append(tenants, k.tenant), append(posts, k.post), append(versions, t.Version)
		lockeds, premoderateds, titles = append(lockeds, t.Locked), append(premoderateds, t.Premoderate), append(titles, t.Title)
	}
	if _, err := tx.Exec(ctx, settingsSQL, pgx.StrictNamedArgs{
		"tenants": tenants, "posts": posts, "lockeds": lockeds, "premoderateds": premoderateds, "titles": titles, "versions": versions,
	}); err != nil {
		return fmt.Errorf("write the settings of %d threads: %w", len(last), err)
	}
	return nil
}

// Settings are what is set for a thread; the zero value while nothing is.
type Settings struct {
	Locked       bool
	Premoderated bool
	Title        string
	Version      int64
}

// readSettingsSQL reads one thread's settings.
// Index: thread_settings_pkey.   Locks: none.
const readSettingsSQL = `
SELECT /* threadcache.read_settings */ locked, premoderated, title, version FROM thread_settings
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND post_id = @post`

// ReadSettings returns the settings of a post's thread. The transaction's tenant is set.
func ReadSettings(ctx context.Context, tx pgx.Tx, post int64) (Settings, error) {
	rows, _ := tx.Query(ctx, readSettingsSQL, pgx.StrictNamedArgs{"post": post})
	s, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Settings])
	if err != nil {
		return Settings{}, fmt.Errorf("read the settings of the thread of post %d: %w", post, err)
	}
	if len(s) == 0 {
		return Settings{}, nil
	}
	return s[0], nil
}
