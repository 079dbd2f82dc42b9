package coldstore

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/outbox"
)

// ErrNoRows reports a range or month without rows in the archive: it was exported and dropped, or
// never existed.
var ErrNoRows = errors.New("coldstore: no rows in the archive")

// written is the result of writing an export.
type written struct {
	manifest                      Manifest
	manifestSHA256, contentSHA256 []byte
}

// writer writes the segments of an export and then its manifest.
type writer struct {
	s       *Store
	b       *bucket
	dir     string
	m       Manifest
	content hash.Hash // of all lines

	index indexer

	object *object // the present segment
	zip    *gzip.Writer
	seg    Segment
	sum    hash.Hash
}

func (s *Store) newWriter(b *bucket, e Export) *writer {
	return &writer{s: s, b: b, dir: e.dir(), content: sha256.New(),
		m: Manifest{Format: Format, Month: e.Month.Format(monthFormat), ExportID: e.ID, Range: e.Range,
			CreatedAt: e.StartedAt.UTC(), Encoding: "ndjson", Compression: "gzip", Schema: schema}}
}

// add writes a line.
func (w *writer) add(ctx context.Context, key outbox.ArchiveKey, line []byte) error {
	if w.object != nil && (w.seg.Rows == w.s.segmentRows || w.seg.ContentBytes >= w.s.segmentBytes) {
		if err := w.endSegment(); err != nil {
			return err
		}
	}
	if w.object == nil {
		if err := w.startSegment(ctx, fmt.Sprintf("%05d.ndjson.gz", len(w.m.Segments)+1), key); err != nil {
			return err
		}
	}
	if at := key.OccurredAt.UTC(); w.m.Rows+w.seg.Rows == 0 {
		w.m.FirstOccurredAt, w.m.LastOccurredAt = at, at
	} else if at.Before(w.m.FirstOccurredAt) {
		w.m.FirstOccurredAt = at
	} else if at.After(w.m.LastOccurredAt) {
		w.m.LastOccurredAt = at
	}
	return w.write(key, line)
}

func (w *writer) startSegment(ctx context.Context, name string, first outbox.ArchiveKey) (err error) {
	if err := w.flushIndex(ctx, false); err != nil {
		return err
	}
	if w.object, err = w.b.create(ctx, w.dir+"/"+name, "application/gzip"); err != nil {
		return err
	}
	w.zip, w.sum = gzip.NewWriter(w.object), sha256.New()
	w.seg = Segment{Name: name, First: first}
	return nil
}

func (w *writer) write(key outbox.ArchiveKey, line []byte) error {
	if err := w.index.add(line); err != nil {
		return err
	}
	for _, part := range [][]byte{line, {'\n'}} {
		if _, err := w.zip.Write(part); err != nil {
			return err
		}
		w.sum.Write(part)
		w.content.Write(part)
		w.seg.ContentBytes += int64(len(part))
	}
	w.seg.Rows++
	w.seg.Last = key
	return nil
}

func (w *writer) endSegment() error {
	if err := w.zip.Close(); err != nil {
		return err
	}
	if err := w.object.commit(); err != nil {
		return err
	}
	w.seg.Bytes, w.seg.SHA256, w.seg.ContentSHA256 = w.object.size, hex.EncodeToString(w.object.sum.Sum(nil)),
		hex.EncodeToString(w.sum.Sum(nil))
	w.m.add(w.seg)
	w.object = nil
	return w.index.end(w.seg.Name)
}

// close aborts the present segment, if there is one.
func (w *writer) close() {
	if w.object != nil {
		w.object.abort()
	}
}

