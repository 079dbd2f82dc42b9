package coldstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
)

// Place identifies the file of an export that has a row.
type Place struct {
	Export  Export
	Segment string // in the directory of the manifest
	Row     Row
}

// OfRange returns the complete exports of the range that begins with the id from, newest first.
func (s *Store) OfRange(ctx context.Context, from int64) ([]Export, error) {
	return s.exports(ctx, from, nil)
}

// errFound ends the reading of a segment.
var errFound = errors.New("coldstore: found")

// Find reads the row with an outbox id from the exports of a range, or returns nil. If eventID is
// not empty, the row must have it. Find reads the manifests and the segments whose id range
// includes the id. It changes nothing.
func (s *Store) Find(ctx context.Context, from, id int64, eventID string) (*Place, error) {
	all, err := s.OfRange(ctx, from)
	if err != nil {
		return nil, err
	}
	for _, e := range all {
		b, err := s.open(e.URL)
		if err != nil {
			return nil, err
		}
		m, err := readManifest(ctx, b, e.dir(), e.ManifestSHA256)
		if err != nil {
			return nil, fmt.Errorf("read the manifest of %s: %w", e, err)
		}
		for _, seg := range m.Segments {
			if seg.First.ID > id || seg.Last.ID < id {
				continue
			}
			p := Place{Export: e, Segment: seg.Name}
			err := readSegment(ctx, b, e.dir(), seg, func(line []byte) error {
				var key struct {
					ID      int64  `json:"id,string"`
					EventID string `json:"event_id"`
				}
				if err := json.Unmarshal(line, &key); err != nil {
					return fmt.Errorf("decode a row: %w: %w", ErrDamaged, err)
				}
				if key.ID != id || eventID != "" && key.EventID != eventID {
					return nil
				}
				if err := json.Unmarshal(line, &p.Row); err != nil {
					return fmt.Errorf("decode row %d: %w: %w", id, ErrDamaged, err)
				}
				return errFound
			})
			if errors.Is(err, errFound) {
				return &p, nil
			}
			if err != nil {
				return nil, fmt.Errorf("read %s of %s: %w", seg.Name, e, err)
			}
		}
	}
	return nil, nil
}
