package coldstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
)

// ErrNoExport reports a month without events in any complete export, neither in the known ones nor
// at the given place.
var ErrNoExport = errors.New("coldstore: no export of the month")

// Restored is the result of a restore.
type Restored struct {
	Month    string   `json:"month"`
	Exports  []string `json:"exports"` // ids
	Read     int64    `json:"rows_read"`
	Restored int64    `json:"rows_restored"` // rows of the month that the database lacked
}

const (
	restoreRows  = 1000
	restoreBytes = 4 << 20
)

// Restore puts the rows of a month's events back into the database, beside the archive. It uses all
// exports in the database's records or, with from, all exports at that place. It first reads all of
// them from end to end; if one is damaged, it restores nothing. Existing rows do not change, so an
// interrupted restore can be repeated. Before the first row it calls prepare, in which the caller
// holds the month; otherwise the next run of the archiver would drop it again.
func (s *Store) Restore(ctx context.Context, month time.Time, from string,
	prepare func(ctx context.Context) error) (r Restored, err error) {
	r.Month = month.Format(monthFormat)
	var all []Export
	if from == "" {
		all, err = s.exports(ctx, 0, &month)
	} else {
		all, err = s.find(ctx, month, from)
	}
	if err != nil {
		return r, err
	}
	if len(all) == 0 {
		return r, fmt.Errorf("restore %s: %w", r.Month, ErrNoExport)
	}
	for _, e := range all {
		b, err := s.open(e.URL)
		if err == nil {
			_, err = s.readBack(ctx, b, e.dir(), e.ManifestSHA256) // a damaged index does not matter
		}
		if err != nil {
			return r, fmt.Errorf("restore %s: %w", e, err)
		}
	}
	if err := prepare(ctx); err != nil {
		return r, fmt.Errorf("restore %s: %w", r.Month, err)
	}
	for _, e := range all {
		if err := s.restore(ctx, e, month, &r); err != nil {
			return r, fmt.Errorf("restore %s: %w", e, err)
		}
		r.Exports = append(r.Exports, e.ID)
	}
	return r, nil
}

// find returns the exports at a place that have a manifest and events of a month, newest first. If
// two have the same row, the newer one counts, because it may be redacted.
func (s *Store) find(ctx context.Context, month time.Time, url string) (all []Export, err error) {
	b, err := s.open(url)
	if err != nil {
		return nil, err
	}
	keys, err := b.list(ctx, "")
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		parts := strings.Split(key, "/")
		if len(parts) != 3 || parts[2] != manifestName {
			continue
		}
		of, err := time.Parse(monthFormat, parts[0])
		if err != nil {
			continue // not a directory of Tidings
		}
		e := Export{ID: parts[1], Month: of, URL: url}
		m, err := readManifest(ctx, b, e.dir(), nil)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", e, err)
		}
		if m.has(month) {
			all = append(all, e)
		}
	}
	slices.SortFunc(all, func(a, b Export) int { return strings.Compare(b.ID, a.ID) })
	return all, nil
}

func (s *Store) restore(ctx context.Context, e Export, month time.Time, r *Restored) error {
	b, err := s.open(e.URL)
	if err != nil {
		return err
	}
	m, err := readManifest(ctx, b, e.dir(), e.ManifestSHA256)
	if err != nil {
		return err
	}
	var lines [][]byte
	bytes := 0
	flush := func() error {
		if len(lines) == 0 {
			return nil
		}
		var n int64
		if err := postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
			if err := s.fence(ctx, tx); err != nil {
				return err
			}
			n, err = outbox.RestoreArchive(ctx, tx, lines, month, monthEnd(month))
			return err
		}); err != nil {
			return err
		}
		r.Read, r.Restored = r.Read+int64(len(lines)), r.Restored+n
		lines, bytes = lines[:0], 0
		s.progress(Progress{"restore " + m.Month, r.Read, m.Rows})
		return nil
	}
	for _, seg := range m.Segments {
		if err := readSegment(ctx, b, e.dir(), seg, func(line []byte) error {
			lines, bytes = append(lines, slices.Clone(line)), bytes+len(line)
			if len(lines) < restoreRows && bytes < restoreBytes {
				return nil
			}
			return flush()
		}); err != nil {
			return err
		}
	}
	return flush()
}
