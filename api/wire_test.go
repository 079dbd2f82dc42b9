package api_test

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// serve answers on a port like the program does.
func (f fixture) serve(t *testing.T) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- daemon.Serve(ctx, l, f, 1000, testkit.Logger(t)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// talk sends these bytes, then the bytes of slowly one by one. It reads answers until the server
// closes the connection, or sends nothing more after the wanted number of answers.
func talk(t *testing.T, addr, send, slowly string, want int, closing bool) (answers []answer, closed bool) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	defer func() { <-done }()
	defer conn.Close()
	go func() {
		defer close(done)
		_, err := io.WriteString(conn, send)
		slow := time.NewTicker(100 * time.Millisecond)
		defer slow.Stop()
		for i := 0; err == nil && i < len(slowly); i++ {
			<-slow.C
			_, err = conn.Write([]byte{slowly[i]})
		}
	}()
	method, _, _ := strings.Cut(send, " ")
	for in := bufio.NewReader(conn); ; {
		wait := 30 * time.Second
		if len(answers) >= want && !closing {
			wait = 200 * time.Millisecond // for an answer that should not come
		}
		if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(in, &http.Request{Method: method})
		if err != nil {
			timeout, ok := errors.AsType[net.Error](err)
			return answers, !ok || !timeout.Timeout()
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatalf("%q: %v", send, err)
		}
		a := answer{Response: resp, body: string(body)}
		if resp.Header.Get("Content-Type") == "application/problem+json" && len(body) > 0 {
			if err := json.Unmarshal(body, &a.json); err != nil {
				t.Fatalf("%v in %s", err, body)
			}
		}
		answers = append(answers, a)
	}
}