// finish writes the manifest and reads back everything that was written.
func (w *writer) finish(ctx context.Context) (*written, error) {
	if w.object != nil {
		if err := w.endSegment(); err != nil {
			return nil, err
		}
	}
	if err := w.flushIndex(ctx, true); err != nil {
		return nil, err
	}
	out := &written{contentSHA256: w.content.Sum(nil)}
	w.m.ContentSHA256 = hex.EncodeToString(out.contentSHA256)
	out.manifest = w.m
	text, err := json.MarshalIndent(w.m, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode the manifest: %w", err)
	}
	text = append(text, '\n')
	sum := sha256.Sum256(text)
	out.manifestSHA256 = sum[:]
	if err := w.b.put(ctx, w.dir+"/"+manifestName, "application/json", text); err != nil {
		return nil, err
	}
	if err := w.s.readAll(ctx, w.b, w.dir, out.manifestSHA256); err != nil {
		return nil, fmt.Errorf("read back the export: %w", err)
	}
	return out, nil
}

// readAll is readBack with the index files.
func (s *Store) readAll(ctx context.Context, b *bucket, dir string, manifestSHA256 []byte) error {
	m, err := s.readBack(ctx, b, dir, manifestSHA256)
	for _, x := range m.Index {
		if err == nil {
			err = readIndex(ctx, b, dir, x, 0, "", nil)
		}
	}
	return err
}

// readBack reads the manifest and all segments of an export, and returns the manifest. ErrDamaged:
// a file differs from what was written.
func (s *Store) readBack(ctx context.Context, b *bucket, dir string, manifestSHA256 []byte) (Manifest, error) {
	m, err := readManifest(ctx, b, dir, manifestSHA256)
	if err != nil {
		return m, err
	}
	content, done := sha256.New(), int64(0)
	for _, seg := range m.Segments {
		if err := readSegment(ctx, b, dir, seg, func(line []byte) error {
			content.Write(line)
			content.Write([]byte{'\n'})
			return nil
		}); err != nil {
			return m, err
		}
		done += seg.Rows
		s.progress(Progress{"read back " + m.Month, done, m.Rows})
	}
	if got := hex.EncodeToString(content.Sum(nil)); got != m.ContentSHA256 {
		return m, fmt.Errorf("the content of %s has SHA-256 %s, the manifest has %s: %w", dir, got, m.ContentSHA256, ErrDamaged)
	}
	return m, nil
}

// Export writes a range of the archive to the store's URL, reads it back, and then ends the exports
// that it replaces. ErrNoRows: the range is empty.
func (s *Store) Export(ctx context.Context, r outbox.Range) (Export, error) {
	if s.url == "" {
		return Export{}, errors.New("coldstore: no export URL is set")
	}
	some, err := outbox.AnyArchived(ctx, s.pool, r.From, r.To)
	if err != nil {
		return Export{}, err
	}
	if !some {
		return Export{}, fmt.Errorf("export the range from %d: %w", r.From, ErrNoRows)
	}
	e, err := s.exportTo(ctx, r)
	if err != nil {
		if ctx.Err() == nil {
			s.metrics.failed()
		}
		return e, fmt.Errorf("export the range from %d to %s: %w", r.From, s.url, err)
	}
	s.metrics.exported(e)
	return e, nil
}

func (s *Store) exportTo(ctx context.Context, r outbox.Range) (e Export, err error) {
	month := monthOf(r.FirstAt)
	b, err := s.open(s.url)
	if err != nil {
		return e, err
	}
	// Detects an unavailable store before there is an export to end.
	if _, err := b.list(ctx, month.Format(monthFormat)+"/"); err != nil {
		return e, err
	}
	if e, err = s.begin(ctx, r.From, month, s.url); err != nil {
		return e, err
	}
	completing := false
	defer func() { err = s.failed(ctx, b, e, completing, err) }()
	w, total := s.newWriter(b, e), r.Rows
	defer w.close()
	if err := outbox.WalkArchive(ctx, s.pool, r.From, r.To, func(key outbox.ArchiveKey, line []byte) error {
		if err := w.add(ctx, key, line); err != nil {
			return err
		}
		if done := w.m.Rows + w.seg.Rows; done%1000 == 0 {
			if total < done {
				total = 0 // the estimate was too low
			}
			s.progress(Progress{"export " + w.m.Month, done, total})
		}
		return nil
	}); err != nil {
		return e, err
	}
	out, err := w.finish(ctx)
	if err != nil {
		return e, err
	}
	completing = true
	return s.complete(ctx, e, "", out)
}

