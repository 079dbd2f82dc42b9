package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/internal/testkit"
)

// postmaster returns the process id of dev's PostgreSQL.
func (d *dev) postmaster(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(d.dir, "postgres", "data", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestDevStopsAndGoesOn(t *testing.T) {
	t.Parallel()
	d := newDevWithPostgres(t)
	if err := os.RemoveAll(d.dir); err != nil { // so that dev creates its database
		t.Fatal(err)
	}
	d.start(t)
	before, pid := d.instance(t), d.postmaster(t)
	for _, name := range []string{instanceFile, stateFile} {
		if info, err := os.Stat(filepath.Join(d.dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	natsURL, err := url.Parse(before.NATSURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("its NATS refuses whoever does not know the password", func(t *testing.T) {
		if nc, err := nats.Connect(before.NATSURL, nats.Timeout(arriveWithin)); err != nil {
			t.Errorf("with the URL of dev.json: %v", err)
		} else {
			nc.Close()
		}
		if strings.Contains(strings.ToLower(d.errors()), "password") {
			t.Errorf("dev warns of its own password:\n%s", d.errors())
		}
		for _, user := range []*url.Userinfo{nil, url.User(natsURL.User.Username()), url.UserPassword(natsURL.User.Username(), "guessed")} {
			stranger := url.URL{Scheme: natsURL.Scheme, User: user, Host: natsURL.Host}
			nc, err := nats.Connect(stranger.String(), nats.Timeout(arriveWithin))
			if err == nil {
				nc.Close()
			}
			if !errors.Is(err, nats.ErrAuthorization) {
				t.Errorf("a connection as %q: %v, want %v", user, err, nats.ErrAuthorization)
			}
		}
	})
	verify := func() {
		t.Helper()
		if code, stdout, stderr := run(t, nil, "", "verify", "--data", d.dir); code != exitOK {
			t.Errorf("verify: exit code %d\n%s%s", code, stdout, stderr)
		}
	}
	verify()
	if code, stdout, stderr := run(t, nil, "", "doctor", "--wait", arriveWithin.String(), "--data", d.dir); code != exitOK ||
		stdout != "No findings.\n" {
		t.Errorf("doctor: exit code %d\n%s%s", code, stdout, stderr)
	}

	t.Run("another dev with the same data says so", func(t *testing.T) {
		other := &dev{dir: d.dir, env: d.env}
		<-awaitEnd(t, other)
		want := "another `tidings dev` (process " + strconv.Itoa(d.cmd.Process.Pid) + ") uses " + d.dir
		if got := other.errors(); other.err == nil || !strings.Contains(got, want) || strings.Count(got, "\n") != 1 {
			t.Errorf("%v: %s\nwant one line with %q", other.err, got, want)
		}
	})

	d.stop(t)
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("PostgreSQL, process %d, is there after Ctrl-C: %v", pid, err)
	}
	if _, err := net.Dial("tcp", natsURL.Host); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("NATS after Ctrl-C: %v, want %v", err, syscall.ECONNREFUSED)
	}

	if code, _, stderr := run(t, nil, "", "status", "--data", d.dir); code != exitError ||
		!strings.Contains(stderr, "has ended. Start it again") || !strings.Contains(stderr, "or set DATABASE_URL and NATS_URL") {
		t.Errorf("status without a dev: exit code %d, %s", code, stderr)
	}

	d.start(t)
	after := d.instance(t)
	before.PID = after.PID
	if before != after {
		t.Errorf("after a stop and a start dev is %+v, it was %+v", after, before)
	}

	left := d.postmaster(t)
	d.kill(t)
	if err := syscall.Kill(left, 0); err != nil {
		t.Fatalf("PostgreSQL did not outlive its dev, so that this test shows nothing: %v", err)
	}
	d.start(t)
	after = d.instance(t)
	before.PID = after.PID
	if before != after {
		t.Errorf("after a kill and a start dev is %+v, it was %+v", after, before)
	}
	verify()
	if pid := d.postmaster(t); pid == left {
		t.Errorf("PostgreSQL is still process %d", pid)
	}
}

func TestDevEndsAtOnceAtASecondSignal(t *testing.T) {
	t.Parallel()
	d := newDevWithPostgres(t)
	d.start(t)
	pid := d.postmaster(t)
	for range 2 {
		if err := d.cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
	}
	_ = d.signal(t, os.Interrupt) // the exit code is 0 if dev ended before the second signal
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("PostgreSQL, process %d, is there: %v", pid, err)
	}
	d.start(t)
}

// TestDevLeavesADatabaseWithTablesOfOthersAlone: DATABASE_URL may be left over from another
// program.
func TestDevLeavesADatabaseWithTablesOfOthersAlone(t *testing.T) {
	t.Parallel()
	db, nats := testkit.EmptyPostgres(t), testkit.NATS(t)
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }() // it only reads
	if _, err := conn.Exec(t.Context(), `CREATE SCHEMA shop; CREATE TABLE shop.orders (id int)`); err != nil {
		t.Fatal(err)
	}
	tables := func() (n int) {
		if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	var name string
	if err := conn.QueryRow(t.Context(), `SELECT current_database()`).Scan(&name); err != nil {
		t.Fatal(err)
	}
	cfg := nats.Config()
	env := []string{"DATABASE_URL=" + db.URL, "NATS_URL=" + nats.URL, "NATS_STREAM=" + cfg.Stream, "NATS_SUBJECT_PREFIX=" + cfg.Prefix,
		"NATS_LIVE_PREFIX=" + cfg.LivePrefix}
	d := newDev(t, env...)
	ready := d.launch(t)
	select {
	case <-ready:
		t.Errorf("dev has started, and %d tables are in the database of others", tables())
	case <-d.done:
	case <-time.After(startWithin):
		t.Fatalf("dev did not end:\n%s", d.errors())
	}
	d.cmd = nil // it has ended
	if text := d.errors(); !strings.Contains(text, name) || !strings.Contains(text, "1 table of others") ||
		!strings.Contains(text, "--shared-database") || tables() > 0 {
		t.Errorf("%d tables of dev, and it says:\n%s", tables(), text)
	}

	told := newDev(t, env...)
	told.args = []string{"--shared-database"}
	told.start(t)
	if !strings.Contains(told.output(), name) {
		t.Errorf("dev does not name the database:\n%s", told.output())
	}
	told.stop(t)
	again := newDev(t, env...) // the database has Tidings' tables now
	again.start(t)
}

// TestDevPrintsLinesThatWork runs the printed curl lines, which a person would paste.
func TestDevPrintsLinesThatWork(t *testing.T) {
	t.Parallel()
	d := newDev(t, "DEV_TOKEN=chosen-by-hand")
	d.start(t)
	if got := d.instance(t).Token; got != "chosen-by-hand" {
		t.Errorf("the token is %q", got)
	}
	var statuses []int
	for line := range strings.Lines(d.output()) {
		args, ok := strings.CutPrefix(strings.TrimSpace(line), "curl ")
		if !ok {
			continue
		}
		// Spaces separate arguments, and text between single quotes is one argument.
		method, body, header := http.MethodGet, "", http.Header{}
		var address string
		var words []string
		for i, part := range strings.Split(args, "'") {
			if i%2 == 1 {
				words = append(words, part)
			} else {
				words = append(words, strings.Fields(part)...)
			}
		}
		for i := 0; i < len(words); i++ {
			switch words[i] {
			case "-X":
				i++
				method = words[i]
			case "-H":
				i++
				name, value, _ := strings.Cut(words[i], ": ")
				header.Set(name, value)
			case "-d":
				i++
				method, body = http.MethodPost, words[i]
			default:
				address = words[i]
			}
		}
		req, err := http.NewRequestWithContext(t.Context(), method, address, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header = header
		req.Close = true
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil {
			t.Fatal(err)
		}
		statuses = append(statuses, resp.StatusCode)
	}
	if want := []int{http.StatusCreated, http.StatusOK, http.StatusCreated}; !slices.Equal(statuses, want) {
		t.Errorf("the lines answer %v, want %v:\n%s", statuses, want, d.output())
	}
	in := d.instance(t)
	if !strings.Contains(d.output(), " "+in.NATSURL+"\n") {
		t.Errorf("the greeting lacks the URL of NATS, %s:\n%s", in.NATSURL, d.output())
	}
	if !strings.Contains(d.output(), in.Console) || !strings.Contains(d.output(), in.ConsoleToken) {
		t.Errorf("the greeting lacks the console's address %s or its token %s:\n%s", in.Console, in.ConsoleToken, d.output())
	}
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Jar: jar, Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	testkit.Eventually(t, "signing in to lead to a page on which everything has its leases", func() (bool, error) {
		resp, err := client.PostForm(in.Console+"sign-in", url.Values{"token": {in.ConsoleToken}})
		if err != nil {
			return false, err
		}
		defer resp.Body.Close()
		page, err := io.ReadAll(resp.Body)
		if err != nil || resp.Request.URL.Path != "/console/" || !strings.Contains(string(page), "Truth and outbox") {
			return false, fmt.Errorf("signing in leads to %s, %w: %s", resp.Request.URL, err, page)
		}
		return !strings.Contains(string(page), "nobody runs it"), nil
	})
}

// awaitEnd starts a dev that must fail, and waits for its end.
func awaitEnd(t *testing.T, d *dev) <-chan struct{} {
	t.Helper()
	d.launch(t)
	return d.done
}

func TestTheLockWaitsForADevThatIsDying(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the wait has a limit, which a busy machine may reach
		dir := t.TempDir()
		dying, err := lockData(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		// The kernel closes a killed process's files after a while; its id remains in the lock
		// file.
		if err := os.WriteFile(dying.Name(), []byte("4194304\n"), 0o600); err != nil { // above every process number (proc(5), pid_max)
			t.Fatal(err)
		}
		time.AfterFunc(100*time.Millisecond, func() { _ = dying.Close() })
		next, err := lockData(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := unlock(next); err != nil {
			t.Error(err)
		}
		if b, err := os.ReadFile(dying.Name()); err != nil || len(b) > 0 {
			t.Errorf("after a clean stop the lock has %q, %v", b, err)
		}
	})
}

func TestDevSaysWhichPortIsTaken(t *testing.T) {
	t.Parallel()
	for _, variable := range []string{"API_ADDR", "OPS_ADDR"} {
		t.Run(variable, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			d := newDev(t, variable+"="+l.Addr().String())
			<-awaitEnd(t, d)
			d.cmd = nil
			want := "tidings: another program uses " + l.Addr().String() + ": stop it, or set " + variable + " to another address"
			if got := d.errors(); d.err == nil || !strings.Contains(got, want) || strings.Count(got, "\n") != 1 {
				t.Errorf("%v: %s\nwant one line with %q", d.err, got, want)
			}
		})
	}
}