// TestBadInputOnTheWire has requests that only a connection can carry. The server refuses requests
// that HTTP forbids before the API sees them, in plain text.
func TestBadInputOnTheWire(t *testing.T) {
	f := open(t)
	patient := f.serve(t)
	cfg, impatient := config(), f // for the cases that last as long as a request may: a busy machine takes long over the others
	cfg.RequestTimeout = 4 * time.Second
	var err error
	if impatient.Handler, err = api.New(cfg, api.Deps{Store: store.New(f.pool, nil), Tokens: f.pool, DLQ: outbox.NewDLQ(f.pool, nil),
		Projections: f.pool, Fleet: fleet, Log: testkit.Logger(t), Reg: prometheus.NewRegistry()}); err != nil {
		t.Fatal(err)
	}
	late := impatient.serve(t)
	const plain = "" // the server's own answer
	auth := "Host: x\r\nAuthorization: Bearer " + f.token + "\r\n"
	put := "PUT /v1/follows/1/3 HTTP/1.1\r\n" + auth
	post := "POST /v1/posts/1/comments HTTP/1.1\r\n" + auth + "Content-Type: application/json\r\n"
	get := func(target string) string { return "GET " + target + " HTTP/1.1\r\n" + auth + "\r\n" }
	const comment = `{"author_id":"1","body":"x"}`
	var zipped strings.Builder
	z := gzip.NewWriter(&zipped)
	_, _ = io.WriteString(z, comment) // never fails in memory
	_ = z.Close()
	sized := func(body string) string { return "Content-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body }
	before := f.rows(t)
	cases := map[string]struct {
		send, slowly string
		status       int
		code         string
		closed       bool
	}{
		"a body that comes a byte at a time": {post + "Content-Length: 100\r\n\r\n{", strings.Repeat(" ", 60), 408,
			"request-timeout", true},
		"chunks that come a byte at a time": {post + "Transfer-Encoding: chunked\r\n\r\n", strings.Repeat("1\r\n \r\n", 10),
			408, "request-timeout", true},
		"a body that never comes": {post + "Content-Length: 100\r\n\r\n", "", 408, "request-timeout", true},
		"a body that never comes where none is taken": {"PUT /v1/follows/1/1 HTTP/1.1\r\n" + auth + "Content-Length: 100\r\n\r\n", "",
			408, "request-timeout", true},
		"a body of a GET that never comes": {"GET /v1/users/1/counts HTTP/1.1\r\n" + auth + "Content-Length: 100\r\n\r\n",
			"", 408, "request-timeout", true},
		"chunks of a GET that never come": {"GET /v1/users/1/counts HTTP/1.1\r\n" + auth +
			"Transfer-Encoding: chunked\r\n\r\n", "", 408, "request-timeout", true},
		"a body of a GET that is too large": {"GET /v1/users/1/counts HTTP/1.1\r\n" + auth +
			"Content-Length: 9000000000\r\n\r\n{", "", 413, "request-too-large", true},
		"a length and chunks": {post + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n1c\r\n" +
			comment + "\r\n0\r\n\r\n", "", 400, plain, true},
		"chunks and a length, in other letters": {post + "transfer-ENCODING:chunked\r\nX: y\r\ncontent-length:5\r\n\r\n1c\r\n" +
			comment + "\r\n0\r\n\r\n", "", 400, plain, true},
		"a length and chunks of HTTP/1.0": {"POST /v1/posts/1/comments HTTP/1.0\r\n" + auth +
			"Content-Length: 28\r\nTransfer-Encoding: chunked\r\n\r\n" + comment, "", 400, plain, true},
		"a limit with a sign":          {get("/v1/users/1/followers?limit=%2B5"), "", 422, "validation-failed", false},
		"a limit with a blank":         {get("/v1/users/1/followers?limit=+5"), "", 422, "validation-failed", false},
		"a limit with a zero in front": {get("/v1/users/1/followers?limit=01"), "", 422, "validation-failed", false},
		"no limit with a sign":         {get("/v1/users/1/followers?limit=-0"), "", 422, "validation-failed", false},
		"a slow body without a token": {"POST /v1/posts/1/comments HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",
			strings.Repeat(" ", 60), 401, "unauthenticated", true},
		"a large body without a token": {"POST /v1/posts/1/comments HTTP/1.1\r\nHost: " +
			"x\r\nContent-Length: 9000000000\r\n\r\n{", "", 401, "unauthenticated", true},
		"a body that says to be too large": {post + "Content-Length: 9000000000\r\n\r\n{", "", 413,
			"request-too-large", true},
		"headers of 100 KiB": {put + "X-Large: " + strings.Repeat("x", 100<<10) + "\r\n\r\n", "", 431, plain,
			true},
		"a path of 100 KiB": {get("/v1/follows/" + strings.Repeat("1", 100<<10) + "/2"), "", 431, plain,
			true},
		"a path of 50 KiB": {get("/v1/follows/" + strings.Repeat("1", 50<<10) + "/2"), "", 422,
			"validation-failed", false},
		"a query of 50 KiB": {get("/v1/users/1/followers?cursor=" + strings.Repeat("A", 50<<10)), "", 400,
			"cursor-invalid", false},
		"ten thousand parameters": {get("/v1/users/1/followers?" + strings.Repeat("a=1&", 10000) + "b=1"), "",
			400, "bad-request", false},
		"an actor with CR":         {put + "Tidings-Actor: a\rb\r\n\r\n", "", 400, plain, true},
		"an actor with NUL":        {put + "Tidings-Actor: a\x00b\r\n\r\n", "", 400, plain, true},
		"a folded header":          {put + "Tidings-Actor: a\r\n b\x01\r\n\r\n", "", 400, plain, true},
		"a header without a name":  {put + ": x\r\n\r\n", "", 400, plain, true},
		"a blank before the colon": {put + "Tidings-Actor : x\r\n\r\n", "", 400, plain, true},
		"two lengths": {post + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{    }", "", 400, plain,
			true},
		"a length below 0":      {post + "Content-Length: -1\r\n\r\n", "", 400, plain, true},
		"a length that is none": {post + "Content-Length: 0x1f\r\n\r\n", "", 400, plain, true},
		"another transfer coding": {post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "", 501, plain,
			true},
		"a gzip body": {post + "Content-Encoding: gzip\r\n" + sized(zipped.String()), "", 415,
			"unsupported-media-type", false},
		"two hosts": {"PUT /v1/follows/1/3 HTTP/1.1\r\nHost: y\r\n" + auth + "\r\n", "", 400, plain,
			true},
		"no host": {strings.Replace(put, "Host: x\r\n", "", 1) + "\r\n", "", 400, plain, true},
		"a version of HTTP that is none": {strings.Replace(put, "HTTP/1.1", "HTTP/3.7", 1) + "\r\n", "", 505, plain,
			true},
		"no HTTP":                   {"\x16\x03\x01\x02\x00\r\n\r\n", "", 400, plain, true},
		"a method that is none":     {"P(T / HTTP/1.1\r\n" + auth + "\r\n", "", 400, plain, true},
		"an absolute URI":           {get("http://elsewhere/v1/follows/a,b/2"), "", 422, "validation-failed", false},
		"the options of the server": {"OPTIONS * HTTP/1.1\r\n" + auth + "\r\n", "", 404, "route-unknown", false},
		"a tunnel": {"CONNECT elsewhere:443 HTTP/1.1\r\n" + auth + "\r\n", "",
			404, "route-unknown", false},
		"a slash that is escaped":          {get("/v1/follows/1%2F2/3"), "", 422, "validation-failed", false},
		"dots that are escaped":            {get("/v1/users/%2e%2e/counts"), "", 404, "route-unknown", false},
		"NUL that is escaped":              {get("/v1/follows/1%00/3"), "", 422, "validation-failed", false},
		"a half of an escape":              {get("/v1/follows/1%2/3"), "", 400, plain, true},
		"a path without a slash":           {get("v1/follows/1/3"), "", 400, plain, true},
		"a fragment":                       {get("/v1/follows/1/3#x"), "", 422, "validation-failed", false},
		"an expectation that nobody meets": {post + "Expect: miracles\r\n" + sized(comment), "", 417, plain, true},
		"a body that waits to be asked for, without token": {"POST /v1/posts/1/comments HTTP/1.1\r\nHost: x\r\nExpect: " +
			"100-continue\r\nContent-Length: 28\r\n\r\n", "", 401, "unauthenticated", false},
	}
	t.Run("each", func(t *testing.T) { // ends when all subtests have ended
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				addr := patient
				if c.status == http.StatusRequestTimeout || c.slowly != "" { // the API waits for the rest of the body
					addr = late
				}
				start := time.Now()
				answers, closed := talk(t, addr, c.send, c.slowly, 1, c.closed)
				if len(answers) != 1 {
					t.Fatalf("%d answers, want one: %v", len(answers), answers)
				}
				a := answers[0]
				contentType := "application/problem+json"
				if c.code == plain {
					contentType = "text/plain; charset=utf-8"
				}
				if a.StatusCode != c.status || a.text("code") != c.code || a.Header.Get("Content-Type") != contentType && c.status != 417 {
					t.Errorf("%d %v %s, want %d %s", a.StatusCode, a.Header, a.body, c.status, c.code)
				}
				if closed != c.closed {
					t.Errorf("the connection was closed: %t, want %t", closed, c.closed)
				}
				if took := time.Since(start); addr == late && took > 20*time.Second {
					t.Errorf("answered after %s, want about four seconds", took)
				}
			})
		}
	})
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("something was written (-before +after):\n%s", diff)
	}
}

