package mutants

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed mutants.txt
var list string

// Mutant is the system without one guard: some texts in its files are replaced.
type Mutant struct {
	Name    string // of the guard that is missing
	Package string // as the go command takes it from the root: ./relay
	Test    string // the top-level test that must fail
	Tags    string // build tags of that test, or ""
	Output  string // a regular expression that the output of the failed test matches, or ""
	Timeout bool   // a test that does not end has found the mutant too
	Edits   []Edit
}

// Edit replaces Before, which occurs once in File, by After.
type Edit struct{ File, Before, After string }

// Soak reports whether only `make soak` runs the test.
func (m Mutant) Soak() bool { return strings.Contains(m.Tags, "soak") }

// List returns all mutants.
func List() ([]Mutant, error) { return parse(list) }

// Of returns the mutants that a test must find.
func Of(test string) ([]Mutant, error) {
	all, err := List()
	var of []Mutant
	for _, m := range all {
		if m.Test == test {
			of = append(of, m)
		}
	}
	if err == nil && len(of) == 0 {
		err = fmt.Errorf("no mutant is for %s", test)
	}
	return of, err
}

// Named returns the mutant with that name.
func Named(name string) (Mutant, error) {
	all, err := List()
	if err != nil {
		return Mutant{}, err
	}
	for _, m := range all {
		if m.Name == name {
			return m, nil
		}
	}
	return Mutant{}, fmt.Errorf("no mutant is named %q", name)
}

// Lines that begin and end the texts of an edit.
const (
	beforeLine = "--- before"
	afterLine  = "--- after"
	endLine    = "--- end"
)

func parse(text string) ([]Mutant, error) {
	var all []Mutant
	var file string
	lines := strings.Split(text, "\n")
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		key, value, _ := strings.Cut(line, " ")
		if line == "" || key == "#" {
			continue
		}
		if key == "mutant" {
			all, file = append(all, Mutant{Name: value}), ""
			continue
		}
		if len(all) == 0 {
			return nil, fmt.Errorf("line %d: before the first mutant: %s", i+1, line)
		}
		m := &all[len(all)-1]
		switch {
		case line == beforeLine:
			before, n := until(lines[i+1:], afterLine)
			after, k := until(lines[min(len(lines), i+1+n):], endLine)
			if n == 0 || k == 0 || file == "" || slices.Contains(strings.Split(after, "\n"), beforeLine) {
				return nil, fmt.Errorf("line %d: an edit without file, after or end", i+1)
			}
			m.Edits = append(m.Edits, Edit{file, before, after})
			i += n + k
		case !m.set(key, value, &file):
			return nil, fmt.Errorf("line %d: not understood: %s", i+1, line)
		}
	}
	return all, nil
}

// set sets a field from its line.
func (m *Mutant) set(key, value string, file *string) bool {
	switch key {
	case "package":
		m.Package = value
	case "test":
		m.Test = value
	case "tags":
		m.Tags = value
	case "output":
		m.Output = value
	case "timeout":
		m.Timeout = value == "finds"
		return m.Timeout
	case "file":
		*file = value
	default:
		return false
	}
	return value != ""
}

// until returns the lines up to end, and how many lines those and end are: 0 if there is no end.
func until(lines []string, end string) (text string, n int) {
	for i, line := range lines {
		if line == end {
			return strings.Join(lines[:i], "\n"), i + 1
		}
	}
	return "", 0
}

// Overlay writes the changed files into dir, and a file for the go command's -overlay, whose name
// it returns. Files of the edits are relative to root, or absolute.
func Overlay(root, dir string, edits []Edit) (string, error) {
	texts := map[string]string{}
	for _, e := range edits {
		name := e.File
		if !filepath.IsAbs(name) {
			name = filepath.Join(root, name)
		}
		if _, is := texts[name]; !is {
			text, err := os.ReadFile(name)
			if err != nil {
				return "", err
			}
			texts[name] = string(text)
		}
		if n := strings.Count(texts[name], e.Before); n != 1 {
			return "", fmt.Errorf("%s has this %d times, not once: update the mutant:\n%s", e.File, n, e.Before)
		}
		texts[name] = strings.Replace(texts[name], e.Before, e.After, 1)
	}
	replace := map[string]string{}
	for name, text := range texts {
		replace[name] = filepath.Join(dir, fmt.Sprintf("%d_%s", len(replace), filepath.Base(name)))
		if err := os.WriteFile(replace[name], []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	data, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	return file, os.WriteFile(file, data, 0o600)
}

// Root returns the repository's root: the nearest folder from the working directory upwards that
// has a go.mod.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", fmt.Errorf("no go.mod above the working directory")
		}
		dir = up
	}
}
