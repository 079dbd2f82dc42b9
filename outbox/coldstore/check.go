package coldstore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/outbox"
)

// content returns the number of rows that the archive now has of a range, and their hash.
func (s *Store) content(ctx context.Context, r outbox.Range) (rows int64, sum []byte, err error) {
	h := sha256.New()
	err = outbox.WalkArchive(ctx, s.pool, r.From, r.To, func(_ outbox.ArchiveKey, line []byte) error {
		h.Write(line)
		h.Write([]byte{'\n'})
		if rows++; rows%1000 == 0 {
			s.progress(Progress{"compare " + rangeName(r), rows, 0})
		}
		return nil
	})
	return rows, h.Sum(nil), err
}

func rangeName(r outbox.Range) string { return fmt.Sprintf("the range from %d", r.From) }

// probe reads the manifest of an export.
func (s *Store) probe(ctx context.Context, e Export) error {
	b, err := s.open(e.URL)
	if err != nil {
		return err
	}
	_, err = readManifest(ctx, b, e.dir(), e.ManifestSHA256)
	return err
}

func (s *Store) readExport(ctx context.Context, e Export) error {
	b, err := s.open(e.URL)
	if err != nil {
		return err
	}
	return s.readAll(ctx, b, e.dir(), e.ManifestSHA256)
}

// staleSQL records that exports differ from the table, so that the range is exported again.
// Index: outbox_archive_exports_pkey. Locks: the rows.
const staleSQL = `
UPDATE /* coldstore.stale */ outbox_archive_exports SET stale_at = now()
 WHERE export_id = ANY(@ids) AND state = 'COMPLETE' AND stale_at IS NULL`

// releaseSQL records that the files of an export were read and equal the table. From now on the
// range may be dropped. Index: outbox_archive_exports_pkey. Locks: the row.
const releaseSQL = `
UPDATE /* coldstore.release */ outbox_archive_exports SET verified_at = now(), stale_at = NULL, released_at = coalesce(released_at, now())
 WHERE export_id = @id AND state = 'COMPLETE'`

// Check reports whether a range may be dropped, or why not. It may be dropped if an export of it
// was just read from end to end and equals the archive. Check reads the range in the database and
// in the store. The result holds as long as the fence: the caller drops the range under the same
// lease. If the range has changed since, or its files are damaged, the next ExportDue exports it
// again. An error changes nothing.
//
// A Store without a URL releases a range that was never exported. A range with an export must pass
// the same check: another process exported it, its files may soon be all that is left of the range,
// and they must be marked so.
func (s *Store) Check(ctx context.Context, r outbox.Range) (ok bool, why string, err error) {
	name := rangeName(r)
	all, err := s.exports(ctx, r.From, nil)
	if err != nil {
		return false, "", err
	}
	if len(all) == 0 && s.url == "" {
		return true, "", nil
	}
	var unreadable []error // detected before the table is read, which may take long
	for _, e := range all {
		if err := s.probe(ctx, e); err != nil && !errors.Is(err, ErrDamaged) {
			unreadable = append(unreadable, fmt.Errorf("check the export %s: %w", e, err))
		}
	}
	if len(unreadable) > 0 && len(unreadable) == len(all) {
		return false, "", errors.Join(unreadable...)
	}
	rows, sum, err := s.content(ctx, r)
	if err != nil {
		return false, "", err
	}
	if rows == 0 {
		return true, "", nil // an empty range loses nothing
	}
	if len(all) == 0 {
		return false, fmt.Sprintf("%s is not exported", name), nil
	}
	why = fmt.Sprintf("%s has changed since its export: it has %s", name, words.Of(rows, "row"))
	var ids []string
	for _, e := range all {
		ids = append(ids, e.ID)
		if e.Rows != rows || !bytes.Equal(e.ContentSHA256, sum) {
			continue
		}
		err := s.readExport(ctx, e)
		if errors.Is(err, ErrDamaged) {
			s.metrics.failed()
			why = fmt.Sprintf("the export %s is damaged: %v", e, err)
			continue
		}
		if err != nil {
			return false, "", fmt.Errorf("check the export %s: %w", e, err)
		}
		n, err := s.fenced(ctx, releaseSQL, pgx.StrictNamedArgs{"id": e.ID})
		if err != nil {
			return false, "", fmt.Errorf("record that %s may be dropped: %w", name, err)
		}
		if n == 0 {
			return false, fmt.Sprintf("the export %s was superseded meanwhile", e), nil
		}
		return true, "", nil
	}
	if _, err := s.fenced(ctx, staleSQL, pgx.StrictNamedArgs{"ids": ids}); err != nil {
		return false, "", fmt.Errorf("record that the exports of %s are stale: %w", name, err)
	}
	return false, why, nil
}

// The comparison of the table with an export.
const (
	TableSame    = "same"    // the table has equal rows
	TableDiffers = "differs" // the table has other rows: later ones, or only those that arrived after the drop
	TableGone    = "gone"    // the table has no rows
)

// Finding is the result of Verify for one export.
type Finding struct {
	Export  Export `json:"export"`
	Month   string `json:"month"`
	Problem string `json:"problem,omitempty"` // why the files are damaged or unreadable; "" if they are intact
	Damaged bool   `json:"damaged"`           // a retry does not help
	Table   string `json:"table"`
}

// Verify reads all files of the complete exports that have events of a month (the zero time: of
// all). It compares them with their manifests, their checksums and the table, and calls report for
// each export. It changes nothing and needs no fence.
func (s *Store) Verify(ctx context.Context, month time.Time, report func(Finding) error) error {
	of := &month
	if month.IsZero() {
		of = nil
	}
	all, err := s.exports(ctx, 0, of)
	if err != nil {
		return err
	}
	archived, err := s.archived(ctx)
	if err != nil {
		return err
	}
	var rows int64
	var sum []byte
	for i, e := range all {
		f := Finding{Export: e, Month: e.Month.Format(monthFormat), Table: TableDiffers}
		err := s.readExport(ctx, e)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			f.Problem, f.Damaged = err.Error(), errors.Is(err, ErrDamaged)
		}
		if i == 0 || all[i-1].Range != e.Range {
			rows = 0
			if at := slices.IndexFunc(archived, func(r outbox.Range) bool { return r.From == e.Range }); at >= 0 {
				if rows, sum, err = s.content(ctx, archived[at]); err != nil {
					return err
				}
			}
		}
		switch {
		case rows == 0:
			f.Table = TableGone
		case rows == e.Rows && bytes.Equal(sum, e.ContentSHA256):
			f.Table = TableSame
		}
		if err := report(f); err != nil {
			return err
		}
	}
	return nil
}
