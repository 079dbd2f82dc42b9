package coldstore

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"time"

	"github.com/tidings/tidings/outbox"
)

// ErrDamaged reports files that differ from what was written: one is missing, cut short or altered.
// A retry does not help.
var ErrDamaged = errors.New("coldstore: damaged")

// Format names the format of the files. A changed format gets a new name.
const Format = "tidings-outbox-archive/1"

const (
	manifestName     = "manifest.json"
	maxManifestBytes = 64 << 20
	monthFormat      = "2006-01"
)

// Column is a column of the archive, as in a line.
type Column struct {
	Name string `json:"name"`
	Type string `json:"type"` // PostgreSQL type
}

// schema lists the columns of a line of Format.
var schema = []Column{
	{"id", "bigint"}, {"tenant_id", "bigint"}, {"aggregate_type", "text"}, {"aggregate_id", "text"}, {"event_type", "text"},
	{"event_version", "smallint"}, {"payload", "jsonb"}, {"occurred_at", "timestamptz"}, {"available_at", "timestamptz"},
	{"processed_at", "timestamptz"}, {"attempts", "smallint"}, {"last_error", "text"}, {"trace_id", "text"}, {"event_id", "uuid"},
	{"stream_seq", "bigint"}, {"inserted_at", "timestamptz"}, {"partition", "integer"}, {"slot", "smallint"},
}

// Segment describes a file of rows.
type Segment struct {
	Name          string            `json:"name"` // in the directory of the manifest
	Rows          int64             `json:"rows"`
	Bytes         int64             `json:"bytes"`          // of the file
	SHA256        string            `json:"sha256"`         // of the file
	ContentBytes  int64             `json:"content_bytes"`  // of the uncompressed lines
	ContentSHA256 string            `json:"content_sha256"` // of the uncompressed lines
	First         outbox.ArchiveKey `json:"first"`
	Last          outbox.ArchiveKey `json:"last"`
}

// Manifest lists the parts of an export. It is written last: without a manifest there is no export.
type Manifest struct {
	Format       string    `json:"format"`
	Month        string    `json:"month"` // of the insert of the first row, in UTC: 2026-08
	ExportID     string    `json:"export_id"`
	Range        int64     `json:"range_from,string,omitzero"` // the lowest id of its range
	RedactedFrom string    `json:"redacted_from,omitempty"`    // the export of which this one is a redacted copy
	CreatedAt    time.Time `json:"created_at"`
	Encoding     string    `json:"encoding"`    // ndjson: each line is a row
	Compression  string    `json:"compression"` // gzip
	Schema       []Column  `json:"schema"`
	Rows         int64     `json:"rows"`
	Bytes        int64     `json:"bytes"` // of all segments
	// The times of the first and the last event. An export without them has only events of its
	// month.
	FirstOccurredAt time.Time `json:"first_occurred_at,omitzero"`
	LastOccurredAt  time.Time `json:"last_occurred_at,omitzero"`
	ContentSHA256   string    `json:"content_sha256"` // of all lines, uncompressed, in the order of the segments
	Segments        []Segment `json:"segments"`
	Index           []Index   `json:"index,omitempty"` // files with the ids that the rows of the segments may name
}

// has reports whether the export may have events of month.
func (m *Manifest) has(month time.Time) bool {
	if m.FirstOccurredAt.IsZero() && m.LastOccurredAt.IsZero() {
		return m.Month == month.Format(monthFormat)
	}
	return m.FirstOccurredAt.Before(monthEnd(month)) && !m.LastOccurredAt.Before(month)
}

func (m *Manifest) add(s Segment) {
	m.Segments = append(m.Segments, s)
	m.Rows += s.Rows
	m.Bytes += s.Bytes
}

var indexName = regexp.MustCompile(`^index-[0-9]{5,}\.ndjson\.gz$`)

var segmentName = regexp.MustCompile(`^[0-9]{5,}\.ndjson\.gz$`)

// exportDir returns the directory of an export: the month of its first row, then its id.
func exportDir(month time.Time, id string) string { return month.UTC().Format(monthFormat) + "/" + id }

