package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/licensecheck"
)

// component is a module that a binary contains, or Go's standard library.
type component struct {
	path, version string
	licenses      []string // SPDX identifiers
}

func (c component) compare(other component) int { return strings.Compare(c.path, other.path) }

var licenseFile = regexp.MustCompile(`(?i)^(un)?licen[sc]e|^copying|^notice|^patents`)

// readParts adds the modules that the binary of a platform contains, and the texts of their
// licenses: those beside a package that is used, and those of the folders above it.
func (r *release) readParts(platform string, parts map[string]component, licenses map[string][]byte) error {
	out, err := output(r.goCommand(platform, "list", "-deps", "-tags=grpcnotrace", "-json=Dir,Standard,Module", "./cmd/tidings"))
	if err != nil {
		return err
	}
	root, err := output(r.goCommand(platform, "env", "GOROOT", "GOVERSION"))
	if err != nil {
		return err
	}
	folder, version, _ := strings.Cut(root, "\n")
	if err := addPart(parts, licenses, component{path: "std", version: version}, folder, folder); err != nil {
		return err
	}
	console := filepath.Join(r.source, "ops", "console", "assets")
	if err := addPart(parts, licenses, component{path: "htmx"}, console, filepath.Join(console, "htmx")); err != nil {
		return err
	}
	for d := json.NewDecoder(strings.NewReader(out)); ; {
		var p struct {
			Dir      string
			Standard bool
			Module   *struct {
				Path, Version, Dir string
				Main               bool
			}
		}
		switch err := d.Decode(&p); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case p.Standard || p.Module.Main:
			continue
		}
		if err := addPart(parts, licenses, component{path: p.Module.Path, version: p.Module.Version}, p.Module.Dir, p.Dir); err != nil {
			return err
		}
	}
}

// addPart adds the component with the licenses from dir up to top.
func addPart(parts map[string]component, licenses map[string][]byte, c component, top, dir string) error {
	if known, ok := parts[c.path]; ok {
		c = known
	}
	for ; ; dir = filepath.Dir(dir) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.IsDir() || !licenseFile.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".go") {
				continue
			}
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				return err
			}
			below, _ := filepath.Rel(top, dir)
			licenses[strings.TrimSpace(c.path+" "+c.version)+", "+filepath.ToSlash(filepath.Join(below, e.Name()))] = text
			for _, m := range licensecheck.Scan(text).Match {
				if !m.IsURL && !slices.Contains(c.licenses, m.ID) {
					c.licenses = append(c.licenses, m.ID)
				}
			}
		}
		if dir == top {
			break
		}
	}
	slices.Sort(c.licenses)
	parts[c.path] = c
	return nil
}

// notices returns all licenses in one text, which their owners require beside a binary.
func notices(licenses map[string][]byte) []byte {
	out := bytes.NewBufferString("The programs contain these works of others.\n")
	for _, name := range slices.Sorted(maps.Keys(licenses)) {
		fmt.Fprintf(out, "\n%s\n%s\n\n%s\n", strings.Repeat("=", 80), name, bytes.TrimSpace(licenses[name]))
	}
	return out.Bytes()
}

// writeBill writes the bill of materials in the format CycloneDX. The npm package has no parts.
func (r *release) writeBill(parts []component) error {
	apache := &cyclonedx.Licenses{{License: &cyclonedx.License{ID: "Apache-2.0"}}}
	purl := "pkg:golang/github.com/tidings/tidings@v" + r.version
	bill, components := cyclonedx.NewBOM(), []cyclonedx.Component{}
	bill.Metadata = &cyclonedx.Metadata{
		Timestamp: r.when.Format(time.RFC3339),
		Component: &cyclonedx.Component{BOMRef: purl, PackageURL: purl, Type: cyclonedx.ComponentTypeApplication, Name: "tidings",
			Version: r.version, Licenses: apache},
	}
	for _, p := range parts {
		c := cyclonedx.Component{Type: cyclonedx.ComponentTypeLibrary, Name: p.path, Version: p.version, Licenses: &cyclonedx.Licenses{}}
		if p.version != "" {
			c.PackageURL = "pkg:golang/" + p.path + "@" + strings.TrimPrefix(p.version, "go")
		}
		c.BOMRef = cmp.Or(c.PackageURL, p.path)
		for _, id := range p.licenses {
			*c.Licenses = append(*c.Licenses, cyclonedx.LicenseChoice{License: &cyclonedx.License{ID: id}})
		}
		components = append(components, c)
	}
	bill.Components = &components
	var out bytes.Buffer
	if err := cyclonedx.NewBOMEncoder(&out, cyclonedx.BOMFileFormatJSON).SetPretty(true).Encode(bill); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.dist, "tidings-"+r.version+".cdx.json"), out.Bytes(), 0o644)
}
