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

// Configure fills in cfg, a pointer to a struct with env tags, from env. It returns every variable that cannot be read and what the fields' own
// Validate methods say, all at once.
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
		name := seen.last // reading ends at the variable that it fails for
		value, set := env.Lookup(name)
		if _, again := seen.bad[name]; again || name == "" {
			return errors.Join(append(errs, err)...)
		}
		if set && !errors.Is(err, envconfig.ErrMissingRequired) {
			errs, seen.bad[name] = append(errs, fmt.Errorf("%s is %q: %s", name, value, fields.ReplaceAllString(err.Error(), ""))), "" // and on with its default
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

// fields are the names of a configuration's fields, which stand before an error's text.
var fields = regexp.MustCompile(`^([A-Z]\w*: )+`)

// attempt looks variables up, remembers the last one, and hides those that are known to be bad.
type attempt struct {
	env  envconfig.Lookuper
	bad  map[string]string // what stands for a bad one; "" for nothing
	last string
}

func (a *attempt) Lookup(name string) (string, bool) {
	a.last = name
	if instead, bad := a.bad[name]; bad {
		return instead, instead != ""
	}
	return a.env.Lookup(name)
}

// errHelp reports that help was asked for, and given.
var errHelp = errors.New("daemon: help was given")

// helpLookuper is the environment of a program that is asked what it reads.
type helpLookuper struct {
	name string
	to   io.Writer
}

// Lookup finds nothing.
func (helpLookuper) Lookup(string) (string, bool) { return "", false }

// print writes the variables of cfg with their defaults.
func (h helpLookuper) print(_ context.Context, cfg any) error {
	fmt.Fprintf(h.to, "%s: one of the binaries of Tidings. It reads its environment (docs/configuration.md says what each variable does) and runs until SIGTERM.\n\n", h.name)
	w := tabwriter.NewWriter(h.to, 0, 0, 2, ' ', 0)
	seen := map[string]bool{}
	variables(w, reflect.TypeOf(cfg).Elem(), seen)
	variables(w, reflect.TypeFor[TraceConfig](), seen)
	variables(w, reflect.TypeFor[LogConfig](), seen) // Main's own
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

// version and revision are those of an image: the linker sets them (deploy/Dockerfile).
var version, revision string

// Version returns the version of this build: the image's, else the module's, else the commit that it was built from.
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
	return info.Main.Version
}

// Revision returns the commit that this build was made from, "" if it is unknown.
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
