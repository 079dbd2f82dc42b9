package daemon_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/testkit"
)

// TestMain also runs as the binary that the tests of Main start.
func TestMain(m *testing.M) {
	if behavior := os.Getenv("DAEMON_TEST"); behavior != "" {
		daemon.Main("example", func(ctx context.Context, env envconfig.Lookuper) error {
			fmt.Println("running")
			switch behavior {
			case "fails":
				return errors.New("open the pool: no route\nto host")
			case "succeeds":
				return nil
			case "stops":
				<-ctx.Done()
				slog.InfoContext(ctx, "drained")
				return nil
			case "returns the context's error":
				<-ctx.Done()
				return fmt.Errorf("wait for work: %w", ctx.Err())
			case "fails while it stops":
				<-ctx.Done()
				return errors.New("drain: disk full")
			default: // hangs
				select {}
			}
		})
	}
	testkit.Main(m)
}

func TestMainExit(t *testing.T) {
	for _, c := range []struct {
		behavior string
		signals  int
		code     int
		logs     string
	}{
		{"succeeds", 0, 0, ""},
		{"fails", 0, 1, "ended"},
		{"stops", 1, 0, "drained"},
		{"returns the context's error", 1, 0, "stopping; a second signal kills"},
		{"fails while it stops", 1, 1, "ended"},
		{"hangs", 2, -1, "stopping; a second signal kills"},
	} {
		t.Run(c.behavior, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), "DAEMON_TEST="+c.behavior)
			pipe, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			cmd.Stdout = cmd.Stderr // one stream: "running", then the log
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var stderr bytes.Buffer
			sent, started := 0, false
			for lines := bufio.NewScanner(pipe); lines.Scan(); {
				line := lines.Text()
				if strings.Contains(line, `"msg":"starting"`) {
					if started = true; !strings.Contains(line, `"version":"`) {
						t.Errorf("%s has no version", line)
					}
					continue
				}
				if line != "running" {
					fmt.Fprintln(&stderr, line)
				}
				if sent < c.signals { // after "running", and after "stopping"
					sent++
					if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
						t.Fatal(err)
					}
				}
			}
			_ = cmd.Wait() // the exit code is checked below
			if !started {
				t.Error("it does not log its start")
			}
			if got := cmd.ProcessState.ExitCode(); got != c.code {
				t.Errorf("exit code %d, want %d; log: %s", got, c.code, &stderr)
			}
			if c.logs == "" {
				if stderr.Len() > 0 {
					t.Errorf("it logs %s", &stderr)
				}
				return
			}
			for line := range strings.Lines(stderr.String()) {
				var got struct{ Msg, Binary string }
				if err := json.Unmarshal([]byte(line), &got); err != nil {
					t.Fatalf("the log is not JSON: %s", &stderr)
				}
				if got.Msg == c.logs && got.Binary == "example" {
					return
				}
			}
			t.Errorf("the log lacks %q: %s", c.logs, &stderr)
		})
	}
}

func TestUnknownLogLevelIsRefused(t *testing.T) {
	if _, _, err := daemon.NewLogger(io.Discard, daemon.LogConfig{Level: "loud"}); err == nil ||
		!strings.Contains(err.Error(), "LOG_LEVEL") {
		t.Errorf("error %v, want one that names LOG_LEVEL", err)
	}
	var b bytes.Buffer
	log, _, err := daemon.NewLogger(&b, daemon.LogConfig{Level: "warn"})
	if err != nil {
		t.Fatal(err)
	}
	log.Info("quiet")
	log.Warn("heard")
	if got := strings.Count(b.String(), "\n"); got != 1 {
		t.Errorf("%d lines at level warn: %s", got, &b)
	}
}

