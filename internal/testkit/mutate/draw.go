package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/testkit/mutants"
)

const module = "github.com/tidings/tidings/"

// readers are the packages whose tests run the whole system or large parts of it.
var readers = []string{"cmd/internal/endtoend", "cmd/internal/fuzz", "api", "consumers", "relay", "ops/replay", "ops/erasure"}

// drawing runs mutants that are drawn by chance.
type drawing struct {
	root     string
	limit    time.Duration
	packages map[string]pkg

	mu   sync.Mutex
	out  *os.File          // or nil
	have map[string]string // of each mutant in out: the second field of its last line
}

type pkg struct {
	ImportPath, Dir                           string
	Deps, Imports, TestImports, XTestImports  []string
	TestGoFiles, XTestGoFiles, IgnoredGoFiles []string
}

// The finders of a mutant.
const (
	foundByTest   = "make test"
	foundByFaults = "faults"
	notFound      = "nobody"
	notTried      = "not its package's quick tests" // a line of the first step
)

// runDrawn draws n mutants and prints who finds each. It first runs the quick tests of each
// mutant's package, which find most. For the others it then runs those of the packages that import
// it and of the readers, then its package's fault tests. A test that does not end has found the
// mutant.
func runDrawn(ctx context.Context, n int, seed uint64, out string, parallel int, limit time.Duration) error {
	root, err := mutants.Root()
	if err != nil {
		return err
	}
	d := drawing{root: root, limit: limit, have: map[string]string{}}
	if d.packages, err = listPackages(ctx, root); err != nil {
		return err
	}
	if out != "" {
		if err := d.open(out); err != nil {
			return err
		}
		defer func() { _ = d.out.Close() }()
	}
	all, err := mutants.Draw(root, seed)
	if err != nil {
		return err
	}
	var chosen []mutants.Drawn
	var g errgroup.Group
	g.SetLimit(max(1, parallel))
	for _, m := range all {
		if len(chosen) == n || ctx.Err() != nil {
			break
		}
		if compiles, err := d.compiles(ctx, m); err != nil {
			return errors.Join(err, g.Wait())
		} else if !compiles {
			continue
		}
		chosen = append(chosen, m)
		if !d.tried(m) {
			g.Go(func() error { return d.own(ctx, m) })
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return d.others(ctx, slices.DeleteFunc(chosen, func(m mutants.Drawn) bool { return d.have[m.String()] != notTried }), parallel)
}

// open reads the results of the runs before, and opens the file to append those of this one.
func (d *drawing) open(name string) error {
	text, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Split(line, "\t"); len(fields) > 1 {
			d.have[fields[0]] = fields[1]
		}
	}
	d.out, err = os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	return err
}

func listPackages(ctx context.Context, root string) (map[string]pkg, error) {
	cmd := exec.CommandContext(ctx, "go", "list",
		"-json=ImportPath,Dir,Deps,Imports,TestImports,XTestImports,TestGoFiles,XTestGoFiles,IgnoredGoFiles", "./...")
	cmd.Dir = root
	data, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	all := map[string]pkg{}
	for dec := json.NewDecoder(bytes.NewReader(data)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all[strings.TrimPrefix(p.ImportPath, module)] = p
	}
}

// dependents returns the packages whose quick tests may find a mutant of the folder, besides its
// own. All that use a database use the migrations.
func (d *drawing) dependents(folder string) (all []string) {
	for name, p := range d.packages {
		tests := slices.Concat(p.TestImports, p.XTestImports)
		if name == folder || len(p.TestGoFiles)+len(p.XTestGoFiles) == 0 {
			continue
		}
		uses := func(imported string) bool {
			return imported == module+folder || slices.Contains(d.packages[strings.TrimPrefix(imported, module)].Deps, module+folder)
		}
		direct := slices.Contains(slices.Concat(p.Imports, tests), module+folder)
		inRoom := slices.ContainsFunc(mutants.Rooms, func(room string) bool { ok, _ := path.Match(room, name); return ok })
		schema := folder == "migrations" && inRoom && slices.Contains(tests, module+"internal/testkit")
		if direct || schema || slices.Contains(readers, name) && (uses(p.ImportPath) || slices.ContainsFunc(tests, uses)) {
			all = append(all, name)
		}
	}
	return all
}

// inOrder puts the readers first, because they find most, then the packages with few test files.
func (d *drawing) inOrder(names []string) []string {
	rank := func(name string) int {
		if slices.Contains(readers, name) {
			return 0
		}
		return 1 + len(d.packages[name].TestGoFiles) + len(d.packages[name].XTestGoFiles)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(rank(a)-rank(b), strings.Compare(a, b)) })
	return names
}

var faultTest = regexp.MustCompile(`(?m)^func (Test\w+)\(`)

// faults returns a regular expression of the package's fault tests, or "".
func (d *drawing) faults(folder string) (string, error) {
	var names []string
	for _, file := range d.packages[folder].IgnoredGoFiles {
		text, err := os.ReadFile(filepath.Join(d.root, folder, file))
		if err != nil {
			return "", err
		}
		if strings.HasPrefix(string(text), "//go:build faults\n") {
			for _, m := range faultTest.FindAllStringSubmatch(string(text), -1) {
				names = append(names, m[1])
			}
		}
	}
	if len(names) == 0 {
		return "", nil
	}
	return "^(" + strings.Join(names, "|") + ")$", nil
}

// with calls f with the name of an overlay file that has the edits.
func (d *drawing) with(all []mutants.Drawn, f func(overlay string) error) error {
	dir, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var edits []mutants.Edit
	for _, m := range all {
		e, err := m.Edit(d.root)
		if err != nil {
			return err
		}
		edits = append(edits, e)
	}
	overlay, err := mutants.Overlay(d.root, dir, edits)
	if err != nil {
		return err
	}
	return f(overlay)
}