// readManifest reads the manifest of a directory. If want is given, it verifies the manifest's own
// hash.
func readManifest(ctx context.Context, b *bucket, dir string, want []byte) (m Manifest, err error) {
	err = b.read(ctx, dir+"/"+manifestName, func(r io.Reader) error {
		content, err := io.ReadAll(io.LimitReader(r, maxManifestBytes))
		if err != nil {
			return err
		}
		if sum := sha256.Sum256(content); want != nil && !bytes.Equal(sum[:], want) {
			return fmt.Errorf("its SHA-256 is %x, not %x: %w", sum, want, ErrDamaged)
		}
		if err := json.Unmarshal(content, &m); err != nil {
			return fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		return m.check(dir)
	})
	return m, err
}

// check returns an error if the manifest does not belong in dir or contradicts itself.
func (m *Manifest) check(dir string) error {
	if m.Format != Format {
		return fmt.Errorf("its format is %q, but this program knows only %q", m.Format, Format)
	}
	month, err := time.Parse(monthFormat, m.Month)
	if err != nil || exportDir(month, m.ExportID) != dir {
		return fmt.Errorf("it belongs to month %q, export %q: %w", m.Month, m.ExportID, ErrDamaged)
	}
	var sum Manifest
	for _, s := range m.Segments {
		if !segmentName.MatchString(s.Name) {
			return fmt.Errorf("invalid segment name %q: %w", s.Name, ErrDamaged)
		}
		sum.add(s)
	}
	for _, x := range m.Index {
		if !indexName.MatchString(x.Name) {
			return fmt.Errorf("invalid index name %q: %w", x.Name, ErrDamaged)
		}
	}
	if sum.Rows != m.Rows || sum.Bytes != m.Bytes || m.Rows == 0 {
		return fmt.Errorf("it states %d rows in %d bytes, but its segments state %d in %d: %w", m.Rows, m.Bytes,
			sum.Rows, sum.Bytes, ErrDamaged)
	}
	return nil
}

// maxLineBytes is the longest line that a reader accepts, more than a PostgreSQL row can hold.
const maxLineBytes = 1 << 30

// readSegment calls fn with every line of a segment; a line is valid during the call. It returns
// ErrDamaged unless the whole file matches the manifest. By then fn has already seen the lines.
func readSegment(ctx context.Context, b *bucket, dir string, want Segment, fn func(line []byte) error) error {
	return b.read(ctx, dir+"/"+want.Name, func(r io.Reader) error {
		file, content := sha256.New(), sha256.New()
		got := Segment{Name: want.Name, First: want.First, Last: want.Last}
		raw := bufio.NewReaderSize(io.TeeReader(r, io.MultiWriter(file, (*counter)(&got.Bytes))), 256<<10)
		z, err := gzip.NewReader(raw)
		if err != nil {
			return damagedUnlessIO(err)
		}
		lines := bufio.NewScanner(z)
		lines.Buffer(make([]byte, 64<<10), maxLineBytes)
		lines.Split(wholeLines)
		for lines.Scan() {
			line := lines.Bytes()
			content.Write(line)
			got.Rows++
			got.ContentBytes += int64(len(line))
			if err := fn(line[:len(line)-1]); err != nil {
				return err
			}
		}
		if err := lines.Err(); err != nil {
			return damagedUnlessIO(err)
		}
		got.SHA256, got.ContentSHA256 = hex.EncodeToString(file.Sum(nil)), hex.EncodeToString(content.Sum(nil))
		if got != want {
			return fmt.Errorf("it has %d rows, %d bytes, SHA-256 %s, content %s; the manifest has %d, %d, %s, %s: %w",
				got.Rows, got.Bytes, got.SHA256, got.ContentSHA256, want.Rows, want.Bytes, want.SHA256, want.ContentSHA256, ErrDamaged)
		}
		return nil
	})
}

// damagedUnlessIO adds ErrDamaged to an error about wrong content. It leaves an error of a store
// that could not be read.
func damagedUnlessIO(err error) error {
	if errors.Is(err, gzip.ErrChecksum) || errors.Is(err, gzip.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, io.EOF) || errors.Is(err, errCutLine) || errors.Is(err, bufio.ErrTooLong) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	var corrupt flate.CorruptInputError
	if errors.As(err, &corrupt) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return err
}

var errCutLine = errors.New("the last line has no end")

// wholeLines splits into lines, each with its newline.
func wholeLines(data []byte, atEOF bool) (int, []byte, error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i+1], nil
	}
	if atEOF && len(data) > 0 {
		return 0, nil, errCutLine
	}
	return 0, nil, nil
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
