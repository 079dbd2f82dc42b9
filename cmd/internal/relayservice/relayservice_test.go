package relayservice

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestTheRelayWaitsForServersAndTheSchema(t *testing.T) {
	testkit.DefaultLogger(t)
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	owner := db.Pool(t, postgres.RoleOwner)
	// The state before the first migration.
	if _, err := owner.Exec(t.Context(), `ALTER TABLE tidings_outbox_migrations RENAME TO held`); err != nil {
		t.Fatal(err)
	}
	dbURL, openDB := testkit.Gate(t, db.URL)
	natsURL, openNATS := testkit.Gate(t, nats.URL)
	cfg, ops := nats.Config(), testkit.FreeAddr(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, envconfig.MapLookuper(map[string]string{"DATABASE_URL": dbURL, "NATS_URL": natsURL, "OPS_ADDR": ops,
			"NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix, "NATS_LIVE_PREFIX": cfg.LivePrefix}))
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ready := func(want int, because string) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprintf("/readyz to answer %d", want), func() (bool, error) {
			select {
			case err := <-done:
				t.Fatalf("it ended: %v", err)
			default:
			}
			resp, err := client.Get("http://" + ops + "/readyz")
			if err != nil {
				return false, err
			}
			body, err := io.ReadAll(resp.Body)
			return resp.StatusCode == want && strings.Contains(string(body), because), errors.Join(err, resp.Body.Close())
		})
	}
	ready(http.StatusServiceUnavailable, "")
	openDB()
	ready(http.StatusServiceUnavailable, "run `tidings migrate`")
	if _, err := owner.Exec(t.Context(), `ALTER TABLE held RENAME TO tidings_outbox_migrations`); err != nil {
		t.Fatal(err)
	}
	openNATS()
	ready(http.StatusOK, "")
	stop()
	if err := <-done; err != nil {
		t.Errorf("stopped with %v", err)
	}
}

func TestTheRelayDoesNotWaitForADatabaseThatRefusesIt(t *testing.T) {
	testkit.DefaultLogger(t)
	absent, err := url.Parse(testkit.Postgres(t).URL)
	if err != nil {
		t.Fatal(err)
	}
	absent.Path = "/not_there"
	err = run(t.Context(), envconfig.MapLookuper(map[string]string{"DATABASE_URL": absent.String(), "OPS_ADDR": "127.0.0.1:0"}))
	if !postgres.IsLogin(err) {
		t.Errorf("got %v", err)
	}
}