func (d *drawing) state(m mutants.Drawn) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.have[m.String()]
}

func (d *drawing) tried(m mutants.Drawn) bool { return d.state(m) != "" }

func (d *drawing) compiles(ctx context.Context, m mutants.Drawn) (ok bool, err error) {
	if m.Kind == "sql" || d.tried(m) {
		return true, nil
	}
	return ok, d.with([]mutants.Drawn{m}, func(overlay string) error {
		cmd := exec.CommandContext(ctx, "go", "build", "-overlay", overlay, "./"+m.Folder())
		cmd.Dir = d.root
		ok = cmd.Run() == nil
		return ctx.Err()
	})
}

// own runs the quick tests of the mutant's package.
func (d *drawing) own(ctx context.Context, m mutants.Drawn) error {
	began := time.Now()
	found, err := d.find(ctx, []mutants.Drawn{m}, m.Folder())
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return d.record(m, time.Since(began), notTried, "", "")
	}
	return d.record(m, time.Since(began), foundByTest, m.Folder(), found[m])
}

// step is a part of the search for those who find mutants: tests of packages, and the mutants that
// each may find.
type step struct {
	by    string
	may   map[string][]mutants.Drawn // by package
	flags map[string][]string        // of go test, by package
}

// others runs the quick tests of other packages, then the fault tests.
func (d *drawing) others(ctx context.Context, left []mutants.Drawn, parallel int) error {
	began := time.Now()
	quick := step{by: foundByTest, may: map[string][]mutants.Drawn{}}
	faults := step{by: foundByFaults, may: map[string][]mutants.Drawn{}, flags: map[string][]string{}}
	for _, m := range left {
		for _, name := range d.dependents(m.Folder()) {
			quick.may[name] = append(quick.may[name], m)
		}
		only, err := d.faults(m.Folder())
		if err != nil {
			return err
		}
		if only != "" {
			faults.may[m.Folder()] = append(faults.may[m.Folder()], m)
			faults.flags[m.Folder()] = []string{"-tags", "faults", "-run", only}
		}
	}
	for _, s := range []step{quick, faults} {
		if err := d.take(ctx, s, began, parallel); err != nil {
			return err
		}
	}
	for _, m := range left {
		if d.state(m) == notTried {
			if err := d.record(m, time.Since(began), notFound, "", ""); err != nil {
				return err
			}
		}
	}
	return nil
}

// take runs the tests of a step. A package tests all its mutants that nobody has found yet at once.
func (d *drawing) take(ctx context.Context, s step, began time.Time, parallel int) error {
	var g errgroup.Group
	g.SetLimit(max(1, parallel))
	for _, folder := range d.inOrder(slices.Collect(maps.Keys(s.may))) {
		g.Go(func() error {
			left := slices.DeleteFunc(s.may[folder], func(m mutants.Drawn) bool { return d.state(m) != notTried })
			found, err := d.find(ctx, left, folder, s.flags[folder]...)
			for m, test := range found {
				if d.state(m) == notTried {
					err = errors.Join(err, d.record(m, time.Since(began), s.by, folder, test))
				}
			}
			return err
		})
	}
	return g.Wait()
}

// find returns the mutants that the package's tests find, each with a test that fails. It tests all
// mutants at once, and their halves only if a test fails.
func (d *drawing) find(ctx context.Context, all []mutants.Drawn, folder string, flags ...string) (map[mutants.Drawn]string, error) {
	if len(all) == 0 {
		return nil, nil
	}
	var test string
	if err := d.with(all, func(overlay string) error {
		test = d.test(ctx, overlay, folder, flags...)
		return ctx.Err() // a test that was stopped has found nothing
	}); ctx.Err() != nil || err != nil && len(all) == 1 { // edits side by side do not fit into one overlay
		return nil, cmp.Or(ctx.Err(), err)
	} else if err == nil && test == "" {
		return nil, nil
	}
	if len(all) == 1 {
		return map[mutants.Drawn]string{all[0]: test}, nil
	}
	found, err := d.find(ctx, all[:len(all)/2], folder, flags...)
	if err != nil {
		return nil, err
	}
	more, err := d.find(ctx, all[len(all)/2:], folder, flags...)
	if found == nil {
		return more, err
	}
	maps.Copy(found, more)
	return found, err
}

// record prints a result and appends it to the file.
func (d *drawing) record(m mutants.Drawn, took time.Duration, by, folder, test string) error {
	line := fmt.Sprintf("%s\t%s\t%s\t%s\t%.0f s\n", m, by, folder, test, took.Seconds())
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Print(line)
	d.have[m.String()] = by
	if d.out == nil {
		return nil
	}
	_, err := d.out.WriteString(line)
	return err
}

var failed = regexp.MustCompile(`--- FAIL: (Test[^\s/]+)`)

// test returns the test of the package that fails, or "".
func (d *drawing) test(ctx context.Context, overlay, folder string, flags ...string) string {
	args := append([]string{"test", "-failfast", "-vet=off", "-parallel", "6", "-timeout", d.limit.String(), "-overlay", overlay}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, "./"+folder)...)
	cmd.Dir = d.root
	// After an interrupt, go test ends its tests. A kill would leave them.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	out, err := cmd.CombinedOutput()
	if err == nil {
		return ""
	}
	switch name := failed.FindSubmatch(out); {
	case bytes.Contains(out, []byte("panic: test timed out")):
		return "timeout"
	case name != nil:
		return string(name[1])
	case bytes.Contains(out, []byte("panic: ")):
		return "panic"
	}
	return "its start" // TestMain
}
