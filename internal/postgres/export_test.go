package postgres

import (
	"context"
	"io"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Settle asks what became of a transaction whose COMMIT had no answer.
func Settle(ctx context.Context, pool *pgxpool.Pool, xid, timeline string) error {
	return (&lostCommit{xid: xid, timeline: timeline, err: io.ErrUnexpectedEOF}).settle(ctx, pool)
}
