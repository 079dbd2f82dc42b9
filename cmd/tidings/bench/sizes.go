package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

func sizesCommand() *cobra.Command {
	var rows int
	var ids string
	cmd := &cobra.Command{
		Use: "sizes", Args: cobra.NoArgs,
		Short: "Measure the bytes per row of each large table",
		Long: `Sizes fills each large table with --rows rows of typical contents in the usual order: random ids,
follows between them, comments of 120 characters. It prints the bytes per row of the table, of its
indexes and of the write-ahead log, with ids of the form of --ids. It marks the outbox's rows as published, and then archives them.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rows < 1000 {
				return errors.New("want --rows of 1000 or more")
			}
			form, err := formOf(ids)
			if err != nil {
				return err
			}
			return onServers(cmd, "", syncDefault, func(ctx context.Context, s *servers) error { return runSizes(ctx, s, rows, form) })
		},
	}
	cmd.Flags().IntVar(&rows, "rows", 1_000_000, "rows of each table")
	idsFlag(cmd, &ids)
	return cmd
}

// sizesResult is the output line of a table.
type sizesResult struct {
	Case       string  `json:"case"`
	Rows       int     `json:"rows"`
	IDs        idForm  `json:"ids"`
	TableBytes float64 `json:"table_bytes_per_row"`
	IndexBytes float64 `json:"index_bytes_per_row"`
	WALBytes   float64 `json:"wal_bytes_per_row"`
	Seconds    float64 `json:"seconds"`
}

const (
	followJSON = `jsonb_build_object('follower_id', a::text, 'followee_id', b::text, 'status', 'ACTIVE', 'version', 1, 'created_at', ` +
		`now(), 'positioned_at', now(), 'updated_at', now(), 'actor', 'user:' || a)`
	commentJSON = `jsonb_build_object('comment_id', id, 'post_id', b::text, 'parent_comment_id', NULL, 'slug', slug, 'path', path,
       'author_id', a::text, 'body', body, 'author_state', 'ACTIVE', 'moderation_state', 'NONE', 'version', 1,
       'created_at', now(), 'updated_at', now(), 'actor', 'user:' || a)`
	metadataJSON = `jsonb_build_object('version_id', nextval('history_version_id'), 'version_state', 'LATEST', 'created_by', 'user:' || ` +
		`a, 'last_update_time', now())`
	// a and b are numbers: ids makes ids of them
	pairs = ` FROM (SELECT n, {a} AS a, {b} AS b FROM (SELECT n, 1 + (random() * 1e8)::bigint AS a, ` +
		`200000000 + (random() * 1e6)::bigint AS b FROM generate_series(1, @rows::int) n) numbers) p`
	comments = ` FROM (SELECT n, {a} AS a, {b} AS b, id, slug, path, body FROM (
SELECT n, 1 + (random() * 1e8)::bigint AS a, 1 + (random() * @rows / 20)::bigint AS b,
       gen_random_uuid() AS id, to_hex(x'0fffffff'::int + n) AS slug,
       lpad(to_hex(1700000000000000 + n), 14, '0') || to_hex(x'0fffffff'::int + n) AS path,
       repeat('a comment of 24 letters ', 5) AS body
  FROM generate_series(1, @rows::int) n) numbers) c`
)

// sizesCases fill one table each. The last three work on the same table, one after the other.
var sizesCases = []struct{ name, table, sql string }{
	{"edges", "edges_follow", `INSERT INTO edges_follow (tenant_id, from_id, to_id) SELECT 1, a, b` + pairs + ` ON CONFLICT DO NOTHING`},
	{"edge_lists", "edge_lists", `INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at)
		SELECT 1, 'follow', a, b, true, 1, now() + n * interval '1 ms'` + pairs + ` ON CONFLICT DO NOTHING`},
	{"edge_counts", "edge_counts", `INSERT INTO edge_counts (tenant_id, kind, object_id, outgoing) SELECT 1, 'follow', a, 1` + pairs +
		` ON CONFLICT DO NOTHING`},
	{"follow_history", "follow_history", `INSERT INTO follow_history (tenant_id, object, metadata) SELECT 1, ` + followJSON + `, ` +
		metadataJSON + pairs + ` ON CONFLICT DO NOTHING`},
	{"children", "children_comment", `INSERT INTO children_comment (tenant_id, child_id, object_id, slug, path, author_id, body)
		SELECT 1, id, b, slug, path, a, body` + comments},
	{"child_keys", "child_keys", `INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id)
		SELECT 1, 'comment', a, id::text, sha256(id::text::bytea), id` + comments},
	{"child_lists", "child_lists", `INSERT INTO child_lists (tenant_id, kind, child_id, object_id, slug, path, author_id, body,
		author_state, moderation_state, version, created_at, updated_at, visible, shown)
		SELECT 1, 'comment', id, b, slug, path, a, body, 'ACTIVE', 'NONE', 1, now() + n * interval '1 ms', now(), true, true` + comments},
	{"comment_history", "comment_history", `INSERT INTO comment_history (tenant_id, object, metadata) SELECT 1, ` + commentJSON + `, ` +
		metadataJSON + comments},
	{"outbox, follows, written", "outbox_messages_1",
		`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) SELECT 1, 'follow', b, 'created', ` +
			followJSON + pairs},
	{"outbox, follows, published", "outbox_messages_1", `UPDATE outbox_messages SET processed_at = now(), partition = 0, stream_seq = id`},
	{"outbox, follows, archived", "outbox_messages_1",
		`UPDATE outbox_partitions SET floor_id = 50000000; SELECT outbox_range_archive(1, 0); SELECT outbox_range_index(1)`},
}

func runSizes(ctx context.Context, s *servers, rows int, form idForm) error {
	ids := strings.NewReplacer("{a}", form.sql("a"), "{b}", form.sql("b"))
	if err := s.exec(ctx, `SET synchronous_commit = off;
		SELECT make_history('follow', '{follower_id,followee_id}', 'text', false),
		       make_history('comment', '{comment_id}', 'uuid', true)`); err != nil {
		return err
	}
	for _, c := range sizesCases {
		s.say("%s", c.name)
		var lsn string
		if err := s.owner.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn()::text`).Scan(&lsn); err != nil {
			return err
		}
		start := time.Now()
		if _, err := s.owner.Exec(ctx, ids.Replace(c.sql), pgx.QueryExecModeSimpleProtocol, pgx.NamedArgs{"rows": rows}); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		r := sizesResult{Case: c.name, Rows: rows, IDs: form, Seconds: round(time.Since(start).Seconds(), 1)}
		if err := s.owner.QueryRow(ctx, `SELECT pg_table_size($1::regclass)::float8 / $3, pg_indexes_size($1::regclass)::float8 / $3,
			pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $2::pg_lsn)::float8 / $3`,
			c.table, lsn, float64(rows)).Scan(&r.TableBytes, &r.IndexBytes, &r.WALBytes); err != nil {
			return err
		}
		r.TableBytes, r.IndexBytes, r.WALBytes = round(r.TableBytes, 0), round(r.IndexBytes, 0), round(r.WALBytes, 0)
		if err := writeLine(s.out, r); err != nil {
			return err
		}
	}
	return nil
}
