package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
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
var readers = []string{"cmd/internal/endtoend", "cmd/internal/fuzz", "api", "consumers", "relay", "replay", "erasure"}

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

// Who finds a mutant.
const (
	byTest   = "make test"
	byFaults = "faults"
	byNobody = "nobody"
	notYet   = "not its package's quick tests" // a line of the first step
)

// runDrawn draws n mutants and prints who finds each. It first runs the quick tests of each mutant's package, which find
// most. For the others it then runs those of the packages that import it and of the readers, then its package's fault
// tests.
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
			g.Go(func() error { return d.try(ctx, m, d.own) })
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, m := range chosen {
		if d.have[m.String()] == notYet {
			g.Go(func() error { return d.try(ctx, m, d.others) })
		}
	}
	return g.Wait()
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

// dependents returns the packages whose quick tests may find a mutant of the folder, besides its own.
func (d *drawing) dependents(folder string) (all []string) {
	for name, p := range d.packages {
		tests := slices.Concat(p.TestImports, p.XTestImports)
		if name == folder || len(p.TestGoFiles)+len(p.XTestGoFiles) == 0 {
			continue
		}
		uses := func(path string) bool {
			return path == module+folder || slices.Contains(d.packages[strings.TrimPrefix(path, module)].Deps, module+folder)
		}
		direct := slices.Contains(slices.Concat(p.Imports, tests), module+folder)
		if direct || slices.Contains(readers, name) && (uses(p.ImportPath) || slices.ContainsFunc(tests, uses)) {
			all = append(all, name)
		}
	}
	files := func(name string) int { return len(d.packages[name].TestGoFiles) + len(d.packages[name].XTestGoFiles) }
	slices.SortFunc(all, func(a, b string) int { return cmp.Or(files(a)-files(b), strings.Compare(a, b)) }) // short ones first
	return all
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

// with calls f with the name of an overlay file that has the edit.
func (d *drawing) with(m mutants.Drawn, f func(overlay string) error) error {
	dir, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	e, err := m.Edit(d.root)
	if err != nil {
		return err
	}
	overlay, err := mutants.Overlay(d.root, dir, []mutants.Edit{e})
	if err != nil {
		return err
	}
	return f(overlay)
}

func (d *drawing) tried(m mutants.Drawn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.have[m.String()] != ""
}

func (d *drawing) compiles(ctx context.Context, m mutants.Drawn) (ok bool, err error) {
	if m.Kind == "sql" || d.tried(m) {
		return true, nil
	}
	return ok, d.with(m, func(overlay string) error {
		cmd := exec.CommandContext(ctx, "go", "build", "-overlay", overlay, "./"+m.Folder())
		cmd.Dir = d.root
		ok = cmd.Run() == nil
		return ctx.Err()
	})
}

// try prints who finds the mutant: by, package, test. The function runs tests.
func (d *drawing) try(ctx context.Context, m mutants.Drawn,
	run func(ctx context.Context, folder, overlay string) ([3]string, error)) error {
	began := time.Now()
	var found [3]string
	err := d.with(m, func(overlay string) (err error) {
		found, err = run(ctx, m.Folder(), overlay)
		return err
	})
	if err = cmp.Or(ctx.Err(), err); err != nil {
		return err // a test that was stopped has found nothing
	}
	line := fmt.Sprintf("%s\t%s\t%.0f s\n", m, strings.Join(found[:], "\t"), time.Since(began).Seconds())
	fmt.Print(line)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.have[m.String()] = found[0]
	if d.out != nil {
		_, err = d.out.WriteString(line)
	}
	return err
}

func (d *drawing) own(ctx context.Context, folder, overlay string) (found [3]string, err error) {
	if test := d.test(ctx, overlay, folder); test != "" {
		return [3]string{byTest, folder, test}, nil
	}
	return [3]string{notYet}, nil
}

func (d *drawing) others(ctx context.Context, folder, overlay string) (found [3]string, err error) {
	for _, name := range d.dependents(folder) {
		if test := d.test(ctx, overlay, name); test != "" {
			return [3]string{byTest, name, test}, nil
		}
	}
	only, err := d.faults(folder)
	if err != nil {
		return found, err
	}
	if only != "" {
		if test := d.test(ctx, overlay, folder, "-tags", "faults", "-run", only); test != "" {
			return [3]string{byFaults, folder, test}, nil
		}
	}
	return [3]string{byNobody}, nil
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
