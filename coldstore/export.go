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
	"time"

	"github.com/tidings/tidings/outbox"
)

// ErrNoRows reports a month of which the archive has nothing: it was exported and dropped, or never was.
var ErrNoRows = errors.New("coldstore: the archive has no rows of the month")

// written is what an export has written.
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
	content hash.Hash // of everything

	object *object // the segment in hand
	zip    *gzip.Writer
	seg    Segment
	sum    hash.Hash
}

func (s *Store) newWriter(b *bucket, e Export) *writer {
	return &writer{s: s, b: b, dir: e.dir(), content: sha256.New(), m: Manifest{Format: Format, Month: e.Month.Format(monthFormat), ExportID: e.ID,
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
	return w.write(key, line)
}

func (w *writer) startSegment(ctx context.Context, name string, first outbox.ArchiveKey) (err error) {
	if w.object, err = w.b.create(ctx, w.dir+"/"+name, "application/gzip"); err != nil {
		return err
	}
	w.zip, w.sum = gzip.NewWriter(w.object), sha256.New()
	w.seg = Segment{Name: name, First: first}
	return nil
}

func (w *writer) write(key outbox.ArchiveKey, line []byte) error {
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
	w.seg.Bytes, w.seg.SHA256, w.seg.ContentSHA256 = w.object.size, hex.EncodeToString(w.object.sum.Sum(nil)), hex.EncodeToString(w.sum.Sum(nil))
	w.m.add(w.seg)
	w.object = nil
	return nil
}

// close gives up the segment in hand, if there is one.
func (w *writer) close() {
	if w.object != nil {
		w.object.abort()
	}
}

// finish writes the manifest, and reads back all that was written.
func (w *writer) finish(ctx context.Context) (*written, error) {
	if w.object != nil {
		if err := w.endSegment(); err != nil {
			return nil, err
		}
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
	if _, err := w.s.readBack(ctx, w.b, w.dir, out.manifestSHA256); err != nil {
		return nil, fmt.Errorf("read back what was written: %w", err)
	}
	return out, nil
}

// readBack reads all files of an export and returns its manifest. ErrDamaged is what is not as it was written.
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
		return m, fmt.Errorf("the content of %s has SHA-256 %s, the manifest says %s: %w", dir, got, m.ContentSHA256, ErrDamaged)
	}
	return m, nil
}

// Export writes what the archive has of a month to the store's URL, reads it back, and then ends the exports that it supersedes.
// ErrNoRows is a month of which there is nothing. The month starts at its first moment in UTC.
func (s *Store) Export(ctx context.Context, month time.Time) (Export, error) {
	if s.url == "" {
		return Export{}, errors.New("coldstore: no URL to export to is set")
	}
	total, err := outbox.CountArchive(ctx, s.pool, month, monthEnd(month))
	if err != nil {
		return Export{}, err
	}
	if total == 0 {
		return Export{}, fmt.Errorf("export %s: %w", month.Format(monthFormat), ErrNoRows)
	}
	e, err := s.exportTo(ctx, month, total)
	if err != nil {
		if ctx.Err() == nil {
			s.metrics.failed()
		}
		return e, fmt.Errorf("export %s to %s: %w", month.Format(monthFormat), s.url, err)
	}
	s.metrics.exported(e)
	return e, nil
}

func (s *Store) exportTo(ctx context.Context, month time.Time, total int64) (e Export, err error) {
	b, err := s.open(ctx, s.url)
	if err != nil {
		return e, err
	}
	if _, err := b.list(ctx, month.Format(monthFormat)+"/"); err != nil { // a store that is away is found out before there is an export to give up
		return e, err
	}
	if e, err = s.begin(ctx, month, s.url); err != nil {
		return e, err
	}
	w := s.newWriter(b, e)
	defer w.close()
	if err := outbox.WalkArchive(ctx, s.pool, month, monthEnd(month), func(key outbox.ArchiveKey, line []byte) error {
		if err := w.add(ctx, key, line); err != nil {
			return err
		}
		if done := w.m.Rows + w.seg.Rows; done%1000 == 0 {
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
	return s.complete(ctx, e, "", out)
}

// nowSQL reads the clock.
const nowSQL = `SELECT /* coldstore.now */ now()`

// Due returns the months that are to be exported: those that ended longer ago than settle, of which the archive has rows and no complete
// export that is known to hold them.
func (s *Store) Due(ctx context.Context, settle time.Duration) (due []time.Time, err error) {
	var now time.Time
	if err := s.pool.QueryRow(ctx, nowSQL).Scan(&now); err != nil {
		return nil, fmt.Errorf("read the clock: %w", err)
	}
	months, err := outbox.ArchivedMonths(ctx, s.pool, now.Add(-settle))
	if err != nil {
		return nil, err
	}
	all, err := s.List(ctx)
	if err != nil {
		return nil, err
	}
	covered := make(map[time.Time]bool)
	for _, e := range all {
		covered[e.Month] = covered[e.Month] || e.StaleAt == nil
	}
	for _, m := range months {
		if !covered[m] {
			due = append(due, m)
		}
	}
	return due, nil
}

// ExportDue exports every month that is due, and removes the files of what is over. One month that fails does not keep the others.
func (s *Store) ExportDue(ctx context.Context, settle time.Duration) (done []Export, err error) {
	due, err := s.Due(ctx, settle)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, month := range due {
		e, err := s.Export(ctx, month)
		if ctx.Err() != nil {
			return done, context.Cause(ctx)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		done = append(done, e)
	}
	_, err = s.Sweep(ctx, false)
	return done, errors.Join(append(errs, err)...)
}
