package api_test

import (
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// openTwo returns two API processes on one database, for the tests of tokens.
func openTwo(t *testing.T) [2]fixture {
	t.Helper()
	db := testkit.Postgres(t)
	var both [2]fixture
	for i := range both {
		f := fixture{system: db.Pool(t, postgres.RoleSystem), reg: prometheus.NewRegistry()}
		pool := db.Pool(t, postgres.RoleAPI)
		var err error
		f.Handler, err = api.New(config(), api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil),
			Projections: pool, Fleet: fleet, Log: testkit.Logger(t), Reg: f.reg})
		if err != nil {
			t.Fatal(err)
		}
		both[i] = f
	}
	return both
}

const authTTL = time.Second

func TestATokenThatEndedIsRefusedByEveryProcessASecondLater(t *testing.T) {
	t.Parallel()
	both := openTwo(t)
	system := both[0].system
	lives := 300 * time.Millisecond
	expiring, err := tokens.Create(t.Context(), system, tenant, "expiring", tokens.Roles(), time.Now().Add(lives))
	if err != nil {
		t.Fatal(err)
	}
	revoked := both[0].newToken(t, tenant, "revoked", tokens.Roles()...)
	for _, f := range both {
		for _, token := range []string{expiring, revoked} {
			f.token = token
			f.do(t, "GET", "/v1/follows/1/2", "") // both processes remember the token from here on
		}
	}
	expires := time.Now().Add(lives)
	if _, _, err := tokens.Revoke(t.Context(), system, tenant, "revoked"); err != nil {
		t.Fatal(err)
	}
	ended := map[string]time.Time{expiring: expires, revoked: time.Now()}
	for i, f := range both {
		for token, at := range ended {
			f.token = token
			testkit.Eventually(t, "the token to be refused", func() (bool, error) {
				began := time.Now()
				status := f.do(t, "PUT", "/v1/follows/1/2", "").StatusCode
				if status != 401 && began.Sub(at) > authTTL {
					t.Fatalf("process %d: %d, %s after the token ended", i, status, began.Sub(at))
				}
				return status == 401, nil
			})
		}
	}
}

// A slow request is authenticated again when its body has arrived.
func TestATokenThatEndsWhileABodyArrivesWritesNothing(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.want(t, 404, "GET", "/v1/follows/1/2", "")
	body, send := io.Pipe()
	r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/posts/5/comments", body)
	r.Header.Set("Authorization", "Bearer "+f.token)
	r.Header.Set("Content-Type", "application/json")
	w, done := httptest.NewRecorder(), make(chan struct{})
	go func() {
		defer close(done)
		f.ServeHTTP(w, r)
	}()
	if _, err := io.WriteString(send, `{"author_id":"3",`); err != nil { // the API reads the body: the token was valid
		t.Fatal(err)
	}
	if _, _, err := tokens.Revoke(t.Context(), f.system, tenant, "tester"); err != nil {
		t.Fatal(err)
	}
	<-time.After(authTTL)
	if _, err := io.WriteString(send, `"body":"late"}`); err != nil {
		t.Fatal(err)
	}
	_ = send.Close() // closing a pipe never fails
	<-done
	if w.Code != 401 || strings.Contains(w.Body.String(), "late") {
		t.Errorf("%d %s, want 401", w.Code, w.Body)
	}
	var n int
	if err := f.system.QueryRow(t.Context(), `SELECT count(*) FROM comments`).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d comments, %v", n, err)
	}
}

// A look-up begins before the token ends, and its answer says much later that the token is valid.
// The API discards that answer.
func TestASlowLookUpDoesNotProlongAToken(t *testing.T) {
	t.Parallel()
	f := open(t)
	ctx := t.Context()
	tx, err := f.system.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(ctx) }() // committed by then
	if _, err := tx.Exec(ctx, `LOCK TABLE api_tokens IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	status := make(chan int)
	go func() { status <- f.do(t, "PUT", "/v1/follows/1/2", "").StatusCode }()
	testkit.Eventually(t, "the look-up to wait for the lock", func() (waits bool, err error) {
		err = f.system.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'api_tokens'::regclass)`).Scan(
			&waits)
		return waits, err
	})
	<-time.After(authTTL)
	if _, err := tx.Exec(ctx, `UPDATE api_tokens SET revoked_at = now()`); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if got := <-status; got != 401 {
		t.Errorf("%d, want 401: the token was revoked before the answer", got)
	}
	if a := f.do(t, "GET", "/v1/follows/1/2", ""); a.StatusCode != 401 {
		t.Errorf("later: %d", a.StatusCode)
	}
}

// A system token has no tenant. Every route on a tenant's rows refuses it, whatever its roles.
func TestARouteTakesNoSystemToken(t *testing.T) {
	t.Parallel()
	f := openTwo(t)[0]
	f.token = f.newToken(t, tokens.SystemTenant, "operator", tokens.Roles()...)
	for _, path := range []string{"/v1/follows/1/2", "/v1/users/1/counts", "/v1/kinds", "/v1/moderation/pending", "/v1/outbox/dlq"} {
		res := f.do(t, "GET", path, "")
		if res.StatusCode == 404 {
			t.Errorf("%s: no such route", path)
		} else if res.StatusCode != 403 || !strings.Contains(res.body, "system token") || !strings.Contains(res.body, "role-missing") {
			t.Errorf("GET %s: %d %s", path, res.StatusCode, res.body)
		}
	}
	if res := f.do(t, "PUT", "/v1/follows/1/2", ""); res.StatusCode != 403 {
		t.Errorf("PUT: %d %s", res.StatusCode, res.body)
	}
}
