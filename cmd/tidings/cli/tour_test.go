package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/sethvargo/go-envconfig"
)

var update = flag.Bool("update", false, "write the outputs of docs/tour.md, and the pages that are generated, anew")

// TestTheTourWorks runs the commands of docs/tour.md in one shell against tidings dev, and compares
// the shapes of their outputs with the page's.
func TestTheTourWorks(t *testing.T) {
	t.Parallel()
	const page = "../../../docs/tour.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range regexp.MustCompile(`Idempotency-Key: \w+`).FindAllString(string(text), -1) {
		if strings.Contains(greeting, key+"'") {
			t.Errorf("the page repeats the %s of dev's own lines, with another request", key)
		}
	}
	d := newDev(t)
	d.start(t)
	events := d.watchEvents(t)
	blocks := regexp.MustCompile("(?ms)^```sh\n(.*?)^```\n(.*?)^```text\n(.*?)^```$").FindAllSubmatchIndex(text, -1)
	if len(blocks) < 8 || len(blocks) != bytes.Count(text, []byte("```sh\n")) {
		t.Fatalf("the page has %d blocks with outputs, of %d", len(blocks), bytes.Count(text, []byte("```sh\n")))
	}
	var scripts []string
	for _, b := range blocks {
		scripts = append(scripts, string(text[b[2]:b[3]]))
	}
	outputs := d.shell(t, scripts)
	var fresh bytes.Buffer
	end := 0
	for i, b := range blocks {
		want := string(text[b[6]:b[7]])
		if diff := gocmp.Diff(shape(want), shape(outputs[i])); diff != "" && !*update {
			t.Errorf("the output of\n%s has another shape (-page +now):\n%s\nnow:\n%s", scripts[i], diff, outputs[i])
		}
		fresh.Write(text[end:b[6]])
		fresh.WriteString(outputs[i])
		end = b[7]
	}
	fresh.Write(text[end:])
	if *update {
		if err := os.WriteFile(page, fresh.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if read := regexp.MustCompile(`"followers":\d`).FindAllString(outputs[6], -1); !slices.Equal(read,
		[]string{`"followers":0`, `"followers":1`}) {
		t.Errorf("without and with the token of the write the tour reads %s", read)
	}
	events("comment.created", "comment.deleted", "follow.created")
}

// watchEvents runs `tidings events watch` until the returned function is called. That function
// checks the types of the printed events.
func (d *dev) watchEvents(t *testing.T) (want func(types ...string)) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ready, done := make(chan struct{}), make(chan int)
	var stdout, stderr bytes.Buffer
	go func() {
		p := Process{Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: writerFunc(func(b []byte) (int, error) {
			if stderr.Len() == 0 {
				close(ready)
			}
			return stderr.Write(b)
		}), Env: envconfig.MapLookuper(nil), ran: noteRan}
		done <- Execute(ctx, []string{"events", "watch", "--tenant", "1", "--data", d.dir}, p)
	}()
	select {
	case <-ready:
	case code := <-done:
		t.Fatalf("events watch ended with %d", code)
	case <-time.After(startWithin):
		t.Fatal("events watch is not ready")
	}
	return func(types ...string) {
		t.Helper()
		stop()
		if code := <-done; code != exitOK || stderr.String() != "Waiting for events.\n" {
			t.Errorf("events watch: exit code %d, %q", code, stderr.String())
		}
		for _, one := range types {
			if !regexp.MustCompile(`(?m)^EVENTS-\d+/\d+  tenant 1  ` + regexp.QuoteMeta(one) +
				`  \d+  \{.*\}$`).MatchString(stdout.String()) {
				t.Errorf("events watch printed no %s", one)
			}
		}
	}
}

