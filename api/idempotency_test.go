package api_test

import (
	"fmt"
	"net"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

func TestFiftyEqualCreatesMakeOneComment(t *testing.T) {
	t.Parallel()
	f := open(t)
	srv := httptest.NewServer(f)
	t.Cleanup(srv.Close)
	const path, body = "/v1/posts/5/comments", `{"author_id":"3","body":"once"}`
	answers := make([]answer, 50)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() { answers[i] = f.do(t, "POST", path, body, "Idempotency-Key: k") })
	}
	wg.Wait()
	first := 0
	for _, a := range answers {
		if a.StatusCode != 201 || a.body != answers[0].body || a.Header.Get("Tidings-Token") != answers[0].Header.Get("Tidings-Token") {
			t.Errorf("%d %s, want 201 %s", a.StatusCode, a.body, answers[0].body)
		}
		if a.Header.Get("Idempotency-Replayed") == "" {
			first++
		}
	}
	if got := f.events(t, tenant); first != 1 || len(got) != 1 {
		t.Errorf("%d answers are not replays, %d events: want 1 and 1", first, len(got))
	}
	f.want(t, 422, "POST", path, `{"author_id":"3","body":"other"}`, "Idempotency-Key: k")
	if a := f.want(t, 201, "POST", path, `{"author_id":"4","body":"other"}`,
		"Idempotency-Key: k"); a.Header.Get("Idempotency-Replayed") != "" {
		t.Error("another author's key is a replay")
	}
	other := f
	other.token = f.newToken(t, 2, "foreigner", "write")
	if a := other.want(t, 201, "POST", path, `{"author_id":"3","body":"other"}`,
		"Idempotency-Key: k"); a.Header.Get("Idempotency-Replayed") != "" {
		t.Error("another tenant's key is a replay")
	}

	// A client disconnects at a random moment without its answer, and sends the request again.
	for n := range 20 {
		key, text := fmt.Sprint("lost-", n), fmt.Sprintf(`{"author_id":"9","body":"lost %d"}`, n)
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: "+
			"application/json\r\nIdempotency-Key: %s\r\nContent-Length: %d\r\n\r\n%s",
			path, f.token, key, len(text), text)
		if err != nil {
			t.Fatal(err)
		}
		written := n%2 == 0
		if written { // the answer is there, and is never read
			testkit.Eventually(t, "the comment to be written", func() (yes bool, err error) {
				err = f.system.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM comments WHERE author_id = '9' AND body = $1)`,
					fmt.Sprint("lost ", n)).Scan(&yes)
				return yes, err
			})
		}
		if err := conn.(*net.TCPConn).SetLinger(0); err != nil {
			t.Fatal(err)
		}
		conn.Close()
		a := f.want(t, 201, "POST", path, text, "Idempotency-Key: "+key)
		if written && a.Header.Get("Idempotency-Replayed") != "true" {
			t.Errorf("what was written before the client went is not replayed: %s", a.body)
		}
	}
	var comments, events int
	err := f.system.QueryRow(t.Context(), `SELECT count(*), (SELECT count(*) FROM outbox_messages WHERE payload->>'author_id' = '9')
		FROM comments WHERE author_id = '9'`).Scan(&comments, &events)
	if err != nil || comments != 20 || events != 20 {
		t.Errorf("%d comments, %d events, %v: want 20 and 20", comments, events, err)
	}
}
