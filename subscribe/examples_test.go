package subscribe_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
)

// buildOutside builds the examples, and the two programs of docs/subscribe.md, in a module of their
// own, which cannot import internal packages. It returns the directory of the programs.
func buildOutside(t *testing.T, names ...string) string {
	t.Helper()
	dir, root := t.TempDir(), ".."
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	ours := regexp.MustCompile(`(?m)^module .*$`).ReplaceAll(mod, []byte("module example.com/outside"))
	ours = append(ours, fmt.Sprintf("\nrequire github.com/tidings/tidings v0.0.0\n\nreplace github.com/tidings/tidings => %s\n", here)...)
	copyTo := func(name string, text []byte) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	copyTo("go.mod", ours)
	sum, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	copyTo("go.sum", sum)
	page, err := os.ReadFile(filepath.Join(root, "docs", "subscribe.md"))
	if err != nil {
		t.Fatal(err)
	}
	programs := regexp.MustCompile("(?s)```go\n(package main\n.*?)```").FindAllSubmatch(page, -1)
	if len(programs) != 2 {
		t.Fatalf("docs/subscribe.md has %d programs, want 2", len(programs))
	}
	copyTo("first/main.go", programs[0][1])
	copyTo("followers/main.go", programs[1][1])
	for _, name := range names {
		files, err := filepath.Glob(filepath.Join(root, "examples", name, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("example %s: %d files, %v", name, len(files), err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if lines := bytes.Count(text, []byte("\n")); lines >= 100 {
				t.Errorf("%s has %d lines, want fewer than 100", f, lines)
			}
			copyTo(name+"/"+filepath.Base(f), text)
		}
	}
	build := exec.Command("go", "build", "-o", "bin/", "./...")
	build.Dir, build.Env = dir, append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return filepath.Join(dir, "bin")
}

// program is an example that runs as a process; kill sends it SIGKILL.
type program struct {
	t    testing.TB
	path string
	env  []string
	out  *os.File
	cmd  *exec.Cmd
	errs bytes.Buffer
}

func (p *program) start() {
	p.t.Helper()
	p.cmd = exec.Command(p.path)
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = append(os.Environ(), p.env...), p.out, &p.errs
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
}

// connected reports whether the program has opened a connection. Before that it may not handle
// signals yet.
func (p *program) connected() (bool, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.cmd.Process.Pid))
	return slices.ContainsFunc(files, func(file string) bool {
		to, _ := os.Readlink(file) // the program may have closed it
		return strings.HasPrefix(to, "socket:")
	}), err
}

func (p *program) end(s os.Signal) error {
	p.t.Helper()
	if s != syscall.SIGKILL {
		testkit.Eventually(p.t, "the program to run", p.connected)
	}
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
	return p.cmd.Wait()
}

// truth has the expected effects of the published events.
type truth struct {
	versions map[event.ID]int64 // of followees
	comments map[string]event.Child
	posts    map[event.ID]int64 // events
}

var commentNames = event.ChildNames{ID: "comment_id", Parent: "post_id"}

func (w *truth) write(r *rig, rng *rand.Rand, n int) {
	for range n {
		to := event.IDOf(1 + rng.IntN(50))
		if rng.IntN(4) == 0 {
			to = "auth0|" + to
		}
		w.versions[to]++
		post := 1 + rng.Int64N(20)
		id := uuid.NewSHA1(uuid.NameSpaceOID, fmt.Appendf(nil, "%d-%d", post, rng.IntN(10))).String()
		w.posts[event.IDOf(post)]++
		c := event.Child{ID: id, Parent: event.IDOf(post), AuthorID: "7", AuthorState: event.AuthorActive,
			ModerationState: event.ModerationNone, Version: w.comments[id].Version + 1, Actor: "test"}
		c.Body = fmt.Sprintf("word%d", c.Version)
		w.comments[id] = c
		payload, err := c.Encode(commentNames)
		if err != nil {
			r.t.Fatal(err)
		}
		r.publish(follow("9", to, w.versions[to]), event.Event{ID: uuid.NewString(), TenantID: 1,
			AggregateType: event.AggregateComment, AggregateID: event.IDOf(post),
			Type: event.Edited, Version: 1, OccurredAt: time.Now(), Payload: payload})
	}
}

