package archtest_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/licensecheck"
)

// compatible lists the SPDX identifiers of licenses whose code may be part of a binary under the
// Apache License 2.0 (https://www.apache.org/legal/resolved.html, categories A and B).
var compatible = map[string]bool{
	"Apache-2.0": true, "MIT": true, "MIT-0": true, "BSD-2-Clause": true, "BSD-3-Clause": true, "ISC": true, "0BSD": true,
	"Unlicense": true, "Zlib": true, "MPL-2.0": true, // MPL-2.0: for a library whose files we do not change
}

var licenseFile = regexp.MustCompile(`(?i)^(un)?licen[sc]e|^copying`)

// judge returns the licenses in a license file. It returns an error unless the whole text is known
// and compatible.
func judge(text []byte) ([]string, error) {
	c := licensecheck.Scan(text)
	var ids []string
	for _, m := range c.Match {
		if m.IsURL {
			continue // part of a text that is itself matched
		}
		if !compatible[m.ID] {
			return nil, fmt.Errorf("the license %s is not in compatible", m.ID)
		}
		ids = append(ids, m.ID)
	}
	if len(ids) == 0 || c.Percent < 75 { // the rest is copyright lines
		return nil, fmt.Errorf("only %.0f%% of its text is from known licenses: %v", c.Percent, ids)
	}
	return ids, nil
}

// judgeFolder judges the license files of a folder, and returns their number.
func judgeFolder(t *testing.T, dir string) (files int) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() || !licenseFile.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".go") {
			continue
		}
		files++
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := judge(text); err != nil {
			t.Errorf("%s: %v", filepath.Join(dir, e.Name()), err)
		}
	}
	return files
}

// The binaries contain the packages that they import, and Go's standard library, which has the
// license BSD-3-Clause.
func TestEveryDependencysLicenseIsCompatible(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "-json=Dir,Standard,Module", module+"cmd/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	seen, modules := map[string]int{}, map[string]bool{} // license files by folder
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			Dir      string
			Standard bool
			Module   *struct {
				Path, Dir string
				Main      bool
			}
		}
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if p.Standard || p.Module.Main {
			continue
		}
		modules[p.Module.Path] = true
		found := 0
		for dir := p.Dir; ; dir = filepath.Dir(dir) { // a folder may contain third-party code with its license
			n, ok := seen[dir]
			if !ok {
				n = judgeFolder(t, dir)
				seen[dir] = n
			}
			found += n
			if dir == p.Module.Dir {
				break
			}
		}
		if found == 0 {
			t.Errorf("%s: no license file", p.Module.Path)
		}
	}
	if len(modules) < 10 {
		t.Errorf("go list knows %d modules", len(modules))
	}
}

// The binaries also contain the console's third-party scripts. Each has a folder with its license.
func TestTheConsolesScriptsOfOthersHaveTheirLicense(t *testing.T) {
	assets := filepath.Join("..", "..", "ops", "console", "assets")
	entries, err := os.ReadDir(assets)
	if err != nil {
		t.Fatal(err)
	}
	folders := 0
	for _, e := range entries {
		if e.IsDir() {
			folders++
			if judgeFolder(t, filepath.Join(assets, e.Name())) == 0 {
				t.Errorf("%s: no license file", e.Name())
			}
		}
	}
	if folders == 0 {
		t.Error("found no third-party scripts")
	}
}

func TestLicensesAreJudgedByTheirText(t *testing.T) {
	own, err := os.ReadFile("../../LICENSE")
	if err != nil {
		t.Fatal(err)
	}
	if ids, err := judge(own); err != nil || len(ids) != 1 || ids[0] != "Apache-2.0" ||
		!strings.Contains(string(own), "Copyright 2026 The Tidings Authors") {
		t.Errorf("LICENSE is %v, %v; want Apache-2.0, of The Tidings Authors", ids, err)
	}
	const gpl = "This program is free software: you can redistribute it and/or modify it under the terms of the GNU General Public " +
		"License as published by " +
		"the Free Software Foundation, either version 3 of the License, or (at your option) any later version."
	for name, text := range map[string]string{
		"another license":               gpl,
		"another license beside it":     string(own) + gpl,
		"an unknown license":            "All rights are reserved. Nobody may copy this library without a written agreement.",
		"nothing":                       "",
		"conditions added to a license": "SPDX-License-Identifier: MIT\n" + strings.Repeat("The library may not be used on weekdays. ", 20),
	} {
		if ids, err := judge([]byte(text)); err == nil {
			t.Errorf("%s: found %v, want an error", name, ids)
		}
	}
}
