package coldstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"gocloud.dev/blob"

	"github.com/tidings/tidings/outbox"
)

// Row is a row of the archive as the files have it. Times are ISO 8601, as PostgreSQL writes them.
type Row struct {
	ID            int64           `json:"id,string"`
	TenantID      int64           `json:"tenant_id,string"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   int64           `json:"aggregate_id,string"`
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

// Redact has redact change rows of a tenant in every export, and returns how many it changed. redact reports whether it did, is
// called more than once with the same row, and leaves what it has changed before as it is; it may change anything but the key and the
// tenant. What an export was is gone from the store when Redact returns nil, with all that was over; a store that keeps deleted
// versions of objects keeps them still. An error may leave some done: run it again. Run again after it succeeded, it returns 0,
// which is the proof that nothing is left.
func (s *Store) Redact(ctx context.Context, tenant int64, redact func(row *Row) (changed bool)) (changedRows int, err error) {
	if _, err := s.Sweep(ctx, true); err != nil { // an earlier try, or a half export, holds what this one is to remove
		return 0, err
	}
	changedRows, err = s.redactAll(ctx, tenant, false, redact)
	if changedRows > 0 && ctx.Err() == nil {
		_, serr := s.Sweep(ctx, false)
		err = errors.Join(err, serr)
	}
	return changedRows, err
}

// Look returns how many rows Redact would change, and changes nothing. It needs no fence.
func (s *Store) Look(ctx context.Context, tenant int64, redact func(row *Row) (changed bool)) (int, error) {
	return s.redactAll(ctx, tenant, true, redact)
}

func (s *Store) redactAll(ctx context.Context, tenant int64, look bool, redact func(row *Row) bool) (changed int, err error) {
	all, err := s.List(ctx)
	if err != nil {
		return 0, err
	}
	var errs []error // of one export: what the others hold goes all the same
	for _, e := range all {
		n, err := s.redact(ctx, e, tenant, look, redact)
		if ctx.Err() != nil {
			return changed, context.Cause(ctx)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("redact the export %s: %w", e, err))
			continue
		}
		changed += n
	}
	return changed, errors.Join(errs...)
}

// redact finds out which segments change, and only then makes a copy of the export in which they are others.
func (s *Store) redact(ctx context.Context, e Export, tenant int64, look bool, redact func(row *Row) bool) (int, error) {
	b, err := s.open(ctx, e.URL)
	if err != nil {
		return 0, err
	}
	old, err := readManifest(ctx, b, e.dir(), e.ManifestSHA256)
	if err != nil {
		return 0, err
	}
	changes := make([]int, len(old.Segments))
	total, read := 0, int64(0)
	for i, seg := range old.Segments {
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
		read += seg.Rows
		s.progress(Progress{"redact " + old.Month, read, old.Rows})
	}
	if total == 0 || look {
		return total, nil
	}
	to, err := s.begin(ctx, e.Range, e.Month, e.URL)
	if err != nil {
		return 0, err
	}
	w := s.newWriter(b, to)
	defer w.close()
	w.m.RedactedFrom, w.m.FirstOccurredAt, w.m.LastOccurredAt = e.ID, old.FirstOccurredAt, old.LastOccurredAt
	for i, seg := range old.Segments {
		if err := s.rewrite(ctx, w, e, seg, changes[i] > 0, tenant, redact); err != nil {
			return 0, err
		}
	}
	out, err := w.finish(ctx)
	if err != nil {
		return 0, err
	}
	_, err = s.complete(ctx, to, e.ID, out)
	return total, err
}

// rewrite copies a segment into the new export: within the store when nothing in it changes.
func (s *Store) rewrite(ctx context.Context, w *writer, from Export, seg Segment, changes bool, tenant int64, redact func(row *Row) bool) error {
	if changes {
		if err := w.startSegment(ctx, seg.Name, seg.First); err != nil {
			return err
		}
	} else {
		key := w.dir + "/" + seg.Name
		cctx, cancel := context.WithTimeout(ctx, objectTimeout)
		defer cancel()
		if err := w.b.Copy(cctx, key, from.dir()+"/"+seg.Name, &blob.CopyOptions{}); err != nil {
			return fmt.Errorf("copy %s: %w", key, err)
		}
		if err := w.b.settle(key); err != nil {
			return err
		}
		w.m.add(seg)
	}
	if err := readSegment(ctx, w.b, from.dir(), seg, func(line []byte) error {
		if !changes {
			w.content.Write(line)
			w.content.Write([]byte{'\n'})
			return nil
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
	return nil
}

// redactLine returns the line as it is to be. Where it changes and the caller wants it, the database makes the new one, so that it
// is what an export of the redacted table has.
func (s *Store) redactLine(ctx context.Context, line []byte, tenant int64, redact func(row *Row) bool, wanted bool) (out []byte, changed bool, err error) {
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