// indexed reports whether the search example has indexed everything that was written.
func (w *truth) indexed(ctx context.Context, pool *pgxpool.Pool) (bool, error) {
	var id, body string
	var version int64
	right := 0
	rows, _ := pool.Query(ctx, `SELECT comment_id::text, version, body FROM documents`)
	if _, err := pgx.ForEachRow(rows, []any{&id, &version, &body}, func() error {
		if w.comments[id].Version == version && body == fmt.Sprintf("word%d", version) {
			right++
		}
		return nil
	}); err != nil || right != len(w.comments) {
		return false, fmt.Errorf("%d of %d comments are right: %w", right, len(w.comments), err)
	}
	return true, nil
}

// exact reports whether the search example has indexed everything that was written, and has applied
// each event once.
func (w *truth) exact(ctx context.Context, pool *pgxpool.Pool) (bool, error) {
	if ok, err := w.indexed(ctx, pool); !ok {
		return false, err
	}
	var post event.ID
	var events int64
	right := 0
	rows, _ := pool.Query(ctx, `SELECT post_id, events FROM activity`)
	if _, err := pgx.ForEachRow(rows, []any{&post, &events}, func() error {
		if events > w.posts[post] {
			return fmt.Errorf("post %s has %d events, want %d: at least one was applied twice", post, events, w.posts[post])
		}
		if events == w.posts[post] {
			right++
		}
		return nil
	}); err != nil || right != len(w.posts) {
		return false, fmt.Errorf("%d of %d posts are right: %w", right, len(w.posts), err)
	}
	return true, nil
}

// mails reads the output of the mailer example.
func (w *truth) mails(t *testing.T, file string) *diary {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d := newDiary()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var to, from event.ID
		var version int64
		if _, err := fmt.Sscanf(lines.Text(), "to user %s user %s follows you (version %d)", &to, &from, &version); err != nil {
			t.Errorf("%q: %v", lines.Text(), err)
		}
		to = to[:len(to)-1] // the colon
		d.versions[to] = append(d.versions[to], version)
	}
	return d
}

// awaitMails waits until the mailer has printed each mail at least once.
func (w *truth) awaitMails(t *testing.T, printed string) {
	t.Helper()
	testkit.Eventually(t, "every mail", func() (bool, error) {
		d := w.mails(t, printed)
		for to, last := range w.versions {
			seen := map[int64]bool{}
			for _, v := range d.versions[to] {
				seen[v] = true
			}
			if int64(len(seen)) != last {
				return false, fmt.Errorf("user %s has %d mails, want %d", to, len(seen), last)
			}
		}
		return true, nil
	})
}

