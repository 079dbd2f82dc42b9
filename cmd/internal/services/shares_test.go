package services

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/shares"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/tokens"
)

// attacked is an API process with callers that share it: a greedy and slow tenant, and a modest one. Each has
// addresses of its own.
type attacked struct {
	t              *testing.T
	addr, ops      string
	system         *pgxpool.Pool
	greedy, modest string // tokens
}

const (
	greedyAddress = "127.0.0.2"
	modestAddress = "127.0.0.3"
)

// startAttacked starts the API, with the console and settings that name the bounds.
func startAttacked(t *testing.T, env map[string]string) *attacked {
	t.Helper()
	testkit.DefaultLogger(t)
	db := testkit.Postgres(t)
	a := &attacked{t: t, addr: testkit.FreeAddr(t), ops: testkit.FreeAddr(t), system: db.Pool(t, postgres.RoleSystem)}
	a.greedy, a.modest = a.token(1, "greedy"), a.token(2, "modest")
	vars := map[string]string{"DATABASE_URL": db.URL, "API_ADDR": a.addr, "OPS_ADDR": a.ops, "API_CURSOR_KEY": strings.Repeat("ab", 32),
		"CONSOLE": "true", "API_REQUEST_TIMEOUT": "25s", "API_MAX_WAIT": "25s"}
	for name, value := range env {
		vars[name] = value
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- runAPI(ctx, envconfig.MapLookuper(vars)) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("stopped with %v", err)
		}
	})
	testkit.Eventually(t, time.Minute, "the API to listen", func() (bool, error) {
		select {
		case err := <-done:
			done <- err
			t.Fatalf("it ended: %v", err)
		default:
		}
		conn, err := net.Dial("tcp", a.addr)
		if err != nil {
			return false, nil
		}
		return true, conn.Close()
	})
	return a
}

func (a *attacked) token(tenant int64, name string) string {
	a.t.Helper()
	token, err := tokens.Create(a.t.Context(), a.system, tenant, name, tokens.Roles(), time.Time{})
	if err != nil {
		a.t.Fatal(err)
	}
	return token
}

// wire is one connection to the API.
type wire struct {
	*net.TCPConn
	t  *testing.T
	in *bufio.Reader
}

func (a *attacked) dial(from string) wire {
	a.t.Helper()
	small := func(_, _ string, c syscall.RawConn) error { // what the client does not read stays with the server
		return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10) })
	}
	conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Control: small}).DialContext(a.t.Context(), "tcp", a.addr)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = conn.Close() }) // perhaps a second time
	if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		a.t.Fatal(err)
	}
	return wire{conn.(*net.TCPConn), a.t, bufio.NewReader(conn)}
}

// begin sends the headers of a batch of so many bytes, and waits until the API reads its body.
func (w wire) begin(token string, length int) {
	w.t.Helper()
	_, err := fmt.Fprintf(w, "POST /v1/follows:batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n", token, length)
	if err != nil {
		w.t.Fatal(err)
	}
	if line, err := w.in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100") {
		w.t.Fatalf("instead of reading the body the API answers %q, %v", line, err)
	}
}

// ask sends a request without a body and returns its status.
func (w wire) ask(method, path, token string) (status int, err error) {
	if _, err := fmt.Fprintf(w, "%s %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", method, path, token); err != nil {
		return 0, err
	}
	return w.answer()
}

func (w wire) answer() (status int, err error) {
	resp, err := http.ReadResponse(w.in, nil)
	if err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, errors.Join(err, resp.Body.Close())
}

// batch sends a batch of more than 64 KiB from the modest tenant, and returns the status of the answer.
func (a *attacked) batch() (status int, err error) {
	body := `{"operations":[{"op":"follow","follower_id":"1","followee_id":"2"}` + strings.Repeat(" ", 100<<10) + `]}`
	w := a.dial(modestAddress)
	defer w.Close()
	if _, err := fmt.Fprintf(w, "POST /v1/follows:batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\n\r\n%s", a.modest, len(body), body); err != nil {
		return 0, err
	}
	return w.answer()
}