// discardTimeout bounds the removal of a failed export's files. Sweep removes what is left.
const discardTimeout = 20 * time.Second

// failed removes the files of an export that failed, also after ctx ended: this process may have
// been frozen, and nobody else will search for them. It returns err, and its own error if it
// left files.
func (s *Store) failed(ctx context.Context, b *bucket, e Export, completing bool, err error) error {
	if err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), discardTimeout)
	defer cancel()
	if completing { // the commit may have been carried out although its answer was lost
		return errors.Join(err, s.discard(ctx, b, e))
	}
	_, left := b.remove(ctx, e.dir())
	return errors.Join(err, left)
}

// discard ends an export unless it is complete, and removes its files. It needs no fence: only the
// export's own process completes it.
func (s *Store) discard(ctx context.Context, b *bucket, e Export) error {
	if _, err := s.pool.Exec(ctx, endSQL, pgx.StrictNamedArgs{"id": e.ID}); err != nil {
		return fmt.Errorf("end the export %s: %w", e, err)
	}
	var complete bool
	if err := s.pool.QueryRow(ctx, isCompleteSQL, pgx.StrictNamedArgs{"id": e.ID}).Scan(&complete); err != nil || complete {
		return err
	}
	_, err := b.remove(ctx, e.dir())
	return err
}

func monthOf(t time.Time) time.Time {
	t = t.UTC()
	return time.Date(t.Year(), t.Month(), 1, 0, 0, 0, 0, time.UTC)
}

// archived returns the ranges of the archive.
func (s *Store) archived(ctx context.Context) ([]outbox.Range, error) {
	all, _, err := outbox.Ranges(ctx, s.pool)
	return slices.DeleteFunc(all, func(r outbox.Range) bool { return r.State != outbox.RangeArchived }), err
}

// Due returns the ranges that must be exported: those without a complete export that is not stale.
func (s *Store) Due(ctx context.Context) ([]outbox.Range, error) {
	due, err := s.archived(ctx)
	if err != nil {
		return nil, err
	}
	all, err := s.List(ctx)
	if err != nil {
		return nil, err
	}
	covered := make(map[int64]bool)
	for _, e := range all {
		covered[e.Range] = covered[e.Range] || e.StaleAt == nil
	}
	return slices.DeleteFunc(due, func(r outbox.Range) bool { return covered[r.From] }), nil
}

// ExportDue exports every range that is due, and removes the files of ended exports. A range that
// fails does not stop the others. It calls more between two ranges, whose error ends it.
func (s *Store) ExportDue(ctx context.Context, more func() error) (done []Export, err error) {
	due, err := s.Due(ctx)
	if err != nil {
		return nil, err
	}
	return s.exportAll(ctx, due, more)
}

// ExportMonth exports the ranges whose first message was inserted in a month, given by its first
// moment in UTC. ErrNoRows: the month has none.
func (s *Store) ExportMonth(ctx context.Context, month time.Time) ([]Export, error) {
	all, err := s.archived(ctx)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(r outbox.Range) bool { return !monthOf(r.FirstAt).Equal(month) })
	if len(all) == 0 {
		return nil, fmt.Errorf("export %s: %w", month.Format(monthFormat), ErrNoRows)
	}
	return s.exportAll(ctx, all, ctx.Err)
}

func (s *Store) exportAll(ctx context.Context, all []outbox.Range, more func() error) (done []Export, err error) {
	var errs []error
	for _, r := range all {
		if err := more(); err != nil {
			return done, errors.Join(append(errs, err)...)
		}
		e, err := s.Export(ctx, r)
		switch {
		case ctx.Err() != nil:
			return done, context.Cause(ctx)
		case errors.Is(err, ErrNoRows): // an empty range loses nothing
		case err != nil:
			errs = append(errs, err)
		default:
			done = append(done, e)
		}
	}
	_, err = s.Sweep(ctx)
	return done, errors.Join(append(errs, err)...)
}
