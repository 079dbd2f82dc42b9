package coldstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// Config selects where ranges of the archive are exported.
type Config struct {
	URL string // without secrets: file:///DIR or s3://BUCKET?region=R&endpoint=E; empty exports nothing
}

// Validate returns an error if the URL is not a valid place.
func (c Config) Validate() error {
	if c.URL == "" {
		return nil
	}
	if _, err := parseURL(c.URL); err != nil {
		return fmt.Errorf("outbox_archive_export_url: %w", err)
	}
	return nil
}

// Fence begins every transaction that changes something. It fails if the caller no longer holds the
// lease (ops/jobs).
type Fence func(ctx context.Context, tx pgx.Tx) error

// Progress reports how far an operation has come.
type Progress struct {
	Step  string
	Done  int64 // rows
	Total int64 // rows; 0 if unknown
}

// Store exports, restores and redacts. It is not safe for concurrent use. Call Close at the end.
type Store struct {
	pool     *pgxpool.Pool
	url      string
	fence    Fence
	metrics  *Metrics
	progress func(Progress)
	buckets  map[string]*bucket // by URL

	filesRead    int   // number of segments and index files that Redact and PreviewRedaction have read
	segmentRows  int64 // variable, so that tests can make small segments
	segmentBytes int64
}

// A segment ends after this many rows or bytes. It is the smallest unit that a reader reads and a
// redaction rewrites.
const (
	segmentRows  = 100_000
	segmentBytes = 256 << 20 // uncompressed
)

// New returns a Store whose new exports go to url; url may be empty if the caller exports nothing.
// The pool is a pool of the truth and acts as the system role. metrics and progress may be nil.
func New(pool *pgxpool.Pool, url string, fence Fence, metrics *Metrics, progress func(Progress)) *Store {
	if progress == nil {
		progress = func(Progress) {}
	}
	return &Store{pool: pool, url: url, fence: fence, metrics: metrics, progress: progress, buckets: make(map[string]*bucket),
		segmentRows: segmentRows, segmentBytes: segmentBytes}
}

// Export is a row of outbox_archive_exports. A time is nil until its event has happened.
type Export struct {
	ID             string     `json:"export_id"`
	Range          int64      `json:"range_from,string"` // the lowest id of its range
	Month          time.Time  `json:"-"`                 // of the insert of the first row
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

// String returns the place and directory of the export, for errors and people.
func (e Export) String() string { return e.URL + " " + e.dir() }

// exportsSQL reads exports, newest first within a range: the id begins with the time. Locks: none.
const exportsSQL = `
SELECT /* coldstore.exports */ export_id, from_id, month::timestamptz, url, state, started_at, exported_at, verified_at, stale_at,
       released_at, over_at, manifest_sha256, content_sha256, coalesce(rows, 0), coalesce(bytes, 0), first_occurred, last_occurred
  FROM outbox_archive_exports
 WHERE state = 'COMPLETE' AND (@range::bigint IS NULL OR from_id = @range)
   AND (@month::timestamptz IS NULL OR first_occurred < @before AND last_occurred >= @month)
 ORDER BY from_id, export_id DESC`

// exports returns the complete exports of a range (0: of all ranges) that have events of a month
// (nil: of any month).
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

// List returns every complete export, by range, newest first within a range.
func (s *Store) List(ctx context.Context) ([]Export, error) {
	return s.exports(ctx, 0, nil)
}

// abandonSQL ends exports that began but never completed. Index: outbox_archive_exports_range_idx.
// Locks: the rows.
const abandonSQL = `
UPDATE /* coldstore.abandon */ outbox_archive_exports SET state = 'OVER', over_at = now()
 WHERE state = 'WRITING' AND (@range::bigint IS NULL OR from_id = @range)`

// beginSQL records the beginning of an export.
const beginSQL = `INSERT /* coldstore.begin */ INTO outbox_archive_exports (export_id, from_id, month, url)
    VALUES (@id, @range, @month, @url)`

// begin records a new export before it has a file. An earlier holder of the lease is dead, or will
// find its own export ended.
func (s *Store) begin(ctx context.Context, of int64, month time.Time, url string) (Export, error) {
	var e Export
	err := postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, abandonSQL, pgx.StrictNamedArgs{"range": of}); err != nil {
			return fmt.Errorf("end abandoned exports: %w", err)
		}
		var now time.Time
		if err := tx.QueryRow(ctx, `SELECT now()`).Scan(&now); err != nil {
			return fmt.Errorf("read the clock: %w", err)
		}
		id := strings.ToLower(now.UTC().Format("20060102T150405.000000Z") + "-" + rand.Text()[:10])
		e = Export{ID: id, Range: of, Month: month, URL: url, State: "WRITING", StartedAt: now}
		if _, err := tx.Exec(ctx, beginSQL, pgx.StrictNamedArgs{"id": id, "range": of, "month": month, "url": url}); err != nil {
			return fmt.Errorf("record export %s: %w", id, err)
		}
		return nil
	})
	return e, err
}