// TestGoodInputOnTheWire has unusual requests that are valid.
func TestGoodInputOnTheWire(t *testing.T) {
	f := open(t)
	addr := f.serve(t)
	auth := "Host: x\r\nAuthorization: bearer   " + f.token + "\r\n"
	const comment = `{"author_id":"1","body":"x"}`
	post := "POST /v1/posts/1/comments HTTP/1.1\r\n" + auth
	for name, c := range map[string]struct {
		send   string
		status []int
	}{
		"chunks": {post + "Transfer-Encoding: chunked\r\n\r\n1c\r\n" + comment + "\r\n0\r\n\r\n", []int{201}},
		"a type with a charset": {post + "Content-Type: Application/JSON ; charset=\"UTF-8\"\r\nContent-Length: 28\r\n\r\n" +
			comment, []int{201}},
		"a body that waits": {post + "Expect: 100-continue\r\nContent-Length: 28\r\n\r\n" + comment, []int{100, 201}},
		"two requests at once": {post + "Content-Length: 28\r\n\r\n" + comment + post + "Content-Length: 28\r\n\r\n" + comment,
			[]int{201, 201}},
		// chunks are a connection's last request
		"a request behind chunks": {post + "Transfer-Encoding: chunked\r\n\r\n1c\r\n" + comment +
			"\r\n0\r\n\r\nGET /v1/users/1/counts HTTP/1.1\r\n" + auth + "\r\n", []int{201}},
		"a length behind a length": {post + "Content-Length: 28\r\n\r\n" + comment + post + "Transfer-Encoding: chunked\r\n\r\n1c\r\n" +
			comment + "\r\n0\r\n\r\n", []int{201, 201}},
		"HTTP/1.0":                {"PUT /v1/follows/1/3 HTTP/1.0\r\n" + auth + "\r\n", []int{201}},
		"an absolute URI":         {"PUT http://elsewhere/v1/follows/1/4 HTTP/1.1\r\n" + auth + "\r\n", []int{201}},
		"a digit that is escaped": {"PUT /v1/follows/1/%35 HTTP/1.1\r\n" + auth + "\r\n", []int{201}},
		"a name that is escaped":  {"GET /v1/users/1/followers?%6cimit=200 HTTP/1.1\r\n" + auth + "\r\n", []int{200}},
		"HEAD":                    {"HEAD /v1/users/1/counts HTTP/1.1\r\n" + auth + "\r\n", []int{200}},
		"a condition that is met": {"GET /v1/posts/1/thread HTTP/1.1\r\n" + auth + "If-None-Match: *\r\n\r\n", []int{200}},
		"a request behind a small one": {"PUT /v1/follows/1/6 HTTP/1.1\r\n" + auth +
			"Content-Length: 5\r\n\r\nabcdeGET /v1/users/1/counts HTTP/1.1\r\n" + auth + "\r\n", []int{201, 200}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []int
			answers, _ := talk(t, addr, c.send, "", len(c.status), false)
			for _, a := range answers {
				got = append(got, a.StatusCode)
			}
			if diff := cmp.Diff(c.status, got); diff != "" {
				t.Errorf("answers (-want +got):\n%s%v", diff, answers)
			}
		})
	}
}
