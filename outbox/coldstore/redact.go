package coldstore

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/outbox"
)

// Row is a row of the archive as in the files. Times are ISO 8601, as PostgreSQL writes them.
type Row struct {
	ID            int64           `json:"id,string"`
	TenantID      int64           `json:"tenant_id,string"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   event.ID        `json:"aggregate_id"`
	EventType     string          `json:"event_type"`
	EventVersion  int16           `json:"event_version"`
	Payload       json.RawMessage `json:"payload"`
	OccurredAt    string          `json:"occurred_at"`
	AvailableAt   string          `json:"available_at"`
	ProcessedAt   string          `json:"processed_at"`
	Attempts      int16           `json:"attempts"`
	LastError     *string         `json:"last_error"`
	TraceID       *string         `json:"trace_id"`
	EventID       string          `json:"event_id"`
	StreamSeq     *int64          `json:"stream_seq,string"`
	InsertedAt    string          `json:"inserted_at"`
	Partition     *int32          `json:"partition"`
	Slot          int16           `json:"slot"`
}

// Redacted is the result of a redaction.
type Redacted struct {
	Rows    int      // rows changed or, with PreviewRedaction, rows to change
	Remains int      // with PreviewRedaction, ended exports that have files: Redact removes them
	Unread  []string // files that may have such rows but could not be read or written, each with its problem
	Files   int      // segments and index files read; some count twice
}

// Redact changes a tenant's rows that may be about a person, in every export, and returns the
// number of changed rows. redact reports whether it changed a row. It may get the same row again,
// and must not change a row twice. It may change anything except the key and the tenant. Redact
// reads only the segments that the export's index lists for the person. An unreadable export
// remains as it is and does not stop the others.
//
// When Redact returns nil and Unread is empty, the old files of changed and ended exports are gone
// from the store. A store that keeps deleted versions of objects still has them. After an error
// some exports may be redacted: run it again. A run that returns 0 proves that nothing is left.
func (s *Store) Redact(ctx context.Context, tenant int64, person event.ID, redact func(row *Row) (changed bool)) (r Redacted, err error) {
	_, left, err := s.sweep(ctx, true) // an earlier attempt or a partial export has data that this one must remove
	if err != nil {
		return r, err
	}
	if r, err = s.redactAll(ctx, tenant, person, false, redact); err == nil && r.Rows > 0 {
		var more []error
		_, more, err = s.sweep(ctx, false)
		left = append(left, more...)
	}
	for _, problem := range left {
		r.Unread = append(r.Unread, problem.Error())
	}
	return r, err
}

// PreviewRedaction returns the number of rows that Redact would change, and changes nothing. It
// also compares what the places list with what is complete. It needs no fence.
func (s *Store) PreviewRedaction(ctx context.Context, tenant int64, person event.ID,
	redact func(row *Row) (changed bool)) (Redacted, error) {
	r, err := s.redactAll(ctx, tenant, person, true, redact)
	if err != nil {
		return r, err
	}
	places, left, err := s.list(ctx, true)
	for _, p := range places {
		r.Remains += len(p.ended)
		for _, dir := range p.unknown {
			left = append(left, fmt.Errorf("%s %s: the database knows no such export; move its files or delete them", p.url, dir))
		}
	}
	for _, problem := range left {
		r.Unread = append(r.Unread, problem.Error())
	}
	return r, err
}

func (s *Store) redactAll(ctx context.Context, tenant int64, person event.ID, dryRun bool,
	redact func(row *Row) bool) (r Redacted, err error) {
	all, err := s.List(ctx)
	if err != nil {
		return r, err
	}
	s.filesRead = 0
	for _, e := range all {
		n, err := s.redact(ctx, e, tenant, person, dryRun, redact)
		if ctx.Err() != nil {
			return r, context.Cause(ctx)
		}
		if err != nil {
			r.Unread = append(r.Unread, fmt.Sprintf("redact the export %s: %v", e, err))
		}
		r.Rows += n
	}
	r.Files = s.filesRead
	return r, nil
}

// redact first finds the segments that change, and only then makes a redacted copy of the export.
func (s *Store) redact(ctx context.Context, e Export, tenant int64, person event.ID, dryRun bool, redact func(row *Row) bool) (int, error) {
	b, err := s.open(e.URL)
	if err != nil {
		return 0, err
	}
	old, err := readManifest(ctx, b, e.dir(), e.ManifestSHA256)
	if err != nil {
		return 0, err
	}
	naming, err := s.naming(ctx, b, e, old, tenant, person)
	if err != nil {
		return 0, err
	}
	changes := make([]int, len(old.Segments))
	total, read := 0, int64(0)
	for i, seg := range old.Segments {
		if read += seg.Rows; !naming[seg.Name] {
			continue
		}
		s.filesRead++
		if err := readSegment(ctx, b, e.dir(), seg, func(line []byte) error {
			_, changed, err := s.redactLine(ctx, line, tenant, redact, false)
			if changed {
				changes[i]++
			}
			return err
		}); err != nil {
			return 0, err
		}
		total += changes[i]
		s.progress(Progress{"redact " + old.Month, read, old.Rows})
	}
	if total == 0 || dryRun {
		return total, nil
	}
	if err := s.copy(ctx, b, e, old, changes, tenant, redact); err != nil {
		return 0, err
	}
	return total, nil
}

// copy makes a copy of an export in which some rows change.
func (s *Store) copy(ctx context.Context, b *bucket, e Export, old Manifest, changes []int, tenant int64,
	redact func(row *Row) bool) (err error) {
	to, err := s.begin(ctx, e.Range, e.Month, e.URL)
	if err != nil {
		return err
	}
	completing := false
	defer func() { err = s.failed(ctx, b, to, completing, err) }()
	w := s.newWriter(b, to)
	defer w.close()
	w.m.RedactedFrom, w.m.FirstOccurredAt, w.m.LastOccurredAt = e.ID, old.FirstOccurredAt, old.LastOccurredAt
	for i, seg := range old.Segments {
		s.filesRead++
		if err := s.rewrite(ctx, w, e, seg, changes[i] > 0, tenant, redact); err != nil {
			return err
		}
	}
	out, err := w.finish(ctx)
	if err != nil {
		return err
	}
	completing = true
	_, err = s.complete(ctx, to, e.ID, out)
	return err
}

// rewrite writes a segment into the new export. If no row changes, the store copies the file.
func (s *Store) rewrite(ctx context.Context, w *writer, from Export, seg Segment, changes bool, tenant int64,
	redact func(row *Row) bool) error {
	if changes {
		if err := w.startSegment(ctx, seg.Name, seg.First); err != nil {
			return err
		}
	} else {
		key := w.dir + "/" + seg.Name
		if err := w.b.copy(ctx, key, from.dir()+"/"+seg.Name); err != nil {
			return err
		}
		w.m.add(seg)
	}
	if err := readSegment(ctx, w.b, from.dir(), seg, func(line []byte) error {
		if !changes {
			w.content.Write(line)
			w.content.Write([]byte{'\n'})
			return w.index.add(line)
		}
		line, _, err := s.redactLine(ctx, line, tenant, redact, true)
		if err != nil {
			return err
		}
		return w.write(seg.Last, line)
	}); err != nil {
		return err
	}
	if changes {
		return w.endSegment()
	}
	if err := w.index.end(seg.Name); err != nil {
		return err
	}
	return w.flushIndex(ctx, false)
}

// redactLine returns the new line of a row. If it changes and wanted is set, the database renders
// it, so that it equals an export of the redacted table.
func (s *Store) redactLine(ctx context.Context, line []byte, tenant int64, redact func(row *Row) bool,
	wanted bool) (out []byte, changed bool, err error) {
	var row Row
	if err := json.Unmarshal(line, &row); err != nil {
		return nil, false, fmt.Errorf("decode a row: %w: %w", ErrDamaged, err)
	}
	if row.TenantID != tenant {
		return line, false, nil
	}
	id, occurred := row.ID, row.OccurredAt
	if !redact(&row) {
		return line, false, nil
	}
	if row.ID != id || row.OccurredAt != occurred || row.TenantID != tenant {
		return nil, false, fmt.Errorf("row %d of %s: a redaction changed its key", id, occurred)
	}
	if !wanted {
		return nil, true, nil
	}
	out, err = json.Marshal(row)
	if err != nil {
		return nil, false, fmt.Errorf("encode row %d: %w", id, err)
	}
	out, err = outbox.CanonicalArchiveLine(ctx, s.pool, out)
	return out, true, err
}