// supersedeSQL ends the exports of the range that the new one replaces. An export that was never
// released ends: its range cannot have been dropped, so the new export has all its rows. A released
// export may have rows that the table lost, so it ends only if the content is equal. A redacted
// copy replaces only its original. Index: outbox_archive_exports_range_idx. Locks: the rows.
const supersedeSQL = `
UPDATE /* coldstore.supersede */ outbox_archive_exports SET state = 'OVER', over_at = now()
 WHERE from_id = @range AND state = 'COMPLETE' AND export_id <> @id
   AND CASE WHEN @replaces::text = '' THEN released_at IS NULL OR content_sha256 = @content ELSE export_id = @replaces END`

// completeSQL makes an export COMPLETE, and it counts from then on. A redacted copy is stale or
// released if its original is. Index: outbox_archive_exports_pkey. Locks: the row.
const completeSQL = `
UPDATE /* coldstore.complete */ outbox_archive_exports e
   SET state = 'COMPLETE', exported_at = now(), verified_at = now(), manifest_sha256 = @manifest, content_sha256 = @content,
       rows = @rows, bytes = @bytes, first_occurred = @first, last_occurred = @last,
       released_at = (SELECT o.released_at FROM outbox_archive_exports o WHERE o.export_id = @replaces),
       stale_at    = (SELECT o.stale_at    FROM outbox_archive_exports o WHERE o.export_id = @replaces)
 WHERE export_id = @id AND state = 'WRITING'
RETURNING state, exported_at, verified_at, stale_at, released_at, rows, bytes, first_occurred, last_occurred`

// errTaken reports an export that another process has ended, because it exports the range itself.
var errTaken = errors.New("coldstore: another process has begun an export of the range")

// complete makes the export COMPLETE and returns its new state.
func (s *Store) complete(ctx context.Context, e Export, replaces string, w *written) (Export, error) {
	err := postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := s.fence(ctx, tx); err != nil {
			return err
		}
		args := pgx.NamedArgs{"id": e.ID, "range": e.Range, "replaces": replaces, "manifest": w.manifestSHA256, "content": w.contentSHA256,
			"rows": w.manifest.Rows, "bytes": w.manifest.Bytes, "first": w.manifest.FirstOccurredAt, "last": w.manifest.LastOccurredAt}
		err := tx.QueryRow(ctx, completeSQL, args).Scan(&e.State, &e.ExportedAt, &e.VerifiedAt, &e.StaleAt, &e.ReleasedAt, &e.Rows,
			&e.Bytes, &e.FirstOccurred, &e.LastOccurred)
		if errors.Is(err, pgx.ErrNoRows) {
			err = errTaken
		}
		if err != nil {
			return fmt.Errorf("complete export %s: %w", e.ID, err)
		}
		if _, err := tx.Exec(ctx, supersedeSQL, args); err != nil {
			return fmt.Errorf("end the exports that %s replaces: %w", e.ID, err)
		}
		return nil
	})
	return e, err
}

const (
	// endSQL ends an export that is not complete. Index: outbox_archive_exports_pkey. Locks: the
	// row.
	endSQL = `
UPDATE /* coldstore.end */ outbox_archive_exports SET state = 'OVER', over_at = now()
 WHERE export_id = @id AND state = 'WRITING'`
	// isCompleteSQL reads whether an export counts. Index: outbox_archive_exports_pkey. Locks:
	// none.
	isCompleteSQL = `
SELECT /* coldstore.is_complete */ EXISTS (
  SELECT FROM outbox_archive_exports WHERE export_id = @id AND state = 'COMPLETE')`

	// placesSQL reads the places that may have files of ended exports: until a week after the end,
	// because a process that froze while it wrote an export may write a file when it thaws. With
	// @all, also every place with a complete export. Index: none, a row per export that ever began.
	// Locks: none.
	placesSQL = `
SELECT /* coldstore.places */ DISTINCT url FROM outbox_archive_exports
 WHERE CASE WHEN state = 'OVER' THEN swept_at IS NULL OR over_at > now() - interval '7 days' ELSE @all END ORDER BY url`
	// statesSQL reads which of the exports exist, and which of these have ended. Index:
	// outbox_archive_exports_pkey. Locks: none.
	statesSQL = `SELECT /* coldstore.states */ export_id, state = 'OVER' FROM outbox_archive_exports WHERE export_id = ANY(@ids)`

	// sweptSQL records that the ended exports of a place have no files. Their rows remain, so that
	// a later file is known as theirs. Index: none, a row per export that ever began. Locks: the
	// rows.
	sweptSQL = `
UPDATE /* coldstore.swept */ outbox_archive_exports SET swept_at = now()
 WHERE state = 'OVER' AND swept_at IS NULL AND url = ANY(@urls)`
)

