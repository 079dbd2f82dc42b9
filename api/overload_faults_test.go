//go:build faults

package api_test

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// The database takes 20 ms for each follow, the pool has two connections, and 100 clients never
// pause. Most requests are refused at once. The admitted ones are answered in time, and no accepted
// write is lost. Once the database is quick again, all requests are answered.
func TestOverloadIsRefusedAndWhatIsAcceptedIsKept(t *testing.T) {
	db := testkit.Postgres(t)
	f := fixture{system: db.Pool(t, postgres.RoleSystem), reg: prometheus.NewRegistry()}
	owner := db.Pool(t, postgres.RoleOwner)
	pool, err := postgres.Open(t.Context(), db.URL, postgres.Config{MaxConns: 2, ConnectTimeout: 5 * time.Second}, postgres.RoleAPI, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	cfg := config()
	cfg.MaxRequests, cfg.MaxWait = 64, 500*time.Millisecond
	if f.Handler, err = api.New(cfg, api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool,
		Fleet: fleet, Log: testkit.Logger(t), Reg: f.reg}); err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "tester", tokens.Roles()...)
	other := f.newToken(t, tenant+1, "other", tokens.Roles()...)
	f.want(t, 201, "PUT", "/v1/follows/1/2", "")
	if _, err := owner.Exec(t.Context(), `
		CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END $$;
		CREATE TRIGGER slow BEFORE INSERT ON edges_follow FOR EACH ROW EXECUTE FUNCTION slow()`); err != nil {
		t.Fatal(err)
	}

	var mu sync.Mutex
	var took []time.Duration
	accepted, refused := map[event.ID]bool{"1": true}, 0
	var next atomic.Int64
	next.Store(100)
	var clients sync.WaitGroup
	var asked atomic.Bool
	began := time.Now()
	during := func() bool { // for three seconds, and longer on a machine that accepts little in them
		mu.Lock()
		few := len(took) < 50 || !asked.Load()
		mu.Unlock()
		ran := time.Since(began)
		return ran < 3*time.Second || few && ran < time.Minute
	}
	for range 100 {
		clients.Go(func() {
			for during() {
				follower := next.Add(1)
				start := time.Now()
				a := f.do(t, "PUT", fmt.Sprintf("/v1/follows/%d/2", follower), "")
				mu.Lock()
				switch {
				case a.StatusCode == 201:
					accepted[event.IDOf(follower)] = true
					took = append(took, time.Since(start))
				case a.StatusCode == 503 && a.text("code") == "overloaded" && a.Header.Get("Retry-After") != "":
					refused++
					if waited := time.Since(start); waited < 200*time.Millisecond { // otherwise clients that retry at once cost too much
						t.Errorf("refused after %s", waited)
					}
				default:
					t.Errorf("%d %s", a.StatusCode, a.body)
				}
				mu.Unlock()
			}
		})
	}
	let := false
	for try := 0; try < 15 && !let; try++ { // a refusal takes 200 ms
		let = f.do(t, "GET", "/v1/follows/1/2", "", "Authorization: Bearer "+other).StatusCode == 404
	}
	asked.Store(true)
	clients.Wait()
	ran := time.Since(began)
	if !let {
		t.Error("another tenant is not let in")
	}
	if refused < len(took) || len(took) < 50 {
		t.Fatalf("%d accepted, %d refused", len(took), refused)
	}
	// Each admitted request waits for those that were admitted before it, and the database sets
	// their pace. A machine may stand still for a while.
	most := 3*time.Second + 4*time.Duration(cfg.MaxRequests)*ran/time.Duration(len(took))
	slices.Sort(took)
	if p99 := took[len(took)*99/100]; p99 > most {
		t.Errorf("p99 %s, want %s at most", p99, most)
	}
	if got := wantKept(t, f.system, accepted); got != len(accepted) {
		t.Errorf("%d events, %d accepted", got, len(accepted))
	}
	if _, err := owner.Exec(t.Context(), `DROP TRIGGER slow ON edges_follow`); err != nil {
		t.Fatal(err)
	}
	for follower := range int64(50) {
		f.want(t, 201, "PUT", fmt.Sprintf("/v1/follows/%d/3", 1_000_000+follower), "")
	}
}
