package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/ops/erasure"
)

func TestLoadCommand(t *testing.T) {
	var sent atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/kinds" {
			_, _ = io.WriteString(w,
				`{"objects":[{"name":"user","plural":"users"},{"name":"post","plural":"posts"}],
				"children":[{"name":"comment","plural":"comments","parent":"post"}],
				"edges":[{"name":"follow","plural":"follows","from":"user","to":"user","ends":["follower_id","followee_id"]},
				{"name":"pin","plural":"pins","from":"user","to":"post","ends":["user_id","post_id"]}]}`)
			return
		}
		var body struct{ Operations []struct{} }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		sent.Add(int64(len(body.Operations)))
		_, _ = io.WriteString(w, `{"items":[`+strings.TrimSuffix(strings.Repeat(`{"status":201},`, len(body.Operations)), ",")+`]}`)
	}))
	defer srv.Close()
	data, file := t.TempDir(), filepath.Join(t.TempDir(), "edges")
	content, err := json.Marshal(instance{API: srv.URL, Token: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	if err := writeFile(filepath.Join(data, instanceFile), content); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("1 2\r\n2 3\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, stdin string
		args        []string
		code        int
		sent        int64
		says        string // part of stderr, or of stdout when the code is 0
	}{
		{name: "a file", args: []string{file}, sent: 2, says: "created        2"},
		{name: "stdin", args: []string{"-"}, stdin: "1 2\n", sent: 1, says: "created        1"},
		{name: "generated, as JSON", args: []string{"--generate", "users=10,edges=20,seed=1", "--json"}, sent: 20, says: `"created":20`},
		{name: "a malformed line", args: []string{"-"}, stdin: "1 2\n# c\n1 tw/o\n1 3\n", code: 2, sent: 1,
			says: `tidings: line 3: "tw/o" is not an id: 1 to 128`},
		{name: "a self-follow", args: []string{"-"}, stdin: "4 4\n", code: 2, says: "tidings: line 1: the edge leads from 4 to itself"},
		{name: "another kind, whose ends are two objects", args: []string{"-", "--kind", "pin"}, stdin: "4 4\n", sent: 1,
			says: "created        1"},
		{name: "another kind, generated", args: []string{"--kind", "pin", "--generate", "users=3,posts=2,edges=6,seed=1"}, sent: 6,
			says: "created        6"},
		{name: "another kind's objects", args: []string{"--kind", "pin", "--generate", "users=3,edges=6"}, code: 2, says: "posts is 0"},
		{name: "a kind that there is not", args: []string{"-", "--kind", "nonsense"}, code: 2, says: `the API has no kind "nonsense"`},
		{name: "a file of children", args: []string{file, "--kind", "comment"}, code: 2, says: "comment is a kind of children"},
		{name: "no such file", args: []string{file + "x"}, code: 2, says: "no such file"},
		{name: "neither file nor generate", code: 2, says: "either a FILE"},
		{name: "two sources", args: []string{"--generate", "users=3,edges=3", file}, code: 2, says: "either a FILE"},
		{name: "threads that cannot be", args: []string{"--kind", "comment", "--generate", "posts=0,comments=3"},
			code: 2, says: "posts is 0"},
		{name: "a graph that cannot be", args: []string{"--generate", "users=2,edges=3"}, code: 2, says: "want 1 to 2"},
		{name: "too many at a time", args: []string{file, "--concurrency", "0"}, code: 2, says: "concurrency is 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			sent.Store(0)
			code, stdout, stderr := run(t, nil, c.stdin, append([]string{"load", "--data", data}, c.args...)...)
			says := stderr
			if c.code == 0 {
				says = stdout
			}
			if code != c.code || sent.Load() != c.sent || !strings.Contains(says, c.says) {
				t.Errorf("exit code %d, %d sent\nstdout: %s\nstderr: %s\nwant code %d, %d sent, and %q", code, sent.Load(), stdout,
					stderr, c.code, c.sent, c.says)
			}
		})
	}
	if code, _, stderr := run(t, nil, "", "load", file, "--data", t.TempDir()); code != 1 ||
		!strings.Contains(stderr, "no `tidings dev` is running here") {
		t.Errorf("without a dev: exit code %d, %s", code, stderr)
	}
}

