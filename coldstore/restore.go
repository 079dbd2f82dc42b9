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

// ErrNoExport reports a month of which no complete export is known, or stands at the place that was named.
var ErrNoExport = errors.New("coldstore: no export of the month")

// Restored says what a restore did.
type Restored struct {
	Month    string   `json:"month"`
	Exports  []string `json:"exports"` // ids
	Read     int64    `json:"rows_read"`
	Restored int64    `json:"rows_restored"` // those that the archive did not have
}

const (
	restoreRows  = 1000
	restoreBytes = 4 << 20
)

// Restore puts the rows of a month back into the archive: of all its exports that the database knows, or, with a place, of all that
// stand there. All are read from end to end first, and a damaged one restores nothing. Rows that the archive has stay as they are, so
// a restore that was cut short goes on when it is run again. prepare is called before the first row comes: there the caller makes the
// month's partition and holds the month, which the next run of the archiver would drop again.
func (s *Store) Restore(ctx context.Context, month time.Time, from string, prepare func(ctx context.Context) error) (r Restored, err error) {
	r.Month = month.Format(monthFormat)
	var all []Export
	if from == "" {
		all, err = s.exports(ctx, &month, stateComplete)
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
		if err := s.readExport(ctx, e); err != nil {
			return r, fmt.Errorf("restore %s: %w", e, err)
		}
	}
	if err := prepare(ctx); err != nil {
		return r, fmt.Errorf("restore %s: %w", r.Month, err)
	}
	for _, e := range all {
		if err := s.restore(ctx, e, &r); err != nil {
			return r, fmt.Errorf("restore %s: %w", e, err)
		}
		r.Exports = append(r.Exports, e.ID)
	}
	return r, nil
}

// find returns the exports of a month that have a manifest, the newest first: where two have a row, the newer one's counts, which may
// be redacted.
func (s *Store) find(ctx context.Context, month time.Time, url string) (all []Export, err error) {
	b, err := s.open(ctx, url)
	if err != nil {
		return nil, err
	}
	keys, err := b.list(ctx, month.Format(monthFormat)+"/")
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		if parts := strings.Split(key, "/"); len(parts) == 3 && parts[2] == manifestName {
			all = append(all, Export{ID: parts[1], Month: month, URL: url})
		}
	}
	slices.SortFunc(all, func(a, b Export) int { return strings.Compare(b.ID, a.ID) })
	return all, nil
}

func (s *Store) restore(ctx context.Context, e Export, r *Restored) error {
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
			n, err = outbox.RestoreArchive(ctx, tx, lines)
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
