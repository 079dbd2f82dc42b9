package coldstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// Config is where ranges of the archive go.
type Config struct {
	URL string // the place, without secrets: file:///DIR or s3://BUCKET?region=R&endpoint=E; none when empty
}

// Validate reports a place that is none.
func (c Config) Validate() error {
	if c.URL == "" {
		return nil
	}
	if _, err := parseURL(c.URL); err != nil {
		return fmt.Errorf("outbox_archive_export_url: %w", err)
	}
	return nil
}

// Fence begins every transaction that changes something: it fails when the caller no longer has the right to (internal/jobs).
type Fence func(ctx context.Context, tx pgx.Tx) error

// Progress is how far a piece of work is.
type Progress struct {
	Step  string
	Done  int64 // rows
	Total int64 // rows; 0 when that is not known
}

// Store exports, restores and redacts. Its methods are for one caller at a time; Close ends it.
type Store struct {
	pool     *pgxpool.Pool
	url      string
	fence    Fence
	metrics  *Metrics
	progress func(Progress)
	buckets  map[string]*bucket // by URL

	filesRead    int   // segments and index files that Redact and Look have read
	segmentRows  int64 // tests make small segments
	segmentBytes int64
}

// A segment ends after so many rows or bytes: what a reader must at least take, and what a redaction rewrites.
const (
	segmentRows  = 100_000
	segmentBytes = 256 << 20 // uncompressed
)

// New returns a Store whose new exports go to url; it may be empty for what exports nothing. The pool is one of the truth and acts as
// the system role. metrics and progress may be nil.
func New(pool *pgxpool.Pool, url string, fence Fence, metrics *Metrics, progress func(Progress)) *Store {
	if progress == nil {
		progress = func(Progress) {}
	}
	return &Store{pool: pool, url: url, fence: fence, metrics: metrics, progress: progress, buckets: make(map[string]*bucket),
		segmentRows: segmentRows, segmentBytes: segmentBytes}
}

// Export is a row of outbox_archive_exports. Times that have not been are zero.
type Export struct {
	ID             string     `json:"export_id"`
	Range          int64      `json:"range_from,string"` // the lowest id of its range
	Month          time.Time  `json:"-"`                 // in which the first of it was inserted
	URL            string     `json:"url"`
	State          string     `json:"state"`
	StartedAt      time.Time  `json:"started_at"`
	ExportedAt     *time.Time `json:"exported_at,omitempty"`
	VerifiedAt     *time.Time `json:"verified_at,omitempty"`
	StaleAt        *time.Time `json:"stale_at,omitempty"`
	ReleasedAt     *time.Time `json:"released_at,omitempty"`
	OverAt         *time.Time `json:"-"`
	ManifestSHA256 []byte     `json:"-"`
	ContentSHA256  []byte     `json:"-"`
	Rows           int64      `json:"rows"`
	Bytes          int64      `json:"bytes"`
	FirstOccurred  *time.Time `json:"first_occurred,omitempty"`
	LastOccurred   *time.Time `json:"last_occurred,omitempty"`
}

func (e Export) dir() string { return exportDir(e.Month, e.ID) }

// String names the export and its place, for errors and people.
func (e Export) String() string { return e.URL + " " + e.dir() }

// exportsSQL reads exports, the newest first: the id begins with the time.
// Locks: none.
const exportsSQL = `
SELECT /* coldstore.exports */ export_id, from_id, month::timestamptz, url, state, started_at, exported_at, verified_at, stale_at, released_at, over_at,
       manifest_sha256, content_sha256, coalesce(rows, 0), coalesce(bytes, 0), first_occurred, last_occurred
  FROM outbox_archive_exports
 WHERE state = 'COMPLETE' AND (@range::bigint IS NULL OR from_id = @range)
   AND (@month::timestamptz IS NULL OR first_occurred < @before AND last_occurred >= @month)
 ORDER BY from_id, export_id DESC`

// exports returns the complete exports of a range, or those that have events of a month, or all: 0 and nil do not narrow down.
func (s *Store) exports(ctx context.Context, of int64, month *time.Time) ([]Export, error) {
	args := pgx.StrictNamedArgs{"range": nil, "month": month, "before": nil}
	if of != 0 {
		args["range"] = of
	}
	if month != nil {
		args["before"] = monthEnd(*month)
	}
	rows, _ := s.pool.Query(ctx, exportsSQL, args)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Export])
	if err != nil {
		return nil, fmt.Errorf("read the exports of the archive: %w", err)
	}
	for i := range all {
		all[i].Month = all[i].Month.UTC()
	}
	return all, nil
}

