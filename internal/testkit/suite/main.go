// Suite runs one shard of a suite: of the tests of `make test` (quick), of the fault tests, or of
// all. A fault test is a test in a file with the build tag `faults`.
//
//	go run ./internal/testkit/suite [-race] [-shard 2/4] [-record] quick|faults|all
//
// Shards are sets of packages of about the same time, as seconds.txt has it; -record writes that
// file. -race runs the tests with the race detector. Each shard has a seed (TIDINGS_TEST_SEED, or
// else a new one) and prints it, so a shard runs again with the same choices.
package main

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	timeout = "20m" // of a package
	waiting = "6"   // fault tests of a package that run at once: most wait. Under the race detector they compute
	seconds = "internal/testkit/suite/seconds.txt"
)

//go:embed seconds.txt
var recorded string // lines of suite, package, seconds

// suite is a choice of tests.
type suite struct {
	name string // quick, faults, all
	race bool   // with the race detector
}

func (s suite) String() string {
	if s.race {
		return "race-" + s.name
	}
	return s.name
}

// measured is the suite's name in seconds.txt. A shard of the fault tests is the same packages with
// the race detector and without.
func (s suite) measured() string {
	if s.name == "faults" {
		return s.name
	}
	return s.String()
}

// tag returns the build tag of the suite's files.
func (s suite) tag() string {
	if s.name == "quick" {
		return ""
	}
	return "faults"
}

// pkg is a package and the tests of it that a suite runs.
type pkg struct {
	path  string
	tests string        // a regular expression, or "" for all
	takes time.Duration // at the last measurement, then in this run
}

func main() {
	shard := flag.String("shard", "1/1", "which shard of how many")
	record := flag.Bool("record", false, "write "+seconds)
	race := flag.Bool("race", false, "with the race detector")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, suite{flag.Arg(0), *race}, *shard, *record); err != nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, s suite, shard string, record bool) error {
	var i, n int
	if _, err := fmt.Sscanf(shard, "%d/%d", &i, &n); err != nil || i < 1 || i > n {
		return fmt.Errorf("the shard is %q: want one like 2/4", shard)
	}
	if !slices.Contains([]string{"quick", "faults", "all"}, s.name) {
		return fmt.Errorf("the suite is %q: want quick, faults or all", s.name)
	}
	all, err := list(ctx, s)
	if err != nil {
		return err
	}
	seed := cmp.Or(os.Getenv("TIDINGS_TEST_SEED"), fmt.Sprint(rand.Uint64()))
	mine := deal(all, n)[i-1]
	fmt.Printf("%s, shard %s: %d packages, TIDINGS_TEST_SEED=%s\n", s, shard, len(mine), seed)
	began := time.Now()
	err = test(ctx, s, seed, mine)
	fmt.Printf("%s, shard %s: %s, TIDINGS_TEST_SEED=%s\n", s, shard, time.Since(began).Round(time.Second), seed)
	if err == nil && record {
		return write(s, mine)
	}
	return err
}

// list returns the packages of a suite.
func list(ctx context.Context, s suite) (all []*pkg, err error) {
	took := measurements(recorded)
	cmd := exec.CommandContext(ctx, "go", "list", "-json=ImportPath,Dir,TestGoFiles,XTestGoFiles", "-tags", s.tag(), "./...")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath, Dir           string
			TestGoFiles, XTestGoFiles []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		tests, err := names(p.Dir, append(p.TestGoFiles, p.XTestGoFiles...), s.name == "faults")
		if err != nil {
			return nil, err
		}
		if len(tests) == 0 {
			continue
		}
		only := ""
		if s.name == "faults" {
			only = "^(" + strings.Join(tests, "|") + ")$"
		}
		all = append(all, &pkg{path: p.ImportPath, tests: only, takes: cmp.Or(took[s.measured()+" "+p.ImportPath], 5*time.Second)})
	}
}

var (
	tagged   = regexp.MustCompile(`(?m)^//go:build .*\bfaults\b`)
	function = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Example)\w*)\(`)
)

// names returns the tests in the files, or only in those with the tag.
func names(dir string, files []string, faults bool) (all []string, err error) {
	for _, name := range files {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		if faults && !tagged.Match(text) {
			continue
		}
		for _, m := range function.FindAllSubmatch(text, -1) {
			if string(m[1]) != "TestMain" {
				all = append(all, string(m[1]))
			}
		}
	}
	return all, nil
}

// deal gives each package, the longest first, to the shard that has least. A shard begins with its
// longest.
func deal(all []*pkg, n int) [][]*pkg {
	slices.SortFunc(all, func(a, b *pkg) int { return cmp.Or(cmp.Compare(b.takes, a.takes), cmp.Compare(a.path, b.path)) })
	shards, sums := make([][]*pkg, n), make([]time.Duration, n)
	for _, p := range all {
		i := slices.Index(sums, slices.Min(sums))
		shards[i], sums[i] = append(shards[i], p), sums[i]+p.takes
	}
	return shards
}

// test runs the packages, one more at a time than there are processors, because tests wait as well
// as compute.
func test(ctx context.Context, s suite, seed string, mine []*pkg) error {
	var group errgroup.Group
	group.SetLimit(runtime.NumCPU() + 1)
	var printing sync.Mutex
	var failed []string
	for _, p := range mine {
		group.Go(func() error {
			args := []string{"test", "-tags", s.tag(), "-count=1", "-timeout", timeout}
			if s.race && raceDetector(ctx) {
				args = append(args, "-race")
			} else {
				args = append(args, "-parallel", waiting)
			}
			if p.tests != "" {
				args = append(args, "-run", p.tests)
			}
			cmd := exec.CommandContext(ctx, "go", append(args, p.path)...)
			cmd.Env = append(os.Environ(), "TIDINGS_TEST_SEED="+seed, "GORACE=atexit_sleep_ms=100 "+os.Getenv("GORACE"))
			began := time.Now()
			out, err := cmd.CombinedOutput()
			p.takes = time.Since(began)
			printing.Lock()
			defer printing.Unlock()
			_, _ = os.Stdout.Write(out)
			if err != nil {
				failed = append(failed, p.path)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("failed: %s", strings.Join(failed, " "))
	}
	return nil
}

// raceDetector reports whether this machine has the C compiler that the race detector needs.
var raceDetector = func() func(ctx context.Context) bool {
	var once sync.Once
	var has bool
	return func(ctx context.Context) bool {
		once.Do(func() {
			out, err := exec.CommandContext(ctx, "go", "env", "CGO_ENABLED", "CC").Output()
			enabled, compiler, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
			if words := strings.Fields(compiler); err == nil && enabled == "1" && len(words) > 0 {
				_, err := exec.LookPath(words[0])
				has = err == nil
			}
			if !has {
				fmt.Println("this machine has no C compiler, so the tests run without the race detector")
			}
		})
		return has
	}
}()

func measurements(text string) map[string]time.Duration {
	took := map[string]time.Duration{}
	for line := range strings.Lines(text) {
		var name, path string
		var s float64
		if n, _ := fmt.Sscan(line, &name, &path, &s); n == 3 {
			took[name+" "+path] = time.Duration(s * float64(time.Second))
		}
	}
	return took
}

func write(s suite, mine []*pkg) error {
	took := measurements(recorded)
	for _, p := range mine {
		took[s.measured()+" "+p.path] = p.takes
	}
	var out strings.Builder
	for _, key := range slices.Sorted(maps.Keys(took)) {
		fmt.Fprintf(&out, "%s %.0f\n", key, took[key].Seconds())
	}
	return os.WriteFile(seconds, []byte(out.String()), 0o644)
}
