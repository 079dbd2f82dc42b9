package archtest_test

import (
	"flag"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write api.txt")

// TestTheAPIFileHasTheExportedIdentifiers compares api.txt with the packages in supported, so a
// review shows each change that a program of others may notice. It reads the compiler's export
// data: only this has the types of variables, and the methods of a type behind an alias.
// (apidiff of golang.org/x/exp compares such data, but writes no text that a reviewer could read.)
func TestTheAPIFileHasTheExportedIdentifiers(t *testing.T) {
	var is []string
	for _, name := range supported {
		is = append(is, exported(t, name)...)
	}
	const file = "../../api.txt"
	if *update {
		if err := os.WriteFile(file, []byte(strings.Join(is, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	was := strings.Split(strings.TrimSpace(string(source(t, file))), "\n")
	changed := false
	for sign, lines := range map[string][2][]string{"-": {was, is}, "+": {is, was}} {
		for _, line := range lines[0] {
			if !slices.Contains(lines[1], line) {
				changed = true
				t.Errorf("%s %s", sign, line)
			}
		}
	}
	if changed {
		t.Error("the API changed: run make api, and add a line to CHANGELOG.md")
	}
	if len(is) < 300 {
		t.Errorf("%d identifiers", len(is))
	}
}

// exported returns a line for each exported identifier of a package, with those of a type that an
// alias makes part of it.
func exported(t *testing.T, name string) (lines []string) {
	t.Helper()
	cmd := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", module+name)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	files := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		files[path] = file
	}
	pkg, err := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(files[path])
	}).Import(module + name)
	if err != nil {
		t.Fatal(err)
	}
	in := func(other *types.Package) string {
		if other == pkg {
			return ""
		}
		return strings.TrimPrefix(other.Path(), module)
	}
	add := func(line string) { lines = append(lines, name+": "+strings.ReplaceAll(line, "\n", " ")) }
	for _, id := range pkg.Scope().Names() {
		object := pkg.Scope().Lookup(id)
		if !object.Exported() {
			continue
		}
		of, isType := object.(*types.TypeName)
		if !isType {
			add(types.ObjectString(object, in))
			continue
		}
		add("type " + id + " " + kindOf(of, in))
		named, ok := types.Unalias(of.Type()).(*types.Named)
		if ok && named.Obj().Pkg() != nil && named.Obj().Pkg() != pkg {
			home, ours := strings.CutPrefix(named.Obj().Pkg().Path(), module)
			if !ours || slices.Contains(supported, home) {
				continue // the alias names a type that others document
			}
		}
		members(of.Type(), in, func(member string) { add(id + ": " + member) })
	}
	slices.Sort(lines)
	return lines
}

// kindOf describes a type without its members.
func kindOf(of *types.TypeName, in types.Qualifier) string {
	alias := ""
	if of.IsAlias() {
		alias = "= " + types.TypeString(types.Unalias(of.Type()), in) + ", "
	}
	switch u := of.Type().Underlying().(type) {
	case *types.Struct:
		return alias + "struct"
	case *types.Interface:
		return alias + "interface"
	default:
		return alias + types.TypeString(u, in)
	}
}

// members calls add for each exported field and method of a type.
func members(of types.Type, in types.Qualifier, add func(string)) {
	if s, ok := of.Underlying().(*types.Struct); ok {
		for f := range s.Fields() {
			if f.Exported() {
				add("field " + f.Name() + " " + types.TypeString(f.Type(), in))
			}
		}
	}
	of = types.Unalias(of)
	if !types.IsInterface(of) {
		of = types.NewPointer(of)
	}
	for m := range types.NewMethodSet(of).Methods() {
		if m.Obj().Exported() {
			add("method " + m.Obj().Name() + strings.TrimPrefix(types.TypeString(m.Type(), in), "func"))
		} else if types.IsInterface(of) {
			add("a method that is not exported")
		}
	}
}