// get returns the status and the body of one request on its own connection.
func get(t *testing.T, url string) (int, string) {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestOpsAnswers(t *testing.T) {
	reg := prometheus.NewRegistry()
	daemon.NewOps("test", "127.0.0.1:0", reg, slog.New(slog.DiscardHandler))
	ops := daemon.NewOps("test", "127.0.0.1:0", reg, slog.New(slog.DiscardHandler)) // a second one on the same registry is allowed
	addr, err := ops.Listen()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- ops.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	base := "http://" + addr.String()

	if code, body := get(t, base+"/healthz"); code != 200 || body != `{"status":"ok"}`+"\n" {
		t.Errorf("/healthz: %d %s", code, body)
	}
	if code, body := get(t, base+"/readyz"); code != 200 || body != `{"status":"ok"}`+"\n" {
		t.Errorf("/readyz without checks: %d %s", code, body)
	}
	if _, body := get(t, base+"/metrics"); !strings.Contains(body, "go_goroutines") ||
		!strings.Contains(body, "process_resident_memory_bytes") {
		t.Errorf("/metrics lacks the metrics of the Go runtime: %s", body)
	}
	ops.Host("", slog.Default()).Ready(map[string]func(context.Context) error{
		"postgres": func(context.Context) error { return nil },
		"nats":     func(context.Context) error { return errors.New("no servers") },
		"hangs":    func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	})
	ops.Host("jobs", slog.Default())
	code, body := get(t, base+"/readyz")
	var got any
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"status": "unavailable", "failing": []any{
		map[string]any{"check": "hangs", "error": "context deadline exceeded"},
		map[string]any{"check": "jobs: start", "error": "starting"},
		map[string]any{"check": "nats", "error": "no servers"},
	}}
	if d := cmp.Diff(want, got); code != http.StatusServiceUnavailable || d != "" {
		t.Errorf("/readyz: %d %s", code, d)
	}
	ops.Host("api", slog.Default()).Ready(map[string]func(context.Context) error{"port": func(context.Context) error { return nil }})
	for part, want := range map[string]int{"api": 200, "jobs": 503, "nobody": 404, "ap": 404} {
		if code, body := get(t, base+"/readyz?part="+part); code != want {
			t.Errorf("/readyz of the part %s: %d %s, want %d", part, code, body, want)
		}
	}
}

func TestServeLetsRequestsInFlightFinish(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	entered, release := make(chan struct{}), make(chan struct{})
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(entered)
		<-release
		_, _ = io.WriteString(w, "whole")
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended, answered := make(chan error, 1), make(chan string, 1)
	go func() { ended <- daemon.Serve(ctx, l, h, 100, slog.New(slog.DiscardHandler)) }()
	go func() {
		_, body := get(t, "http://"+l.Addr().String())
		answered <- body
	}()
	<-entered
	cancel()
	close(release)
	if body := <-answered; body != "whole" {
		t.Errorf("the answer is %q", body)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestTakenAddressIsAnError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	log := slog.New(slog.DiscardHandler)
	if _, err := daemon.Listen(l.Addr().String(), "", "", log); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("serve: %v", err)
	}
	if err := daemon.NewOps("test", l.Addr().String(), prometheus.NewRegistry(),
		log).Run(t.Context()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("ops: %v", err)
	}
}

// TestLogLinesAreForPeople checks that durations have readable units, and that errors of nats.go
// are in an operator's words.
func TestLogLinesAreForPeople(t *testing.T) {
	var b strings.Builder
	log, _, err := daemon.NewLogger(&b, daemon.LogConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for d, want := range map[time.Duration]string{0: "0s", 12345: "12.35µs", 7 * time.Millisecond: "7ms", 123456789: "123.46ms",
		1534567890: "1.53s", -90 * time.Second: "-1m30s", 36 * time.Hour: "36h0m0s"} {
		b.Reset()
		log.With("ttl", d).Info("x", "wait", d, slog.Group("g", "waited", d))
		if got := strings.Count(b.String(), `"`+want+`"`); got != 3 {
			t.Errorf("%d: want %q three times in %s", d, want, b.String())
		}
	}
	b.Reset()
	err = fmt.Errorf("read stream EVENTS-0: %w", nats.ErrReconnectBufExceeded)
	log.Info("x", "err", err)
	if got := daemon.Plain(err); got != "read stream EVENTS-0: NATS is unreachable" || !strings.Contains(b.String(), `"err":"`+got+`"`) {
		t.Errorf("%q: %s", got, b.String())
	}
}