// batches sends batches from the modest tenant, one after the other. Each must be accepted.
func (a *attacked) batches(n int, beside string) {
	a.t.Helper()
	accepted := 0
	var last error
	for range n {
		status, err := a.batch()
		if err == nil && status == http.StatusOK {
			accepted++
		} else {
			last = fmt.Errorf("%d, %v", status, err)
		}
	}
	if accepted != n {
		a.t.Errorf("beside %s %d of %d batches of another tenant are accepted, the last refusal: %v", beside, accepted, n, last)
	}
}

// Sixteen connections of one tenant announce batches of 4 MiB and send a byte. Then others send most of theirs at
// once. Neither takes memory that another tenant needs, and both lose their connections.
func TestOneCallersSlowBodiesRefuseNobodyElse(t *testing.T) {
	slowBodies(startAttacked(t, nil))
}

func slowBodies(a *attacked) {
	const length = 4 << 20
	var slow, greedy []wire
	for range 16 {
		w := a.dial(greedyAddress)
		w.begin(a.greedy, length)
		if _, err := w.Write([]byte("{")); err != nil {
			a.t.Fatal(err)
		}
		slow = append(slow, w)
	}
	a.batches(20, "bodies that do not arrive")
	most := []byte(strings.Repeat(" ", length-1))
	for range 24 { // the API refuses some of these in the middle
		w := a.dial(greedyAddress)
		w.begin(a.greedy, length)
		greedy = append(greedy, w)
		go func() { _, _ = w.Write(most) }()
	}
	a.batches(20, "bodies that arrive for the most part")
	start := time.Now()
	for _, w := range append(slow, greedy...) {
		status, err := w.answer()
		if err == nil && status != http.StatusRequestTimeout && status != http.StatusServiceUnavailable {
			a.t.Errorf("a body that does not arrive: %d", status)
		}
	}
	if took := time.Since(start); took > 3*shares.PaceTime {
		a.t.Errorf("slow bodies keep their connections for %s, want %s", took, shares.PaceTime)
	}
	a.batches(5, "nobody")
}

// Two hundred connections ask for the OpenAPI document, which needs no token, and do not read it. The process and the
// kernel keep little for them, others get the document and their answers, and the connections end.
func TestReadersThatDoNotReadDocumentsPinLittle(t *testing.T) {
	unreadDocuments(startAttacked(t, nil))
}

func unreadDocuments(a *attacked) {
	const most = 32 << 20
	if status, err := a.dial(modestAddress).ask("GET", "/v1/openapi.json", a.modest); err != nil || status != http.StatusOK {
		a.t.Fatalf("the document: %d, %v", status, err)
	}
	for range 200 {
		if _, err := io.WriteString(a.dial(greedyAddress), "GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			a.t.Fatal(err)
		}
	}
	largest := int64(0)
	for range 20 {
		for _, path := range []string{"/v1/openapi.json", "/v1/asyncapi.json", "/docs", "/v1/follows/1/2"} {
			w := a.dial(modestAddress)
			if status, err := w.ask("GET", path, a.modest); err != nil || status != http.StatusOK && status != http.StatusNotFound {
				a.t.Fatalf("%s: %d, %v", path, status, err)
			}
			_ = w.Close() // everything was read
			largest = max(largest, unread(a.t, a.addr))
		}
	}
	if largest > most {
		a.t.Errorf("200 readers that do not read pin %d MiB, want %d at most", largest>>20, most>>20)
	}
	testkit.Eventually(a.t, 2*time.Minute, "the kernel to keep nothing for them", func() (bool, error) {
		return unread(a.t, a.addr) < 1<<20, nil
	})
}

// unread returns how many bytes the kernel keeps that a server on addr has written and the client's end has not taken.
// Only Linux tells.
func unread(t *testing.T, addr string) (n int64) {
	t.Helper()
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		columns := strings.Fields(line) // sl, local address, remote address, state, tx_queue:rx_queue, ...
		if len(columns) < 5 || !strings.HasSuffix(columns[1], fmt.Sprintf(":%04X", number)) {
			continue
		}
		queued, _, _ := strings.Cut(columns[4], ":")
		if columns[3] == "0A" { // a listener's queue is of connections
			continue
		}
		bytes, err := strconv.ParseInt(queued, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		n += bytes
	}
	return n
}
