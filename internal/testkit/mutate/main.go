// Mutate builds each mutant of mutants.txt and runs the test that must fail. It exits with 1 if one
// passes.
//
//	go run ./internal/testkit/mutate [-changed REF] [-run REGEXP] [-quick] [-parallel 1] [-timeout 5m]
//	go run ./internal/testkit/mutate -draw N [-seed 1] [-out FILE] [-parallel 1] [-timeout 5m]
//
// A mutant that does not compile, or whose test does not run, is an error of the list. It leaves
// out the mutants of `make soak`.
//
// With -draw, it draws N mutants by chance instead, and prints which tests find each: a line of the
// edit, the suite, the package, the test and the time, with tabs between. It appends them to the
// file of -out and leaves out those that the file has, so that a run that was stopped continues.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/testkit/mutants"
)

func main() {
	changed := flag.String("changed", "", "only mutants of files that differ from this commit")
	only := flag.String("run", "", "only mutants whose name or package matches this regular expression")
	quick := flag.Bool("quick", false, "only mutants that a test of `make test` finds")
	parallel := flag.Int("parallel", 1, "how many at once")
	limit := flag.Duration("timeout", 5*time.Minute, "of one test")
	draw := flag.Int("draw", 0, "how many mutants to draw by chance, instead of the list's")
	seed := flag.Uint64("seed", 1, "of -draw")
	out := flag.String("out", "", "the file of -draw's results")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if *draw > 0 {
		err = runDrawn(ctx, *draw, *seed, *out, *parallel, *limit)
	} else {
		err = run(ctx, *changed, *only, *quick, *parallel, *limit)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, changed, only string, quick bool, parallel int, limit time.Duration) error {
	root, err := mutants.Root()
	if err != nil {
		return err
	}
	chosen, err := choose(ctx, root, changed, only, quick)
	if err != nil {
		return err
	}
	var bad atomic.Int64
	g := errgroup.Group{}
	g.SetLimit(max(1, parallel))
	for _, m := range chosen {
		g.Go(func() error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			start := time.Now()
			err := try(ctx, root, m, limit)
			took := time.Since(start).Round(time.Second / 10)
			if err != nil {
				bad.Add(1)
				fmt.Printf("BAD    %6s  %s: %v\n", took, m.Name, err)
				return nil
			}
			fmt.Printf("found  %6s  %s (%s)\n", took, m.Name, m.Test)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	fmt.Printf("%d mutants, %d found\n", len(chosen), len(chosen)-int(bad.Load()))
	if bad.Load() > 0 {
		return fmt.Errorf("%d of %d were not found", bad.Load(), len(chosen))
	}
	return nil
}

// choose returns the mutants to run.
func choose(ctx context.Context, root, changed, only string, quick bool) ([]mutants.Mutant, error) {
	all, err := mutants.List()
	if err != nil {
		return nil, err
	}
	wanted, err := regexp.Compile(only)
	if err != nil {
		return nil, err
	}
	var files []string
	if changed != "" {
		cmd := exec.CommandContext(ctx, "git", "diff", "--name-only", changed, "--")
		cmd.Dir = root
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("git diff %s: %w", changed, err)
		}
		files = strings.Fields(string(out))
	}
	return slices.DeleteFunc(all, func(m mutants.Mutant) bool {
		touched := changed == "" || slices.ContainsFunc(m.Edits, func(e mutants.Edit) bool { return slices.Contains(files, e.File) })
		return m.Soak() || quick && m.Tags != "" || !touched || !wanted.MatchString(m.Name) && !wanted.MatchString(m.Package)
	}), nil
}

// try returns nil if the mutant's test fails as it must.
func try(ctx context.Context, root string, m mutants.Mutant, limit time.Duration) error {
	dir, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	overlay, err := mutants.Overlay(root, dir, m.Edits)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-tags", m.Tags, "-count=1", "-vet=off", "-overlay", overlay,
		"-run", "^"+m.Test+"$", "-timeout", limit.String(), m.Package)
	cmd.Dir = root
	output, err := cmd.CombinedOutput()
	out := string(output)
	switch {
	case err == nil && strings.Contains(out, "no tests to run"):
		return fmt.Errorf("%s has not run: are its tags in the list?", m.Test)
	case err == nil:
		return fmt.Errorf("it survives %s", m.Test)
	case strings.Contains(out, "panic: test timed out"):
		if m.Timeout {
			return nil
		}
		return errors.New("the test did not end")
	case strings.Contains(out, "[build failed]") || strings.Contains(out, "[setup failed]"):
		return fmt.Errorf("it does not compile:\n%s", out)
	case !strings.Contains(out, "--- FAIL: "+m.Test) && !strings.Contains(out, "panic: "):
		return fmt.Errorf("%s did not fail:\n%s", m.Test, out)
	case !regexp.MustCompile(m.Output).MatchString(out):
		return fmt.Errorf("%s failed for another reason than %s:\n%s", m.Test, m.Output, out)
	}
	return nil
}