// shell runs the scripts one after the other in one shell, against d instead of localhost:8080, and
// returns the output of each.
func (d *dev) shell(t *testing.T, scripts []string) (outputs []string) {
	t.Helper()
	dir := t.TempDir()
	commands := map[string]string{"bin/tidings": fmt.Sprintf("%s=1 exec %q \"$@\" --data %q", childVariable, os.Args[0], d.dir)}
	if _, err := exec.LookPath("curl"); err != nil {
		commands["bin/curl"] = fmt.Sprintf("%s=curl exec %q \"$@\"", childVariable, os.Args[0])
	}
	for name, command := range commands {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte("#!/bin/sh\n"+command+"\n"), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	in := d.instance(t)
	const mark, pause = "--- the next block", "\nsleep 3   # a pause takes effect within two seconds\n"
	all := strings.ReplaceAll(strings.Join(scripts, "\necho; echo '"+mark+"'\n"), "localhost:8080", strings.TrimPrefix(in.API, "http://"))
	if strings.Count(all, pause) != 1 {
		t.Fatalf("the page does not wait for a pause with the line %q", pause)
	}
	// On a busy machine a pause may take longer. The metric says when the consumer has noticed it.
	all = strings.Replace(all, pause, fmt.Sprintf("\nfor n in $(seq 400); do\n"+
		"curl -s %s/metrics | grep -q '^tidings_consumer_paused{consumer=\"followercounts\".*} 1$' && break; sleep 0.3\ndone\n",
		strings.TrimPrefix(in.Ops, "http://")), 1)
	c := exec.CommandContext(t.Context(), "sh", "-e")
	c.Dir, c.Stdin = dir, strings.NewReader(all)
	c.Env = append(d.env, "TOKEN="+in.Token, "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
	var stderr bytes.Buffer
	c.Stderr = &stderr
	stdout, err := c.Output()
	outputs = strings.Split(string(stdout), "\n"+mark+"\n")
	if err != nil || len(outputs) != len(scripts) {
		t.Fatalf("block %d failed: %v\n%s%s", len(outputs), err, stdout, stderr.String())
	}
	for i, out := range outputs {
		outputs[i] = strings.TrimSpace(strings.ReplaceAll(out, "}{", "}\n{")) + "\n"
	}
	return outputs
}

// shape returns the parts of an output that are the same in each run: the words, without numbers,
// ids, times and column widths.
func shape(output string) string {
	for _, r := range []struct{ from, to string }{
		{`\d{4}-\d\d-\d\dT[\d:.]+Z`, "TIME"}, {`[0-9a-f]{8}-[0-9a-f-]{27}`, "UUID"}, {`"next":"[^"]*"`, `"next":"CURSOR"`},
		{`"slug":"\w+"`, `"slug":"SLUG"`},
		{`\w+-\S+-\d+-[0-9A-Z]{6}-\d+\b`, "-"}, {`(?m)^Partitions? [\d -]+ (is|are|wait).*\n`, ""}, {`-+`, "-"}, {`"\d+"`, `"N"`},
		{`[\d,.]*\d`, "N"}, {`N ?(ms|µs|s)\b`, "N TIME"}, {` +`, " "},
	} {
		output = regexp.MustCompile(r.from).ReplaceAllString(output, r.to)
	}
	return output
}

// miniCurl implements the options of curl that the tour needs, for machines without curl.
func miniCurl(args []string) error {
	method, data, out, headers := "", "", "", ""
	header := http.Header{}
	flags := flag.NewFlagSet("curl", flag.ContinueOnError)
	flags.Bool("s", false, "")
	flags.StringVar(&method, "X", "", "")
	flags.StringVar(&data, "d", "", "")
	flags.StringVar(&out, "o", "", "")
	flags.StringVar(&headers, "D", "", "")
	flags.Func("H", "", func(h string) error {
		name, value, _ := strings.Cut(h, ":")
		header.Set(name, strings.TrimSpace(value))
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	if data != "" {
		method = cmp.Or(method, http.MethodPost)
	}
	r, err := http.NewRequest(cmp.Or(method, http.MethodGet), "http://"+flags.Arg(0), strings.NewReader(data))
	if err != nil {
		return err
	}
	r.Header = header
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	var top bytes.Buffer
	if headers != "" {
		err = errors.Join(err, answer.Header.Write(&top), os.WriteFile(headers, top.Bytes(), 0o600))
	}
	if out == "" {
		_, werr := os.Stdout.Write(body)
		err = errors.Join(err, werr)
	}
	return err
}
