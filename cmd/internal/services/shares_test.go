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
	"slices"
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
	"github.com/tidings/tidings/internal/tokens"
)

// attacked is an API process with callers that share it: a greedy and slow tenant, and a modest
// one. Each has addresses of its own.
type attacked struct {
	t              *testing.T
	addr, ops      string
	desk           string // the console's address
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
	a := &attacked{t: t, addr: testkit.FreeAddr(t), ops: testkit.FreeAddr(t), desk: testkit.FreeAddr(t),
		system: db.Pool(t, postgres.RoleSystem)}
	a.greedy, a.modest = a.token(1, "greedy"), a.token(2, "modest")
	vars := map[string]string{"DATABASE_URL": db.URL, "API_ADDR": a.addr, "OPS_ADDR": a.ops, "API_CURSOR_KEY": strings.Repeat("ab", 32),
		"CONSOLE": "true", "CONSOLE_ADDR": a.desk, "API_REQUEST_TIMEOUT": "25s", "API_MAX_WAIT": "25s"}
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
	testkit.Eventually(t, "the API to listen", func() (bool, error) {
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

// batch sends a batch of more than 64 KiB from the modest tenant, and returns the status of the
// answer.
func (a *attacked) batch() (status int, err error) {
	body := `{"operations":[{"op":"put","follower_id":"1","followee_id":"2"}` + strings.Repeat(" ", 100<<10) + `]}`
	w := a.dial(modestAddress)
	defer w.Close()
	if _, err := fmt.Fprintf(w, "POST /v1/follows:batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", a.modest, len(body), body); err != nil {
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

// attack is a greedy and a slow caller of one resource. It fails the test if a modest caller beside
// them is not served.
type attack struct {
	env map[string]string
	run func(a *attacked)
}

// attacks has one for each row of shares.Table, by the row's name.
var attacks = map[string]attack{
	shares.Connections.Name: {map[string]string{"API_ADDRESS_CONNECTIONS": "32"}, idleConnections},
	shares.Unread.Name:      {nil, unreadAnswers},
	shares.Arrived.Name:     {nil, slowArrivals},
	shares.Requests.Name:    {map[string]string{"API_MAX_REQUESTS": "16"}, lockedRow},
	shares.Bodies.Name:      {nil, slowBodies},
	shares.Documents.Name:   {nil, unreadDocuments},
	shares.Lookups.Name:     {nil, unknownTokens},
	shares.Waiting.Name:     {nil, waitingReads},
	shares.Writes.Name:      {nil, lockedRow},
	shares.Exports.Name:     {nil, unreadExports},
	shares.Rows.Name:        {nil, longLists},
	shares.LivePages.Name:   {nil, openLivePages},
	shares.SignIns.Name:     {nil, wrongTokens},
}

// Sixteen connections of one tenant announce batches of 4 MiB and send a byte. Then others send
// most of theirs at once. Neither takes memory that another tenant needs, and both lose their
// connections.
func TestOneCallersSlowBodiesRefuseNobodyElse(t *testing.T) {
	slowBodies(startAttacked(t, nil))
}

// served sends requests of the modest tenant, each on a connection of its own. Each must be
// answered with one of the statuses.
func (a *attacked) served(n int, beside, method, path string, want ...int) {
	a.t.Helper()
	for range n {
		w := a.dial(modestAddress)
		status, err := w.ask(method, path, a.modest)
		if err != nil || !slices.Contains(want, status) {
			a.t.Fatalf("beside %s another tenant's %s %s gets %d, %v", beside, method, path, status, err)
		}
		_ = w.Close() // everything was read
	}
}

// send sends the headers of a request without a body, and reads nothing.
func (w wire) send(method, path, token string, headers ...string) {
	w.t.Helper()
	more := ""
	for _, h := range headers {
		more += h + "\r\n"
	}
	if _, err := fmt.Fprintf(w, "%s %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n", method, path, token, more); err != nil {
		w.t.Fatal(err)
	}
}

func idleConnections(a *attacked) {
	const open, may = 96, 32
	var all []wire
	for i := range open {
		w := a.dial(greedyAddress)
		if i%2 == 0 {
			_, _ = io.WriteString(w, "GET / HTTP/1.1\r\nHost:") // the API may have closed it
		}
		all = append(all, w)
	}
	a.served(10, "connections without a request", "GET", "/v1/follows/1/2", http.StatusNotFound)
	for _, w := range all[:open-may] { // the newest remain
		if _, err := w.in.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			a.t.Fatalf("a connection beyond the address's %d: %v", may, err)
		}
	}
}

func unreadAnswers(a *attacked) {
	var body strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&body, `{"op":"put","follower_id":"%d","followee_id":"2"}`+"\n", i+3)
	}
	const readers = 20
	for range readers {
		w := a.dial(greedyAddress)
		if _, err := fmt.Fprintf(w, "POST /v1/follows:batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"+
			"Content-Type: application/x-ndjson\r\nContent-Length: %d\r\n\r\n%s", a.greedy, body.Len(), &body); err != nil {
			a.t.Fatal(err)
		}
	}
	largest := int64(0)
	for range 20 {
		a.served(1, "answers that nobody reads", "GET", "/v1/follows/1/2", http.StatusNotFound)
		a.served(1, "answers that nobody reads", "PUT", "/v1/follows/1/3", http.StatusCreated, http.StatusOK)
		largest = max(largest, unread(a.t, a.addr))
	}
	if most := int64(readers * 3 * shares.SendBuffer); largest > most {
		a.t.Errorf("%d answers pin %d bytes, want %d at most", readers, largest, most)
	}
}

func slowArrivals(a *attacked) {
	for range 200 {
		a.dial(greedyAddress).begin(a.greedy, 1000)
	}
	a.served(10, "bodies that do not arrive", "PUT", "/v1/follows/1/2", http.StatusCreated, http.StatusOK)
}

// lockedRow lets the greedy tenant write one row that somebody has locked.
func lockedRow(a *attacked) {
	a.t.Helper()
	w := a.dial(greedyAddress)
	if status, err := w.ask("PUT", "/v1/follows/1/2", a.greedy); err != nil || status != http.StatusCreated {
		a.t.Fatalf("%d, %v", status, err)
	}
	tx, err := a.system.Begin(a.t.Context())
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(a.t.Context())) }) // the API stops after it
	if _, err := tx.Exec(a.t.Context(), `SELECT FROM edges WHERE tenant_id = 1 FOR UPDATE`); err != nil {
		a.t.Fatal(err)
	}
	for range 60 {
		a.dial(greedyAddress).send("DELETE", "/v1/follows/1/2", a.greedy)
	}
	a.served(20, "writes of a locked row", "PUT", "/v1/follows/1/2", http.StatusCreated, http.StatusOK)
	a.served(20, "writes of a locked row", "GET", "/v1/follows/1/2", http.StatusOK)
}

