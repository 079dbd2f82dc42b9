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

// ErrNoExport reports a month of which no complete export has events, neither known nor at the place that was named.
var ErrNoExport = errors.New("coldstore: no export of the month")

// Restored says what a restore did.
type Restored struct {
	Month    string   `json:"month"`
	Exports  []string `json:"exports"` // ids
	Read     int64    `json:"rows_read"`
	Restored int64    `json:"rows_restored"` // those of the month that the database did not have
}

const (
	restoreRows  = 1000
	restoreBytes = 4 << 20
)

// Restore puts the rows of events that occurred in a month back, beside the archive: of all exports that the database knows, or, with a place,
// of all that stand there. All are read from end to end first, and a damaged one restores nothing. Rows that the database has stay as they are, so
// a restore that was cut short goes on when it is run again. prepare is called before the first row comes: there the caller
// holds the month, which the next run of the archiver would drop again.
func (s *Store) Restore(ctx context.Context, month time.Time, from string, prepare func(ctx context.Context) error) (r Restored, err error) {
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
		b, err := s.open(ctx, e.URL)
		if err == nil {
			_, err = s.readBack(ctx, b, e.dir(), e.ManifestSHA256) // whatever has become of its index
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

// find returns the exports of a place that have a manifest and events of a month, the newest first: where two have a row, the newer one's
// counts, which may be redacted.
func (s *Store) find(ctx context.Context, month time.Time, url string) (all []Export, err error) {
	b, err := s.open(ctx, url)
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
			continue // not ours
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
	b, err := s.open(ctx, e.URL)
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
