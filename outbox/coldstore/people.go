package coldstore

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/redact"
)

// Index describes a file that lists the ids under which a redaction searches the rows of segments.
// It has a line for each segment and tenant.
type Index struct {
	Name   string `json:"name"` // in the directory of the manifest
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// indexLine is a line of an index. The id 0 means that a row of the segment may be about anybody.
type indexLine struct {
	Segment  string   `json:"segment"`
	TenantID int64    `json:"tenant_id,string"`
	IDs      []string `json:"ids"`
}

// indexBytes is the compressed size in memory at which an index file is written. The next file
// continues.
const indexBytes = 8 << 20

// indexer builds the index of an export while its segments are written.
type indexer struct {
	ids map[int64]map[event.ID]bool // of the present segment, by tenant
	buf bytes.Buffer
	zip *gzip.Writer
}

// add records the ids that a row may be about.
func (x *indexer) add(line []byte) error {
	var row struct {
		TenantID  int64           `json:"tenant_id,string"`
		EventType string          `json:"event_type"`
		Payload   json.RawMessage `json:"payload"`
	}
	if err := json.Unmarshal(line, &row); err != nil {
		return fmt.Errorf("decode a row: %w: %w", ErrDamaged, err)
	}
	for _, id := range redact.People(row.EventType, row.Payload) {
		of := x.ids[row.TenantID]
		if of == nil {
			if x.ids == nil {
				x.ids = make(map[int64]map[event.ID]bool)
			}
			of = make(map[event.ID]bool)
			x.ids[row.TenantID] = of
		}
		of[id] = true
	}
	return nil
}

// end writes the lines of the present segment.
func (x *indexer) end(segment string) error {
	if x.zip == nil {
		x.zip = gzip.NewWriter(&x.buf)
	}
	for _, tenant := range slices.Sorted(maps.Keys(x.ids)) {
		line := indexLine{Segment: segment, TenantID: tenant}
		for _, id := range slices.Sorted(maps.Keys(x.ids[tenant])) {
			line.IDs = append(line.IDs, id.String())
		}
		text, err := json.Marshal(line)
		if err != nil {
			return fmt.Errorf("encode the index of %s: %w", segment, err)
		}
		if _, err := x.zip.Write(append(text, '\n')); err != nil {
			return fmt.Errorf("compress the index of %s: %w", segment, err)
		}
	}
	x.ids = nil
	return nil
}

// flushIndex writes the next index file if it is large enough, or if last is true.
func (w *writer) flushIndex(ctx context.Context, last bool) error {
	x := &w.index
	if x.zip == nil || !last && x.buf.Len() < indexBytes {
		return nil
	}
	if err := x.zip.Close(); err != nil {
		return fmt.Errorf("compress an index: %w", err)
	}
	sum := sha256.Sum256(x.buf.Bytes())
	file := Index{fmt.Sprintf("index-%05d.ndjson.gz", len(w.m.Index)+1), int64(x.buf.Len()), hex.EncodeToString(sum[:])}
	if err := w.b.put(ctx, w.dir+"/"+file.Name, "application/gzip", x.buf.Bytes()); err != nil {
		return err
	}
	w.m.Index = append(w.m.Index, file)
	w.index = indexer{}
	return nil
}

// naming returns the segments of an export that may have rows about a person, according to its
// index. Without a readable index it returns all segments.
func (s *Store) naming(ctx context.Context, b *bucket, e Export, m Manifest, tenant int64, person event.ID) (map[string]bool, error) {
	found, indexed := make(map[string]bool), len(m.Index) > 0
	for _, x := range m.Index {
		s.filesRead++
		if err := readIndex(ctx, b, e.dir(), x, tenant, person, found); err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			indexed = false
			break
		}
	}
	if !indexed {
		for _, seg := range m.Segments {
			found[seg.Name] = true
		}
	}
	return found, nil
}

// readIndex adds the segments that an index file lists for the person. ErrDamaged: the file differs
// from what was written.
func readIndex(ctx context.Context, b *bucket, dir string, x Index, tenant int64, person event.ID, found map[string]bool) error {
	quoted := func(id event.ID) []byte { return strconv.AppendQuote(nil, id.String()) }
	of, him, anybody := append([]byte(`"tenant_id":`), quoted(event.IDOf(tenant))...), quoted(person), quoted(redact.Anybody)
	return b.read(ctx, dir+"/"+x.Name, func(r io.Reader) error {
		content, err := io.ReadAll(io.LimitReader(r, x.Bytes+1))
		if err != nil {
			return err
		}
		if sum := sha256.Sum256(content); hex.EncodeToString(sum[:]) != x.SHA256 {
			return fmt.Errorf("its SHA-256 is %x, not %s: %w", sum, x.SHA256, ErrDamaged)
		}
		z, err := gzip.NewReader(bytes.NewReader(content))
		if err != nil {
			return damagedUnlessIO(err)
		}
		lines := bufio.NewScanner(z)
		lines.Buffer(make([]byte, 64<<10), maxLineBytes)
		for lines.Scan() {
			if !bytes.Contains(lines.Bytes(), of) || !bytes.Contains(lines.Bytes(), him) && !bytes.Contains(lines.Bytes(), anybody) {
				continue
			}
			var line indexLine
			if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
				return fmt.Errorf("%w: %w", ErrDamaged, err)
			}
			if line.TenantID == tenant &&
				(slices.Contains(line.IDs, person.String()) || slices.Contains(line.IDs, string(redact.Anybody))) {
				found[line.Segment] = true
			}
		}
		return damagedUnlessIO(lines.Err())
	})
}