// backfills begins another index from an export when the streams have lost their beginnings. The
// export breaks off once.
func (w *truth) backfills(r *rig, rng *rand.Rand, path string) {
	t, ctx := r.t, context.Background()
	positions := r.positions()
	w.write(r, rng, 30) // in the export, and also on the streams
	ids := slices.Sorted(maps.Keys(w.comments))
	exports := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, q *http.Request) {
		rw.Header().Set("Content-Type", "application/x-ndjson")
		lines := json.NewEncoder(rw)
		_ = lines.Encode(map[string]any{"export": map[string]any{"kind": "comment", "tenant": "1", "cursor": "c", "streams": positions}})
		after := q.URL.Query().Get("after")
		if q.Header.Get("Authorization") != "Bearer secret" || after != "" && q.URL.Query().Get("cursor") != "c" {
			t.Errorf("request %s", q.URL)
		}
		for i, id := range ids {
			if after == "" && i == len(ids)/2 {
				return // the export breaks off
			}
			if id <= after {
				continue
			}
			data, err := w.comments[id].Encode(commentNames)
			if err != nil {
				t.Error(err)
			}
			_ = lines.Encode(map[string]any{"after": id, "type": "tidings.comment.created.v1",
				"subject": w.comments[id].Parent, "data": json.RawMessage(data)})
		}
		_ = lines.Encode(map[string]string{"end": "done"})
	}))
	defer exports.Close()
	for _, p := range positions {
		stream, err := r.js.Stream(ctx, p.Stream)
		if err != nil {
			t.Fatal(err)
		}
		testkit.Expire(t, stream, p.Sequence+1)
	}
	pool, url := r.schema("another")
	search := &program{t: t, path: path, env: []string{"NATS_URL=" + r.b.URL, "DATABASE_URL=" + url,
		"API_URL=" + exports.URL, "API_TOKEN=secret"}}
	search.start()
	r.await("the index to begin", func() (bool, error) {
		var begun bool
		err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM consumer_offsets)`).Scan(&begun)
		return begun, err
	})
	w.write(r, rng, 30)
	r.await("an index from an export", func() (bool, error) { return w.indexed(ctx, pool) })
	if err := search.end(syscall.SIGTERM); err != nil {
		t.Errorf("search with a backfill: %v: %s", err, &search.errs)
	}
}

// tryPage runs the program of the page. The returned function waits for a line of its output, and
// stops it as a user does.
func tryPage(t *testing.T, path, url string) (tried func()) {
	t.Helper()
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), "NATS_URL="+url)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		line, err := bufio.NewReader(out).ReadString('\n')
		if !strings.Contains(line, "user 9 follows you") || err != nil {
			t.Errorf("the program of docs/subscribe.md prints %q, %v", line, err)
		}
		_ = cmd.Process.Signal(os.Interrupt)
		if _, err := io.Copy(io.Discard, out); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("the program of docs/subscribe.md: %v", err)
		}
	}
}

// counted reports whether the page's projection has counted one follower of each user: user 9
// follows them all again and again.
func (w *truth) counted(ctx context.Context, pool *pgxpool.Pool) (bool, error) {
	rows, _ := pool.Query(ctx, `SELECT user_id, followers FROM follower_counts`)
	var user event.ID
	var followers int64
	right := 0
	if _, err := pgx.ForEachRow(rows, []any{&user, &followers}, func() error {
		if w.versions[user] > 0 && followers == 1 {
			right++
		}
		return nil
	}); err != nil || right != len(w.versions) {
		return false, fmt.Errorf("%d of %d users have one follower: %w", right, len(w.versions), err)
	}
	return true, nil
}

// counts runs the projection of docs/subscribe.md over everything that was published, stops and
// starts it, and retries its dead letter.
func (w *truth) counts(r *rig, path string) {
	t, ctx := r.t, context.Background()
	pool, url := r.schema("followers")
	r.publish(damaged("1000"))
	p := &program{t: t, path: path, env: []string{"NATS_URL=" + r.b.URL, "DATABASE_URL=" + url}}
	p.start()
	r.await("a dead letter", func() (bool, error) {
		var n int
		err := pool.QueryRow(ctx, `SELECT count(*) FROM consumer_dead_letters`).Scan(&n)
		return n == 1, err
	})
	stopped := func() {
		t.Helper()
		if err := p.end(os.Interrupt); err != nil {
			t.Errorf("followers, stopped: %v: %s", err, &p.errs)
		}
	}
	stopped()
	w.versions["2000"] = 1
	r.publish(follow("9", "2000", 1))
	p.start()
	r.await("the counts", func() (bool, error) { return w.counted(ctx, pool) })
	stopped()
	retry := exec.Command(path, "retry")
	retry.Env = append(os.Environ(), "DATABASE_URL="+url)
	got, err := retry.CombinedOutput()
	if err != nil || !strings.Contains(string(got), "user 1000: decode the payload") ||
		!strings.Contains(string(got), "applied 0, 1 left") {
		t.Errorf("followers retry: %s, %v", got, err)
	}
}
