//go:build upgrade

package deploy_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/migrations"
)

// checkOut writes the files of a commit to a new directory and returns its path.
func checkOut(t *testing.T, commit string) string {
	t.Helper()
	dir, archive := t.TempDir(), filepath.Join(t.TempDir(), "archive.tar")
	for _, args := range [][]string{{"git", "-C", "..", "archive", "--output", archive, commit}, {"tar", "-xf", archive, "-C", dir}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	return dir
}

// release is a directory with the binaries of one release and a subscriber's program.
type release struct{ name, dir string }

// rollout is a fleet that runs binaries of two releases.
type rollout struct {
	*fleet
	source        string // the files of the previous release
	before, after release
	running       map[string][]*process // by the binary's name, in the order of their starts
	balancer      *balancer
}

func newRollout(t *testing.T) *rollout {
	source := checkOut(t, previous(t, ".."))
	r := &rollout{fleet: emptyFleet(t, testkit.EmptyPostgres(t)), source: source, before: release{"before", t.TempDir()},
		after: release{"after", t.TempDir()}, running: map[string][]*process{}, balancer: newBalancer()}
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	for of, root := range map[release]string{r.before: source, r.after: root} {
		files := map[string]string{filepath.Join(root, "deploy/subscriber/main.go"): absolute(t, "testdata/subscriber/main.go")}
		if of == r.after {
			nextMigrations(t, root, files)
		}
		overlay, err := json.Marshal(map[string]any{"Replace": files})
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(of.dir, "overlay.json")
		if err := os.WriteFile(path, overlay, 0o600); err != nil {
			t.Fatal(err)
		}
		packages := []string{"-overlay", path, "./deploy/subscriber", "./cmd/tidings"}
		for _, name := range binaries {
			packages = append(packages, "./cmd/"+name)
		}
		build(t, root, of.dir, packages...)
	}
	t.Logf("the builds of both releases took %s", time.Since(start).Round(time.Second))
	return r
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

var madeTable = regexp.MustCompile(`(?m)^CREATE TABLE (?:IF NOT EXISTS )?([a-z_]+) \(`)

// nextMigrations adds migrations below root to files: each table gets a column, as the next release
// might do. So the test has a newer schema even if this tree has the same migrations as the
// previous release.
func nextMigrations(t *testing.T, root string, files map[string]string) {
	t.Helper()
	dir, columns := t.TempDir(), 0
	for _, set := range []migrations.Set{migrations.Outbox, migrations.Truth, migrations.Projections, migrations.Consumers} {
		made, err := filepath.Glob(filepath.Join(root, "migrations", string(set), "*.sql"))
		if err != nil || len(made) == 0 {
			t.Fatalf("%d migrations of %s, %v", len(made), set, err)
		}
		next := migrations.Latest(set)
		for _, file := range made {
			sql, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range madeTable.FindAllSubmatch(sql, -1) {
				next, columns = next+1, columns+1
				name := fmt.Sprintf("%05d_%s.sql", next, m[1])
				path := filepath.Join(dir, string(set)+name)
				if err := os.WriteFile(path, fmt.Appendf(nil, "-- +goose Up\nALTER TABLE %s ADD COLUMN IF NOT EXISTS "+
					"of_the_next_release text;\n", m[1]), 0o600); err != nil {
					t.Fatal(err)
				}
				files[filepath.Join(root, "migrations", string(set), name)] = path
			}
		}
	}
	if columns < 30 {
		t.Fatalf("madeTable found only %d tables in the migrations, which create more", columns)
	}
}

// by makes the fleet use the binaries of a release.
func (r *rollout) by(of release) *fleet {
	r.dir = of.dir
	return r.fleet
}

// begin migrates with the previous release, and runs its fleet with two relays and two partitions.
func (r *rollout) begin() {
	r.by(r.before).makeLogins()
	r.setPasswords("")
	r.users = r.natsUsers(r.before)
	r.b = testkit.NATSWith(r.t, r.users)
	for _, who := range append([]string{"relay"}, binaries...) {
		r.begun(who, r.before)
	}
	r.tidings("partitions", "resize", "--to", "2", "--yes")
	if _, err := r.db.Pool(r.t, postgres.RoleOwner).Exec(r.t.Context(), `CREATE SCHEMA svc`); err != nil {
		r.t.Fatal(err)
	}
}

// natsUsers returns the NATS users that a release prints.
func (r *rollout) natsUsers(of release) string {
	r.t.Helper()
	return r.by(of).run(nil, "nats", "users", "--subscriber", "name=svc,durable,filter=follow.*")
}

// begun starts a binary of a release beside the running ones, and waits until it is ready.
func (r *rollout) begun(who string, of release) *process {
	r.t.Helper()
	p := r.by(of).launch(who)
	r.ready(who+" of the release "+of.name, p)
	r.running[who] = append(r.running[who], p)
	if p.api != "" {
		r.balancer.add(p.api)
	}
	return p
}

// stop ends the oldest process of a binary. An API gets no further requests and stops on SIGTERM;
// any other binary is killed.
func (r *rollout) stop(who string) {
	r.t.Helper()
	p := r.running[who][0]
	r.running[who] = r.running[who][1:]
	if p.api == "" {
		p.Kill()
		return
	}
	r.balancer.remove(r.t, p.api)
	p.Signal(syscall.SIGTERM)
	if code := p.AwaitEnd(); code != 0 {
		r.t.Errorf("%s ended with exit code %d", who, code)
	}
}

// replace starts a binary of a release, waits until it and the older processes have worked side by
// side, and ends the oldest.
func (r *rollout) replace(who string, with release) {
	r.t.Helper()
	start := time.Now()
	r.begun(who, with)
	if who == "relay" {
		r.stop(who) // one of three relays would be idle, because there are two partitions
	}
	r.bothWork(who)
	if who != "relay" {
		r.stop(who)
	}
	r.t.Logf("%s of the release %s took over in %s", who, with.name, time.Since(start).Round(100*time.Millisecond))
}

// work has the metric by which each binary counts its work.
var work = map[string]string{"relay": "tidings_outbox_published_total", "followercounts": "tidings_consumer_applied_total",
	"threadcache": "tidings_consumer_applied_total", "archiver": "tidings_consumer_applied_total"}

// bothWork waits until each process of a binary has done some new work.
func (r *rollout) bothWork(who string) {
	r.t.Helper()
	done := func(p *process) (float64, error) {
		if p.api != "" {
			return float64(r.balancer.served(p.api)), nil
		}
		return r.metric(p, work[who])
	}
	for i, p := range r.running[who] {
		begun, err := done(p)
		if err != nil {
			r.t.Fatal(err)
		}
		const enough = 20
		testkit.Eventually(r.t, fmt.Sprintf("%s number %d to work", who, i), func() (bool, error) {
			now, err := done(p)
			return now >= begun+enough, err
		})
	}
}

// metric returns a metric of a process of either release, summed over all labels.
func (r *rollout) metric(p *process, name string) (sum float64, err error) {
	resp, err := r.client.Get("http://" + p.ops + "/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("/metrics: %s", resp.Status)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), name)
		if ok && rest != "" && (rest[0] == '{' || rest[0] == ' ') {
			v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
			if err != nil {
				return 0, err
			}
			sum += v
		}
	}
	return sum, lines.Err()
}

// subscriber is a program outside Tidings, built with the packages of a release.
type subscriber struct {
	*testkit.Process
	out testkit.Output
}

func (r *rollout) subscriber(of release, how string) *subscriber {
	r.t.Helper()
	user := map[string]string{"handle": "svc", "project": "consumer"}[how]
	cmd, s := exec.Command(filepath.Join(of.dir, "subscriber"), how), &subscriber{}
	cmd.Env = append(os.Environ(), "NATS_URL="+r.natsURL(user), "NATS_INBOX_PREFIX=_INBOX_"+user,
		"DATABASE_URL="+r.db.URL+separator(r.db.URL)+"search_path=svc", "RELEASE="+of.name)
	cmd.Stdout = &s.out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	s.Process = testkit.Spawn(r.t, "subscriber "+how+" of the release "+of.name, cmd)
	return s
}

func separator(url string) string {
	if strings.Contains(url, "?") {
		return "&"
	}
	return "?"
}

func (s *subscriber) events() []string { return strings.Fields(s.out.String()) }

// await waits until count returns a number above more.
func (r *rollout) await(what string, count func() (int, error), more int) {
	r.t.Helper()
	testkit.Eventually(r.t, what, func() (bool, error) {
		n, err := count()
		return n > more, err
	})
}

// projected returns a function that counts the events that a release's subscriber has applied.
func (r *rollout) projected(of release) func() (int, error) {
	pool := r.db.Pool(r.t, postgres.RoleOwner)
	return func() (n int, err error) {
		return n, pool.QueryRow(context.WithoutCancel(r.t.Context()), `SELECT count(*) FROM svc.seen WHERE release = $1`, of.name).Scan(&n)
	}
}
