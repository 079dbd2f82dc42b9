package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tracing"
)

// traceDefault is the value of --trace if none is given: a file in the data directory.
const traceDefault = "DATA/traces.jsonl"

// traceFile returns the path that --trace names, or "" without the flag.
func traceFile(flag, dir string) (string, error) {
	switch flag {
	case "":
		return "", nil
	case traceDefault:
		return filepath.Join(dir, filepath.Base(traceDefault)), nil
	}
	path, err := filepath.Abs(flag)
	if err != nil {
		return "", fmt.Errorf("absolute path of %s: %w", flag, err)
	}
	return path, nil
}

// maxSpans is the greatest size of a file of spans, in bytes. A full file is renamed to FILE.1,
// which replaces the earlier FILE.1.
const maxSpans = 64 << 20

// spanFile is a file of spans with a greatest size. Every Write has whole lines. It is safe for
// concurrent use.
type spanFile struct {
	path string
	most int64 // bytes

	mu   sync.Mutex
	f    *os.File
	size int64
}

func openSpans(path string) (*spanFile, error) {
	s := &spanFile{path: path, most: maxSpans}
	return s, s.open()
}

func (s *spanFile) open() error {
	f, err := os.OpenFile(s.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write spans: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("write spans: %w", err), f.Close())
	}
	s.f, s.size = f, info.Size()
	return nil
}

// Write implements io.Writer.
func (s *spanFile) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.size+int64(len(b)) > s.most && s.size > 0 {
		if err := errors.Join(s.f.Close(), os.Rename(s.path, s.path+".1"), s.open()); err != nil {
			return 0, err
		}
	}
	n, err := s.f.Write(b)
	s.size += int64(n)
	return n, err
}

// Close implements io.Closer.
func (s *spanFile) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.f.Close()
}

// span is a line of a file of spans, as OpenTelemetry's stdouttrace writes it.
type span struct {
	Name        string
	SpanContext spanContext
	Parent      spanContext
	StartTime   time.Time
	EndTime     time.Time
	Attributes  []spanAttribute
	Links       []struct{ SpanContext spanContext }
	Status      struct{ Code string }
	Resource    []spanAttribute
}

type spanContext struct{ TraceID, SpanID string }

type spanAttribute struct {
	Key   string
	Value struct{ Value any }
}

func valueOf(all []spanAttribute, key string) string {
	for _, a := range all {
		if a.Key == key {
			return fmt.Sprint(a.Value.Value)
		}
	}
	return ""
}

// step is one span of an event's path, in the JSON of `tidings events find --trace`.
type step struct {
	Step      string     `json:"step"`
	By        string     `json:"by"` // the consumer's name, else the service's
	StartedAt event.Time `json:"started_at"`
	Seconds   float64    `json:"seconds"`
	Error     string     `json:"error,omitempty"` // the error's type
	TraceID   string     `json:"trace_id"`
	SpanID    string     `json:"span_id"`

	took time.Duration
}

func stepOf(s span) step {
	took := s.EndTime.Sub(s.StartTime)
	st := step{Step: s.Name, By: cmp.Or(valueOf(s.Attributes, "messaging.consumer.group.name"), valueOf(s.Resource, "service.name")),
		StartedAt: event.Time{Time: s.StartTime}, Seconds: took.Seconds(),
		TraceID: s.SpanContext.TraceID, SpanID: s.SpanContext.SpanID, took: took}
	if s.Status.Code == "Error" {
		st.Error = valueOf(s.Attributes, "error.type")
	}
	return st
}

// eventPath returns the spans of the event's path from file and from the earlier FILE.1, ordered by
// their start.
func eventPath(file, eventID string, creation trace.SpanContext) (steps []step, err error) {
	created := spanContext{creation.TraceID().String(), creation.SpanID().String()}
	var spans []span
	for _, name := range []string{file + ".1", file} {
		some, err := readSpans(name, created.TraceID)
		if err != nil && (name == file || !errors.Is(err, fs.ErrNotExist)) {
			return nil, err
		}
		spans = append(spans, some...)
	}
	slices.SortStableFunc(spans, func(a, b span) int { return a.StartTime.Compare(b.StartTime) })
	of := map[spanContext]bool{}
	for before := created; ; { // the span of the creation and its ancestors
		of[before] = true
		i := slices.IndexFunc(spans, func(s span) bool { return s.SpanContext == before })
		if i < 0 || of[spans[i].Parent] {
			break
		}
		before = spans[i].Parent
	}
	for _, s := range spans {
		linked := slices.ContainsFunc(s.Links, func(l struct{ SpanContext spanContext }) bool { return l.SpanContext == created })
		if under := of[s.Parent] && (s.Parent == created || valueOf(s.Attributes, "messaging.message.id") == eventID); linked || under {
			of[s.SpanContext] = true
		}
		if of[s.SpanContext] {
			steps = append(steps, stepOf(s))
		}
	}
	return steps, nil
}

// readSpans reads the spans that mention a trace. It skips incomplete lines, which a killed writer
// leaves.
func readSpans(file, traceID string) (spans []span, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read spans: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return spans, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read spans: %w", err)
		}
		var s span
		if bytes.Contains(line, []byte(traceID)) && json.Unmarshal(line, &s) == nil {
			spans = append(spans, s)
		}
	}
}

// printPath prints the path of an event as a table.
func (p Process) printPath(e foundEvent, file string) error {
	if len(e.Path) == 0 {
		_, err := fmt.Fprintf(p.Stderr, "%s has no span of event %s: the event was not sampled, or dev ran without --trace.\n",
			file, e.EventID)
		return err
	}
	rows := [][]string{{"STEP", "BY", "START", "AFTER", "TOOK", "ERROR"}}
	for _, s := range e.Path {
		after := s.StartedAt.Sub(e.Path[0].StartedAt.Time)
		rows = append(rows, []string{s.Step, s.By, s.StartedAt.UTC().Format(event.TimeFormat), after.Round(time.Microsecond).String(),
			s.took.Round(time.Microsecond).String(), s.Error})
	}
	if _, err := fmt.Fprintln(p.Stdout); err != nil {
		return err
	}
	return p.table(rows...)
}

// pathFile returns the file of spans that --trace names, or without a value the file of the running
// dev.
func (p Process) pathFile(flag, data string) (string, error) {
	if flag != traceDefault {
		return traceFile(flag, "")
	}
	in, err := p.instance(data)
	if err != nil {
		return "", fmt.Errorf("%w, or give --trace=FILE", err)
	}
	if in.Trace == "" {
		return "", errors.New("dev runs without --trace: start it with --trace, or give --trace=FILE")
	}
	return in.Trace, nil
}

// addPath sets the path of a found event.
func addPath(e *foundEvent, file string) (err error) {
	if creation := tracing.Parse(e.TraceParent); creation.IsValid() {
		e.Path, err = eventPath(file, e.EventID, creation)
	}
	return err
}
