package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sethvargo/go-envconfig"
)

// lives runs `tidings demo` against d until it has sent a number of requests, and calls meanwhile
// after the first ones.
func (d *dev) lives(t *testing.T, requests int, meanwhile func(), args ...string) demoResult {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	begun, begin := context.WithCancel(t.Context())
	defer begin()
	var shown, stdout bytes.Buffer
	stderr := writerFunc(func(b []byte) (int, error) {
		if n, err := strconv.Atoi(strings.ReplaceAll(strings.Split(string(b), " ")[0], ",", "")); err == nil && n > 0 {
			begin()
			if n >= requests {
				stop()
			}
		}
		return shown.Write(b)
	})
	ended := make(chan int, 1)
	go func() {
		ended <- Execute(ctx, append([]string{"demo", "--data", d.dir, "--json"}, args...),
			Process{Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: stderr, Env: envconfig.MapLookuper(nil),
				ran: noteRan, demoStop: startWithin}) // a request without an answer would be in the truth, and not in the statistics
	}()
	if meanwhile != nil {
		<-begun.Done()
		meanwhile()
	}
	select {
	case code := <-ended:
		var r demoResult
		if err := json.Unmarshal(stdout.Bytes(), &r); err != nil || code != exitOK {
			t.Fatalf("demo %v: exit code %d, %v\n%s%s", args, code, err, stdout.String(), shown.String())
		}
		return r
	case <-time.After(5 * time.Minute):
		t.Fatal("demo does not end")
		return demoResult{}
	}
}

func TestALineSaysWhatASiteDid(t *testing.T) {
	var last, now demoResult
	last.Did, now.Did = map[string]int64{"follow": 3}, map[string]int64{"follow": 5, "comment": 9, "note": 1, "badge": 1}
	last.Requests, now.Requests, now.Reads, now.Refused, now.Last = 3, 1000, 4, 1, "user 1: follow user 2"
	if got := siteLine(last.Stats, now.Stats); got != "1,000 requests  13 writes/s, 4 reads/s (comment 9, follow 2, badge 1), 1 refused  "+
		"user 1: follow user 2" {
		t.Errorf("%q", got)
	}
	now.Waiting = "connection refused"
	if got := siteLine(now.Stats, now.Stats); got != "1,000 requests  0 writes/s, 0 reads/s  waiting: connection refused" {
		t.Errorf("%q", got)
	}
}
