// Upstream is a service with a table of its own. It publishes the changes of this table through
// Tidings' outbox. It needs pgx, and no package of Tidings:
//
//	DATABASE_URL=postgres://bookmarks_service@HOST/DB go run . USER POST NOTE
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/jackc/pgx/v5"
)

const tenant = 1

// bookmark is a user's note on a post. It is also the payload of the events: the whole state. Ids
// are text, as in the events of Tidings.
type bookmark struct {
	UserID  string `json:"user_id"`
	PostID  string `json:"post_id"`
	Note    string `json:"note"`
	Version int64  `json:"version"`
}

// saveSQL changes a row only if the note differs, and then raises the version. A second save of the
// same bookmark waits for the row's lock until this transaction ends.
const saveSQL = `
INSERT INTO bookmarks (tenant_id, user_id, post_id, note) VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant_id, user_id, post_id) DO UPDATE SET note = excluded.note, version = bookmarks.version + 1
 WHERE bookmarks.note <> excluded.note
RETURNING version`

// tellSQL appends the event. Events of one aggregate, here the post, stay in order.
const tellSQL = `
INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, 'bookmark', $2, $3, $4)`

// save writes a user's note on a post and its event in the caller's transaction. It returns the
// bookmark's version, or 0 if the note is unchanged. It writes the state first, so the row's lock
// puts the events of one bookmark in the order of the commits.
func save(ctx context.Context, tx pgx.Tx, b bookmark) (version int64, err error) {
	err = tx.QueryRow(ctx, saveSQL, tenant, b.UserID, b.PostID, b.Note).Scan(&b.Version)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil // no change, so no event
	}
	if err != nil {
		return 0, fmt.Errorf("save the bookmark of user %s on post %s: %w", b.UserID, b.PostID, err)
	}
	payload, err := json.Marshal(b)
	if err != nil {
		return 0, fmt.Errorf("encode the bookmark of user %s on post %s: %w", b.UserID, b.PostID, err)
	}
	what := "updated"
	if b.Version == 1 {
		what = "created"
	}
	if _, err := tx.Exec(ctx, tellSQL, tenant, b.PostID, what, payload); err != nil {
		return 0, fmt.Errorf("append the event of the bookmark of user %s on post %s: %w", b.UserID, b.PostID, err)
	}
	return b.Version, nil
}

func run(ctx context.Context, url string, args []string, stdout io.Writer) error {
	if len(args) != 3 {
		return errors.New("want USER POST NOTE")
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var version int64
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) (err error) {
		version, err = save(ctx, tx, bookmark{UserID: args[0], PostID: args[1], Note: args[2]})
		return err
	})
	if err == nil {
		_, err = fmt.Fprintf(stdout, "version %d\n", version)
	}
	return err
}

func main() {
	if err := run(context.Background(), os.Getenv("DATABASE_URL"), os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