// List returns every complete export by range, the newest of a range first.
func (s *Store) List(ctx context.Context) ([]Export, error) {
	return s.exports(ctx, 0, nil)
}

// abandonSQL gives up exports that were begun and never completed.
// Index: outbox_archive_exports_range_idx.   Locks: the rows.
const abandonSQL = `
UPDATE /* coldstore.abandon */ outbox_archive_exports SET state = 'OVER', over_at = now()
 WHERE state = 'WRITING' AND (@range::bigint IS NULL OR from_id = @range)`

// beginSQL notes an export that begins.
const beginSQL = `INSERT /* coldstore.begin */ INTO outbox_archive_exports (export_id, from_id, month, url) VALUES (@id, @range, @month, @url)`

// begin notes a new export before it has a file. Whoever held the lease before is dead, or will find its own export over.
func (s *Store) begin(ctx context.Context, of int64, month time.Time, url string) (Export, error) {
	var e Export
	err := postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, abandonSQL, pgx.StrictNamedArgs{"range": of}); err != nil {
			return fmt.Errorf("give up exports that died: %w", err)
		}
		var now time.Time
		if err := tx.QueryRow(ctx, `SELECT now()`).Scan(&now); err != nil {
			return fmt.Errorf("read the clock: %w", err)
		}
		id := strings.ToLower(now.UTC().Format("20060102T150405.000000Z") + "-" + rand.Text()[:10])
		e = Export{ID: id, Range: of, Month: month, URL: url, State: "WRITING", StartedAt: now}
		if _, err := tx.Exec(ctx, beginSQL, pgx.StrictNamedArgs{"id": id, "range": of, "month": month, "url": url}); err != nil {
			return fmt.Errorf("note export %s: %w", id, err)
		}
		return nil
	})
	return e, err
}

// supersedeSQL ends the exports of the range that the new one stands for: those whose range cannot have been dropped since, all of
// which it has read anew, those with the very same content, and the one that it is a redacted copy of.
// Index: outbox_archive_exports_range_idx.   Locks: the rows.
const supersedeSQL = `
UPDATE /* coldstore.supersede */ outbox_archive_exports SET state = 'OVER', over_at = now()
 WHERE from_id = @range AND state = 'COMPLETE' AND export_id <> @id
   AND CASE WHEN @replaces::text = '' THEN released_at IS NULL OR content_sha256 = @content ELSE export_id = @replaces END`

// completeSQL is the moment from which an export counts. A redacted copy is as stale, and as free, as what it is a copy of.
// Index: outbox_archive_exports_pkey.   Locks: the row.
const completeSQL = `
UPDATE /* coldstore.complete */ outbox_archive_exports e
   SET state = 'COMPLETE', exported_at = now(), verified_at = now(), manifest_sha256 = @manifest, content_sha256 = @content,
       rows = @rows, bytes = @bytes, first_occurred = @first, last_occurred = @last,
       released_at = (SELECT o.released_at FROM outbox_archive_exports o WHERE o.export_id = @replaces),
       stale_at    = (SELECT o.stale_at    FROM outbox_archive_exports o WHERE o.export_id = @replaces)
 WHERE export_id = @id AND state = 'WRITING'
RETURNING state, exported_at, verified_at, stale_at, released_at, rows, bytes, first_occurred, last_occurred`

// errTaken reports an export that somebody else has given up: they export the range.
var errTaken = errors.New("coldstore: another export of the range has begun since")

// complete returns the export as it is then.
func (s *Store) complete(ctx context.Context, e Export, replaces string, w *written) (Export, error) {
	err := postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx); err != nil {
			return err
		}
		args := pgx.NamedArgs{"id": e.ID, "range": e.Range, "replaces": replaces, "manifest": w.manifestSHA256, "content": w.contentSHA256,
			"rows": w.manifest.Rows, "bytes": w.manifest.Bytes, "first": w.manifest.FirstOccurredAt, "last": w.manifest.LastOccurredAt}
		err := tx.QueryRow(ctx, completeSQL, args).Scan(&e.State, &e.ExportedAt, &e.VerifiedAt, &e.StaleAt, &e.ReleasedAt, &e.Rows, &e.Bytes, &e.FirstOccurred, &e.LastOccurred)
		if errors.Is(err, pgx.ErrNoRows) {
			err = errTaken
		}
		if err != nil {
			return fmt.Errorf("complete export %s: %w", e.ID, err)
		}
		if _, err := tx.Exec(ctx, supersedeSQL, args); err != nil {
			return fmt.Errorf("end what export %s supersedes: %w", e.ID, err)
		}
		return nil
	})
	return e, err
}

