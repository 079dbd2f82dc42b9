package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

func find(ctx context.Context, pool *pgxpool.Pool, words string) error {
	rows, _ := pool.Query(ctx, `SELECT post_id, body FROM documents WHERE words @@ plainto_tsquery('simple', $1) ORDER BY comment_id DESC
		LIMIT 20`, words)
	var post event.ID
	var body string
	_, err := pgx.ForEachRow(rows, []any{&post, &body}, func() error {
		_, err := fmt.Printf("post %s: %s\n", post, body)
		return err
	})
	return err
}
