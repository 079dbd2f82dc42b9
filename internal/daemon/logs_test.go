package daemon_test

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/daemon"
)

// logged parses lines of JSON and keeps them.
type logged struct {
	mu    sync.Mutex
	lines []map[string]any
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var line map[string]any
	if err := json.Unmarshal(p, &line); err != nil {
		return 0, err
	}
	l.lines = append(l.lines, line)
	return len(p), nil
}

// take returns the level, the message, n and repeated of the lines since the last call.
func (l *logged) take() (all []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		all = append(all, strings.TrimSuffix(fmt.Sprintln(line["level"], line["msg"], line["n"], line["repeated"]), "\n"))
	}
	l.lines = nil
	return all
}

func newLogger(t *testing.T, w io.Writer) (*slog.Logger, func()) {
	t.Helper()
	log, flush, err := daemon.NewLogger(w, daemon.LogConfig{Format: "json"})
	if err != nil {
		t.Fatal(err)
	}
	return log, flush
}

func TestAMessageIsWrittenOnceIn10Seconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &logged{}
		log, flush := newLogger(t, w)
		expect := func(after time.Duration, want ...string) {
			t.Helper()
			time.Sleep(after) // on the clock of the synctest bubble
			synctest.Wait()
			if diff := cmp.Diff(want, w.take()); diff != "" {
				t.Errorf("after %s (-want +got):\n%s", time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)), diff)
			}
		}
		one, other := log.With("component", "one"), log.With("component", "other")
		for n := range 4 {
			one.Warn("trying again", "n", n)
		}
		one.Error("trying again", "n", 4)  // another level
		other.Warn("trying again", "n", 5) // another component
		one.Warn("another", "n", 6)
		for n := range 2 {
			one.Info("request", "n", n) // each line reports another fact
		}
		expect(0, "WARN trying again 0 <nil>", "ERROR trying again 4 <nil>", "WARN trying again 5 <nil>", "WARN another 6 <nil>",
			"INFO request 0 <nil>", "INFO request 1 <nil>")
		expect(9999 * time.Millisecond)
		one.Warn("trying again", "n", 7)
		expect(time.Millisecond, "WARN trying again 7 4") // the last of four suppressed lines
		one.Warn("trying again", "n", 8)
		expect(9999 * time.Millisecond)
		expect(time.Millisecond, "WARN trying again 8 1")
		expect(10 * time.Second)
		one.Warn("trying again", "n", 9) // it was quiet for 10 s
		expect(0, "WARN trying again 9 <nil>")

		one.Warn("trying again", "n", 10)
		flush()
		flush()
		expect(0, "WARN trying again 10 1")
		expect(time.Minute)
	})
}

// The report of repetitions has the attributes of the last line, and those of its logger.
func TestARepetitionKeepsItsAttributes(t *testing.T) {
	w := &logged{}
	log, flush := newLogger(t, w)
	log = log.With("component", "relay").WithGroup("g").With("tenant", 7)
	log.Error("m", "id", 1)
	log.Error("m", "id", 2)
	flush()
	if got := w.lines[1]; len(w.lines) != 2 || got["component"] != "relay" || fmt.Sprint(got["g"]) != "map[id:2 repeated:1 tenant:7]" {
		t.Errorf("%v", w.lines)
	}
}

func TestManyMessagesTakeLittleMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &logged{}
		log, _ := newLogger(t, w)
		const lines = 100_000
		var all sync.WaitGroup
		for g := range 4 {
			all.Go(func() {
				for n := g; n < lines; n += 4 {
					log.Warn(fmt.Sprint("message ", n))
				}
			})
		}
		all.Wait()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		written, repeated := 0, 0
		for _, line := range w.lines {
			if n, ok := line["repeated"].(float64); ok {
				repeated += int(n)
			} else {
				written++
			}
		}
		if len(w.lines) > 1_100 || written+repeated != lines {
			t.Errorf("%d lines that report %d, want %d", len(w.lines), written+repeated, lines)
		}
	})
}

func TestTheFormatOfLogLines(t *testing.T) {
	for format, want := range map[string]string{"": `{"time":`, "json": `{"time":`, "text": "time="} {
		var b strings.Builder
		log, _, err := daemon.NewLogger(&b, daemon.LogConfig{Format: format})
		if err != nil {
			t.Fatal(err)
		}
		log.Info("x")
		if !strings.HasPrefix(b.String(), want) {
			t.Errorf("LOG_FORMAT=%s writes %s", format, b.String())
		}
	}
	if _, _, err := daemon.NewLogger(io.Discard, daemon.LogConfig{Format: "xml"}); err == nil ||
		err.Error() != `LOG_FORMAT is "xml": want text or json` {
		t.Errorf("error %v", err)
	}
}
