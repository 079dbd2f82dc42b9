package deploy_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestEveryComposeCommandOfThePagesNamesServices reads `docker compose` commands in pages and
// Compose files: the files that a command names have its services, and their ports.
func TestEveryComposeCommandOfThePagesNamesServices(t *testing.T) {
	type service struct{ Ports []string }
	services := map[string]map[string]service{}
	for _, name := range []string{"compose.yaml", "compose.fleet.yaml", "compose.three.yaml"} {
		var file struct{ Services map[string]service }
		readCompose(t, name, &file)
		services[name] = file.Services
	}
	command := regexp.MustCompile(`docker compose((?: -f deploy/[a-z.]+)+) ([a-z]+)([^` + "`" + `\n]*)`)
	valued := regexp.MustCompile(`--(?:index|signal) \S+|--scale (\S+)=\d+`) // flags with a value; that of --scale is a service
	seen := 0
	check := func(path, text string) {
		for _, m := range command.FindAllStringSubmatch(text, -1) {
			known := map[string]service{}
			for _, name := range strings.Fields(strings.ReplaceAll(m[1], "-f deploy/", "")) {
				if services[name] == nil {
					t.Errorf("%s: %s: there is no %s", path, m[0], name)
				}
				for service, s := range services[name] {
					s.Ports = append(s.Ports, known[service].Ports...)
					known[service] = s
				}
			}
			words := strings.Fields(valued.ReplaceAllString(m[3], "$1"))
			words = slices.DeleteFunc(words, func(w string) bool { return strings.HasPrefix(w, "-") })
			if m[2] != "up" && len(words) > 1 { // the rest is a command, or a port
				port := words[1]
				words = words[:1]
				if s := known[words[0]]; m[2] == "port" &&
					!slices.ContainsFunc(s.Ports, func(p string) bool { return strings.HasSuffix(p, ":"+port) }) {
					t.Errorf("%s: %s: it has the ports %q", path, m[0], s.Ports)
				}
			}
			for _, word := range words {
				seen++
				if _, ok := known[word]; !ok {
					t.Errorf("%s: %s: there is no service %s", path, m[0], word)
				}
			}
		}
	}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "node_modules") {
			return fs.SkipDir
		}
		if ext := filepath.Ext(path); d.IsDir() || ext != ".md" && ext != ".yaml" {
			return nil
		}
		text, err := os.ReadFile(path)
		check(path, string(text))
		return err
	})
	if err != nil || seen < 15 {
		t.Errorf("%d services were named, %v", seen, err)
	}
}
