package client_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidings/tidings/client"
)

// exportOf answers an export of 5 states, 2 per answer. The n-th answer breaks off after so many
// lines.
func exportOf(t *testing.T, broken map[int]int) transport {
	return func(n int, r *http.Request) (*http.Response, error) {
		q := r.URL.Query()
		if (q.Get("cursor") == "c1") != (n > 1 && q.Get("cursor") != "") || r.URL.Path != "/v1/follows:export" {
			t.Errorf("request %d: %s", n, r.URL)
		}
		var from int
		if _, err := fmt.Sscan(q.Get("after"), &from); err != nil && q.Get("after") != "" {
			t.Error(err)
		}
		lines := []string{`{"export":{"kind":"follow","tenant":"1","began_at":"2026-11-22T10:00:00.000000Z","cursor":"c1",` +
			`"streams":[{"partition":0,"stream":"EVENTS-0","created":"2026-11-22T10:00:00.000000Z","sequence":"1042"}]}}`}
		for i := from + 1; i <= min(from+2, 5); i++ {
			lines = append(lines, fmt.Sprintf(`{"after":"%d","type":"tidings.follow.created.v1","subject":"42","data":{"version":%d}}`, i,
				i))
		}
		end := "more"
		if from+2 >= 5 {
			end = "done"
		}
		lines = append(lines, `{"end":"`+end+`"}`)
		resp, err := reply(200, strings.Join(lines, "\n")+"\n", "Content-Type: "+ndjson)
		if behind, ok := broken[n]; ok {
			resp.Body = io.NopCloser(io.MultiReader(strings.NewReader(strings.TrimPrefix(strings.Join(lines[:behind], "\n")+"\n", "\n")),
				lost{}))
		}
		resp.ContentLength = -1
		return resp, err
	}
}

// An export continues until it is complete, wherever an answer breaks off, and yields no state
// twice.
func TestExportsAreResumed(t *testing.T) {
	for _, broken := range []map[int]int{nil, {1: 0}, {1: 1}, {1: 2, 2: 2}, {2: 3, 3: 1}, {1: 3}} {
		synctest.Test(t, func(t *testing.T) {
			c, _ := fake(t, exportOf(t, broken))
			x := c.Follows.Export()
			var got []string
			for s, err := range x.All(t.Context()) {
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, s.After)
			}
			if h := x.Head(); !slices.Equal(got, []string{"1", "2", "3", "4", "5"}) || x.After() != "5" || h.Cursor != "c1" ||
				len(h.Streams) != 1 || h.Streams[0].Sequence != 1042 {
				t.Errorf("%v: %v, %+v", broken, got, h)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		for what, lines := range map[string]string{"a problem": `{"end":"problem","problem":{"status":410,` +
			`"code":"export-outdated","title":"Gone"}}`, "no progress": `{"end":"more"}`, "no state": `{}`, "no JSON": `x`} {
			c, requests := fake(t, func(int, *http.Request) (*http.Response, error) {
				return reply(200, lines+"\n", "Content-Type: "+ndjson)
			})
			var last error
			for _, err := range c.Comments.Export().Resume("c1", "3").All(t.Context()) {
				last = err
			}
			var a *client.AnswerError
			if outdated := client.HasCode(last, client.CodeExportOutdated); outdated != (what == "a problem") ||
				!outdated && !errors.As(last, &a) || len(*requests) != 1 {
				t.Errorf("%s: %v, %d requests", what, last, len(*requests))
			}
			if q := (*requests)[0].URL.Query(); q.Get("cursor") != "c1" || q.Get("after") != "3" {
				t.Errorf("resumed by %s", (*requests)[0].URL)
			}
		}
	})
}

// A slow caller does not end an answer, because only a silent API does.
func TestASlowCallerReadsAnExport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := exportOf(t, nil)
		c, requests := fake(t, func(n int, r *http.Request) (*http.Response, error) {
			resp, err := answer(n, r)
			resp.Body = io.NopCloser(&bounded{r.Context(), &slowly{resp.Body}, 1 << 20})
			return resp, err
		})
		states := 0
		for _, err := range c.Follows.Export().All(t.Context()) {
			if states++; err != nil {
				t.Fatal(err)
			}
			<-time.After(time.Minute)
		}
		if states != 5 || len(*requests) != 3 {
			t.Errorf("%d states, %d requests", states, len(*requests))
		}
	})
}

// slowly is a body of which a line arrives every 20 seconds.
type slowly struct{ io.Reader }

func (s *slowly) Read(p []byte) (n int, err error) {
	<-time.After(20 * time.Second)
	for n < len(p) {
		if _, err = io.ReadFull(s.Reader, p[n:n+1]); err != nil {
			return n, err
		}
		if n++; p[n-1] == '\n' {
			break
		}
	}
	return n, nil
}