// overSQL reads the exports whose files are to be removed: those that are not yet, and those that are about to be forgotten; or all.
// Locks: none.
const overSQL = `
SELECT /* coldstore.over */ export_id, month::timestamptz, url FROM outbox_archive_exports
 WHERE state = 'OVER' AND (@all OR swept_at IS NULL OR over_at < now() - interval '1 day') ORDER BY export_id`

// sweptSQL notes exports whose files are gone, and forgets them after a day: whoever was frozen while it wrote one may still write a
// file when it thaws, which must be found.
// Index: outbox_archive_exports_pkey.   Locks: the rows.
const sweptSQL = `
WITH forgotten AS (DELETE FROM outbox_archive_exports WHERE export_id = ANY(@ids) AND state = 'OVER' AND over_at < now() - interval '1 day')
UPDATE /* coldstore.swept */ outbox_archive_exports SET swept_at = now()
 WHERE export_id = ANY(@ids) AND state = 'OVER' AND over_at >= now() - interval '1 day'`

// Sweep removes the files of exports that are over or died, and returns how many objects that were. Those that an earlier Sweep has
// seen to are looked at again after a day; with all, now.
func (s *Store) Sweep(ctx context.Context, all bool) (removed int, err error) {
	removed, left, err := s.sweep(ctx, all)
	return removed, errors.Join(append(left, err)...)
}

// sweep is Sweep. left are the problems with files, which keep it from nothing else.
func (s *Store) sweep(ctx context.Context, all bool) (removed int, left []error, err error) {
	if _, err := s.fenced(ctx, abandonSQL, pgx.StrictNamedArgs{"range": nil}); err != nil {
		return 0, nil, fmt.Errorf("give up exports that died: %w", err)
	}
	rows, _ := s.pool.Query(ctx, overSQL, pgx.StrictNamedArgs{"all": all})
	var e Export
	var over []Export
	if _, err := pgx.ForEachRow(rows, []any{&e.ID, &e.Month, &e.URL}, func() error {
		e.Month = e.Month.UTC()
		over = append(over, e)
		return nil
	}); err != nil {
		return 0, nil, fmt.Errorf("read which exports are over: %w", err)
	}
	var swept []string
	for _, e := range over {
		b, err := s.open(ctx, e.URL)
		n := 0
		if err == nil {
			n, err = b.remove(ctx, e.dir())
		}
		removed += n
		if err != nil {
			left = append(left, fmt.Errorf("remove the files of %s, which is over: %w", e, err))
			continue
		}
		swept = append(swept, e.ID)
	}
	if len(swept) > 0 {
		if _, err := s.fenced(ctx, sweptSQL, pgx.StrictNamedArgs{"ids": swept}); err != nil {
			return removed, left, fmt.Errorf("note that the files of %d exports are gone: %w", len(swept), err)
		}
	}
	return removed, left, nil
}

// fenced runs a statement in a transaction of its own, and returns how many rows it changed.
func (s *Store) fenced(ctx context.Context, sql string, args pgx.StrictNamedArgs) (n int64, err error) {
	err = postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, sql, args)
		n = tag.RowsAffected()
		return err
	})
	return n, err
}

// open returns the place that a URL names. A place is opened once: each has connections of its own.
func (s *Store) open(ctx context.Context, url string) (*bucket, error) {
	if b := s.buckets[url]; b != nil {
		return b, nil
	}
	b, err := openBucket(url)
	if err == nil {
		s.buckets[url] = b
	}
	return b, err
}

// Close lets go of the places that were used.
func (s *Store) Close() error {
	var errs []error
	for _, b := range s.buckets {
		errs = append(errs, b.close())
	}
	clear(s.buckets)
	return errors.Join(errs...)
}

func monthEnd(month time.Time) time.Time { return month.AddDate(0, 1, 0) }
