package client_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/client"
)

// processor returns the processor time of this process, in user and system mode.
func processor(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// bareLoop is a program without a client: it sends a request, reads the answer and decodes it.
type bareLoop struct {
	http *http.Client
	url  string
}

func (l bareLoop) ask(ctx context.Context, method, path string, v any) error {
	req, err := http.NewRequestWithContext(ctx, method, l.url+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer secret")
	resp, err := l.http.Do(req)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if err := resp.Body.Close(); err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, body)
	}
	return json.Unmarshal(body, v)
}

// benchVariable makes the test binary the server of the benchmark.
const benchVariable = "TIDINGS_CLIENT_BENCH"

// answers serves two answers of the API without an API. It prints its address, and ends with its
// standard input.
func answers() error {
	page := `{"items":[`
	for i := range 50 {
		if i > 0 {
			page += ","
		}
		page += fmt.Sprintf(`{"user_id":"%d","positioned_at":"2026-11-22T10:00:00.000000Z"}`, 1000+i)
	}
	page += `],"next":"bmV4dA","as_of":"2026-11-22T10:00:00.000000Z"}`
	bodies := map[string][]byte{"/v1/likes/7/42": []byte(aLike), "/v1/users/42/followers": []byte(page)}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Tidings-Token", "token")
		_, _ = w.Write(bodies[r.URL.Path])
	}))
	defer srv.Close()
	fmt.Println(srv.URL)
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// startAnswers starts the benchmark's server as a process of its own, so that its processor time
// does not count.
func startAnswers(b *testing.B) (url string) {
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), benchVariable+"=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _, _ = in.Close(), cmd.Wait() })
	if _, err := fmt.Fscanln(out, &url); err != nil {
		b.Fatal(err)
	}
	return url
}

// BenchmarkClientAgainstBareLoop measures how much more processor time the client takes than a bare
// loop over net/http. It runs pairs, one after the other, against a trivial server in a process of
// its own. It reports the median of the pairs' ratios.
func BenchmarkClientAgainstBareLoop(b *testing.B) {
	url := startAnswers(b)
	bare := bareLoop{&http.Client{Transport: &http.Transport{}, Timeout: 30 * time.Second}, url}
	c, err := client.New(url, client.WithToken("secret"))
	if err != nil {
		b.Fatal(err)
	}
	ctx := b.Context()
	for name, pair := range map[string][2]func() error{
		"put": {func() error { var v client.Like; return bare.ask(ctx, http.MethodPut, "/v1/likes/7/42", &v) },
			func() error { _, err := c.Likes.Put(ctx, "7", "42"); return err }},
		"page": {func() error {
			var v client.Page[client.UserEntry]
			return bare.ask(ctx, http.MethodGet, "/v1/users/42/followers", &v)
		},
			func() error { _, err := c.Follows.Followers("42").First(ctx); return err }},
	} {
		b.Run(name, func(b *testing.B) {
			const requests = 1000
			measure := func(do func() error) time.Duration {
				before := processor(b)
				for range requests {
					if err := do(); err != nil {
						b.Fatal(err)
					}
				}
				return processor(b) - before
			}
			measure(pair[0])
			measure(pair[1])
			var ratios []float64
			var took [2]time.Duration
			for b.Loop() {
				var one [2]time.Duration
				for i := range one { // in turns: the first run leaves garbage to the second
					which := (i + len(ratios)) % 2
					one[which] = measure(pair[which])
					took[which] += one[which]
				}
				ratios = append(ratios, float64(one[1])/float64(one[0]))
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "ratio")
			for i, what := range []string{"bare-us/req", "client-us/req"} {
				b.ReportMetric(float64(took[i].Microseconds())/float64(len(ratios)*requests), what)
			}
		})
	}
}