// listed are the directories of a place whose exports do not count. The ended ones may be removed.
type listed struct {
	url            string
	bucket         *bucket
	ended, unknown []string
}

// list compares the directories of places with the table. left are problems with places, which do
// not stop the rest.
func (s *Store) list(ctx context.Context, all bool) (places []listed, left []error, err error) {
	rows, _ := s.pool.Query(ctx, placesSQL, pgx.StrictNamedArgs{"all": all})
	urls, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, nil, fmt.Errorf("read the places of exports: %w", err)
	}
	for _, url := range urls {
		b, err := s.open(url)
		var dirs map[string]string
		if err == nil {
			dirs, err = b.exports(ctx)
		}
		if ctx.Err() != nil {
			return nil, nil, context.Cause(ctx)
		}
		if err != nil {
			left = append(left, fmt.Errorf("list the exports at %s: %w", url, err))
			continue
		}
		// The rows are read after the directories: an export has its row before its first file.
		p, known := listed{url: url, bucket: b}, make(map[string]bool)
		rows, _ := s.pool.Query(ctx, statesSQL, pgx.StrictNamedArgs{"ids": slices.Collect(maps.Keys(dirs))})
		var id string
		var over bool
		if _, err := pgx.ForEachRow(rows, []any{&id, &over}, func() error {
			if known[id] = true; over {
				p.ended = append(p.ended, dirs[id])
			}
			return nil
		}); err != nil {
			return nil, nil, fmt.Errorf("read the states of exports: %w", err)
		}
		for id, dir := range dirs {
			if !known[id] {
				p.unknown = append(p.unknown, dir)
			}
		}
		slices.Sort(p.unknown)
		places = append(places, p)
	}
	return places, left, nil
}

// Sweep removes the files of exports that ended or died, and returns the number of objects removed.
// Until a week after an export ended it searches for its files again.
func (s *Store) Sweep(ctx context.Context) (removed int, err error) {
	removed, left, err := s.sweep(ctx, false)
	return removed, errors.Join(append(left, err)...)
}

// sweep is Sweep or, with all, visits every place of an export. left are problems with files, which
// do not stop the rest.
func (s *Store) sweep(ctx context.Context, all bool) (removed int, left []error, err error) {
	if _, err := s.fenced(ctx, abandonSQL, pgx.StrictNamedArgs{"range": nil}); err != nil {
		return 0, nil, fmt.Errorf("end abandoned exports: %w", err)
	}
	places, left, err := s.list(ctx, all)
	if err != nil {
		return 0, left, err
	}
	var swept []string
	for _, p := range places {
		problems := len(left)
		for _, dir := range p.ended {
			n, err := p.bucket.remove(ctx, dir)
			if removed += n; err != nil {
				left = append(left, fmt.Errorf("remove the files of the ended export %s %s: %w", p.url, dir, err))
			}
		}
		if len(left) == problems {
			swept = append(swept, p.url)
		}
	}
	if len(swept) > 0 {
		if _, err := s.fenced(ctx, sweptSQL, pgx.StrictNamedArgs{"urls": swept}); err != nil {
			return removed, left, fmt.Errorf("record the removed files at %d places: %w", len(swept), err)
		}
	}
	return removed, left, nil
}

// fenced runs a statement in a transaction of its own, and returns the number of rows changed.
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

// open returns the place of a URL. It opens each place once, because each has connections of its
// own.
func (s *Store) open(url string) (*bucket, error) {
	if b := s.buckets[url]; b != nil {
		return b, nil
	}
	b, err := openBucket(url)
	if err == nil {
		s.buckets[url] = b
	}
	return b, err
}

// Close closes the places that were opened.
func (s *Store) Close() error {
	var errs []error
	for _, b := range s.buckets {
		errs = append(errs, b.close())
	}
	clear(s.buckets)
	return errors.Join(errs...)
}

func monthEnd(month time.Time) time.Time { return month.AddDate(0, 1, 0) }