func unknownTokens(a *attacked) {
	a.served(1, "nobody", "GET", "/v1/follows/1/2", http.StatusNotFound) // the process knows the token now
	for i := range 200 {
		a.dial(greedyAddress).send("GET", "/v1/follows/1/2", fmt.Sprint("guess-", i))
	}
	a.served(20, "guesses of tokens", "GET", "/v1/follows/1/2", http.StatusNotFound)
}

// waitingReads reads what no consumer will apply: none runs.
func waitingReads(a *attacked) {
	w := a.dial(greedyAddress)
	w.send("PUT", "/v1/follows/1/2", a.greedy)
	resp, err := http.ReadResponse(w.in, nil)
	if err != nil || resp.StatusCode != http.StatusCreated || resp.Body.Close() != nil {
		a.t.Fatalf("%v, %v", resp, err)
	}
	for range 60 {
		a.dial(greedyAddress).send("GET", "/v1/users/2/counts", a.greedy, "Tidings-Token: "+resp.Header.Get("Tidings-Token"))
	}
	a.served(20, "reads that wait", "GET", "/v1/users/2/counts", http.StatusOK)
}

func unreadExports(a *attacked) {
	for range 40 {
		a.dial(greedyAddress).send("GET", "/v1/follows:export", a.greedy)
	}
	a.served(10, "exports that nobody reads", "GET", "/v1/follows/1/2", http.StatusNotFound)
}

func longLists(a *attacked) {
	w := a.dial(greedyAddress)
	status, err := w.ask("GET", "/v1/users/2/followers?limit=1000000", a.greedy)
	if err != nil || status != http.StatusUnprocessableEntity {
		a.t.Errorf("a list of a million: %d, %v", status, err)
	}
	for range 40 {
		a.dial(greedyAddress).send("GET", "/v1/users/2/followers?limit=200", a.greedy)
	}
	a.served(10, "long lists", "GET", "/v1/users/2/followers?limit=1", http.StatusOK)
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
	if took := time.Since(start); took > 4*shares.PaceTime {
		a.t.Errorf("slow bodies keep their connections for %s, want %s", took, shares.PaceTime)
	}
	a.batches(5, "nobody")
}

// unreadDocuments asks for the OpenAPI document, which needs no token, on 200 connections, and does
// not read it. The kernel keeps little for them, others get the documents and their answers, and
// nothing remains.
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
			a.served(1, "readers that do not read", "GET", path, http.StatusOK, http.StatusNotFound)
			largest = max(largest, unread(a.t, a.addr))
		}
	}
	if largest > most {
		a.t.Errorf("200 readers that do not read pin %d MiB, want %d at most", largest>>20, most>>20)
	}
	testkit.Eventually(a.t, "the kernel to keep nothing for them", func() (bool, error) {
		return unread(a.t, a.addr) < 1<<20, nil
	})
}

// unread returns how many bytes the kernel keeps that a server on addr has written and the client's
// end has not taken. Only Linux tells.
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
