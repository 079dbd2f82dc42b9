package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"runtime/debug"
	"strings"
	"text/tabwriter"

	"github.com/sethvargo/go-envconfig"
)

// Configure sets the fields of cfg, a pointer to a struct with env tags, from env. Its error lists
// every variable that cannot be read, and the errors of the fields' own Validate methods.
func Configure(ctx context.Context, env envconfig.Lookuper, cfg any) error {
	if help, ok := env.(helpLookuper); ok {
		return help.print(ctx, cfg)
	}
	var errs []error
	for seen := (&attempt{env: env, bad: map[string]string{}}); ; {
		err := envconfig.ProcessWith(ctx, &envconfig.Config{Target: cfg, Lookuper: seen})
		if err == nil {
			break
		}
		name := seen.last // envconfig stops at the first bad variable
		value, set := env.Lookup(name)
		if _, again := seen.bad[name]; again || name == "" {
			return errors.Join(append(errs, err)...)
		}
		if set && !errors.Is(err, envconfig.ErrMissingRequired) {
			// The next attempt uses the default of the variable, to find further errors.
			errs, seen.bad[name] = append(errs, fmt.Errorf("%s is %q: %s", name, value, fields.ReplaceAllString(err.Error(), ""))), ""
		} else {
			errs, seen.bad[name] = append(errs, fmt.Errorf("%s is not set", name)), "not set"
		}
	}
	v := reflect.ValueOf(cfg).Elem()
	for i := range v.NumField() {
		if f, ok := v.Field(i).Interface().(interface{ Validate() error }); ok {
			errs = append(errs, f.Validate())
		}
	}
	return errors.Join(errs...)
}

// fields matches the names of fields that envconfig puts before the text of an error.
var fields = regexp.MustCompile(`^([A-Z]\w*: )+`)

// attempt looks variables up. It remembers the last one, and hides those that are known to be bad.
type attempt struct {
	env  envconfig.Lookuper
	bad  map[string]string // the value in place of a bad one; "": as if not set
	last string
}

func (a *attempt) Lookup(name string) (string, bool) {
	a.last = name
	if instead, bad := a.bad[name]; bad {
		return instead, instead != ""
	}
	return a.env.Lookup(name)
}

// errHelp reports that the help was printed.
var errHelp = errors.New("daemon: help was given")

// helpLookuper is the environment of a program that was started with --help.
type helpLookuper struct {
	name string
	to   io.Writer
}

// Lookup reports every variable as not set.
func (helpLookuper) Lookup(string) (string, bool) { return "", false }

// print writes the variables of cfg with their defaults.
func (h helpLookuper) print(_ context.Context, cfg any) error {
	fmt.Fprintf(h.to, "%s is one of the binaries of Tidings. It reads its environment (docs/configuration.md explains each variable) "+
		"and runs until SIGTERM.\n\n", h.name)
	w := tabwriter.NewWriter(h.to, 0, 0, 2, ' ', 0)
	seen := map[string]bool{}
	variables(w, reflect.TypeOf(cfg).Elem(), seen)
	variables(w, reflect.TypeFor[TraceConfig](), seen)
	variables(w, reflect.TypeFor[LogConfig](), seen) // Main reads these
	return errors.Join(w.Flush(), errHelp)
}

func variables(w io.Writer, t reflect.Type, seen map[string]bool) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, rest, _ := strings.Cut(f.Tag.Get("env"), ",")
		switch _, value, ok := strings.Cut(rest, "default="); {
		case name == "" && f.Type.Kind() == reflect.Struct:
			variables(w, f.Type, seen)
		case name == "" || seen[name]:
		case ok:
			fmt.Fprintf(w, "  %s\t%s\n", name, value)
		case strings.Contains(rest, "required"):
			fmt.Fprintf(w, "  %s\trequired\n", name)
		default:
			fmt.Fprintf(w, "  %s\t\n", name)
		}
		seen[name] = true
	}
}

// version and revision describe a release or an image. The linker sets them (deploy/release,
// deploy/Dockerfile).
var version, revision string

// Version returns the version of this build without a v: that of the release or the image, else
// that of the module, else the commit.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	switch {
	case version != "":
		return version
	case !ok:
		return "unknown"
	case info.Main.Version == "" || info.Main.Version == "(devel)":
		return cmp.Or(Revision(), info.Main.Version)
	}
	return strings.TrimPrefix(info.Main.Version, "v")
}

// Revision returns the commit of this build, or "" if it is unknown.
func Revision() string {
	if info, ok := debug.ReadBuildInfo(); ok && revision == "" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return revision
}