// TestAFileOfAnotherDevSaysSo has files that a dev left behind: it ended, or another server has its
// address or its process id now.
func TestAFileOfAnotherDevSaysSo(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"title":"Unauthorized","status":401,"code":"unauthenticated","detail":"no such token"}`)
	}))
	defer srv.Close()
	ended := exec.Command("true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	file := filepath.Join(data, instanceFile)
	for _, c := range []struct {
		pid   int
		flags []string
		want  []string
		not   string
	}{
		{ended.Process.Pid, nil, []string{file + ": the `tidings dev` that wrote this file", "has ended. Start it again",
			"or give --url and --token"}, "does not know it"},
		{os.Getpid(), nil, []string{"401", "The token is that of " + file + ", and " + srv.URL + " does not know it"}, ""},
		{os.Getpid(), []string{"--url", srv.URL}, []string{"401", "The token is that of " + file}, ""},
		{os.Getpid(), []string{"--token", "mine"}, []string{"401", "no such token"}, file},
	} {
		if err := (instance{API: srv.URL, Token: "secret", PID: c.pid}).write(data); err != nil {
			t.Fatal(err)
		}
		for _, command := range [][]string{{"load", "-"}, {"demo", "--duration", "1m"}} {
			args := slices.Concat(command, []string{"--data", data}, c.flags)
			code, stdout, stderr := run(t, nil, "1 2\n", args...)
			for _, want := range c.want {
				if code != exitError || !strings.Contains(stderr, want) || c.not != "" && strings.Contains(stderr, c.not) {
					t.Errorf("%v: exit code %d\n%s%s\nwant %q, and not %q", args, code, stdout, stderr, want, c.not)
				}
			}
		}
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{
		{"nonsense"}, {"load", "--nonsense"}, {"load", "a", "b"}, {"dlq", "nonsense"}, {"dlq", "consumer", "nonsense"},
		{"repair", "nonsense"}, {"token", "nonsense"}, {"bench", "nonsense"}, {"verify", "--wait", "-1s"}, {"verify", "--limit", "-1"},
	} {
		if code, _, stderr := run(t, nil, "", args...); code != exitInput || stderr == "" {
			t.Errorf("%v: exit code %d, %q", args, code, stderr)
		}
	}
	for args, want := range map[string]string{
		"load a b": "got 2 arguments, want `tidings load (FILE |", "outbox retry": "got 0 arguments, want `tidings outbox retry ID...`",
		"outbox kill":          "got 0 arguments, want `tidings outbox kill ID... --reason REASON`",
		"pause followercounts": "got 1 argument, want `tidings pause --consumer NAME`",
		"dlq outbox list a":    "want `tidings dlq outbox list`",
		"outbox list a":        "want `tidings outbox list`", "dev a": "want `tidings dev`", "consumers": "Did you mean this?\n  consume\n",
		"kinds aply f --yes": "unknown command \"aply\" for \"tidings kinds\". Similar: apply\n",
		"dlq list --json":    `unknown command "list" for "tidings dlq"`, "dlq --json": "unknown flag: --json",
		"outbox show 7 --no": "unknown flag: --no",
	} {
		if code, _, stderr := run(t, nil, "", strings.Fields(args)...); code != exitInput || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit code %d, %q, want %q", args, code, stderr, want)
		}
	}
	if code, stdout, _ := run(t, nil, "", "help"); code != exitOK || !strings.Contains(stdout, "load") {
		t.Errorf("help: exit code %d, %q", code, stdout)
	}
	if code, stdout, _ := run(t, nil, "", "dlq"); code != exitOK || !strings.Contains(stdout, "tidings dlq [command]") {
		t.Errorf("dlq: exit code %d, %q", code, stdout)
	}
	if code, stdout, _ := run(t, nil, "", "status", "--help"); code != exitOK || !strings.Contains(stdout, "--data directory") {
		t.Errorf("status --help: exit code %d, %q", code, stdout)
	}
}

func TestACommandThatASignalStopsDoesNotNameTheStatementThatItMet(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := &cobra.Command{}
	c.SetContext(ctx)
	statement := fmt.Errorf("read outbox stats: limit the wait for locks: %w", ctx.Err())
	for _, given := range []struct {
		err  error
		code int
		want string
	}{
		{statement, exitError, "tidings: stopped before the end\n"},
		{fmt.Errorf("%w: %w", erasure.ErrUnfinished, statement), exitAgain, "tidings: " + erasure.ErrUnfinished.Error()},
		{errors.New("another error"), exitError, "tidings: another error\n"},
	} {
		var stderr strings.Builder
		code := Process{Stderr: &stderr}.exitCode(c, given.err, true)
		if code != given.code || !strings.HasPrefix(stderr.String(), given.want) {
			t.Errorf("%v: exit code %d, %q, want %d, %q", given.err, code, &stderr, given.code, given.want)
		}
	}
}

func TestADirectoryThatCannotBeUsedIsNamedWithTheFlagThatChangesIt(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"dev", "status"} {
		code, _, stderr := run(t, nil, "", command, "--data", file)
		if code != exitError || !strings.Contains(stderr, file) || !strings.Contains(stderr, "with --data") {
			t.Errorf("%s: exit code %d, %q", command, code, stderr)
		}
	}
}

func TestCount(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1234: "-1,234", -123: "-123"} {
		if got := count(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
