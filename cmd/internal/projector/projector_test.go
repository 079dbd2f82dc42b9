package projector_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/projections/followercounts"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func load(t *testing.T, env map[string]string) projector.Config {
	t.Helper()
	var cfg projector.Config
	if err := envconfig.ProcessWith(t.Context(), &envconfig.Config{Target: &cfg, Lookuper: envconfig.MapLookuper(env)}); err != nil {
		t.Fatal(err)
	}
	return cfg
}

// TestAProjectorShowsTheFleetAndStopsCleanly has a consumer with an offset but no process, and one
// event that it has not applied.
func TestAProjectorShowsTheFleetAndStopsCleanly(t *testing.T) {
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	js, err := jetstream.New(nats.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := broker.Declare(t.Context(), js, nats.Config(), broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id, stream_created, as_of)
		VALUES ('asleep', $1, 0, $2, now())`, stream.Name, stream.Created); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "events.0.t1.follow.created", []byte("{}"), jetstream.WithExpectLastSequence(0)); err != nil {
		t.Fatal(err)
	}
	cfg := load(t, map[string]string{"DATABASE_URL": db.URL, "NATS_URL": nats.URL})
	cfg.Broker = nats.Config()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	addr := testkit.FreeAddr(t)
	go func() { done <- daemon.Alone(ctx, followercounts.Name, addr, projector.Part(cfg, followercounts.New)) }()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	testkit.Eventually(t, "readiness", func() (bool, error) {
		resp, err := client.Get("http://" + addr + "/readyz")
		if err != nil {
			return false, err
		}
		return resp.StatusCode == http.StatusOK, resp.Body.Close()
	})
	testkit.Eventually(t, "the metrics of the fleet", func() (bool, error) { // a slow scrape leaves the lags out
		resp, err := client.Get("http://" + addr + "/metrics")
		if err != nil {
			return false, err
		}
		body, err := io.ReadAll(resp.Body)
		if err := errors.Join(err, resp.Body.Close()); err != nil {
			return false, err
		}
		for _, want := range []string{`tidings_consumer_offset_lag_seconds\{consumer="asleep"\} [0-9.e-]*[1-9]`,
			`tidings_consumer_offset_dead_letters\{consumer="asleep"\} 0`,
			`tidings_stream_messages\{stream="EVENTS-0"\} 1\b`, `tidings_stream_bytes\{stream="EVENTS-0"\} [1-9]`,
			`tidings_stream_current_replicas\{stream="EVENTS-0"\} 1\b`,
			`tidings_jetstream_storage_bytes [1-9]`, `tidings_build_info\{binary="followercounts",version="[^"]+"\} 1\b`} {
			if !regexp.MustCompile(want).Match(body) {
				return false, fmt.Errorf("no %s", want)
			}
		}
		return true, nil
	})
	stop()
	if err := <-done; err != nil {
		t.Errorf("stopped with %v", err)
	}
}

func TestAProjectorWaitsForServersAndTheSchema(t *testing.T) {
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	owner := db.Pool(t, postgres.RoleOwner)
	// the state before the first migration
	if _, err := owner.Exec(t.Context(), `ALTER TABLE tidings_projections_migrations RENAME TO held`); err != nil {
		t.Fatal(err)
	}
	dbURL, openDB := testkit.Gate(t, db.URL)
	natsURL, openNATS := testkit.Gate(t, nats.URL)
	js, err := jetstream.New(nats.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, nats.Config(), broker.Partition{LastSlot: event.Slots - 1},
		testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	cfg := load(t, map[string]string{"DATABASE_URL": dbURL, "NATS_URL": natsURL})
	cfg.Broker = nats.Config()
	cfg.Broker.URL = natsURL
	addr := testkit.FreeAddr(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- daemon.Alone(ctx, followercounts.Name, addr, projector.Part(cfg, followercounts.New)) }()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answers := func(path string, want int, because string) func() (bool, error) {
		return func() (bool, error) {
			select {
			case err := <-done:
				t.Fatalf("it ended: %v", err)
			default:
			}
			resp, err := client.Get("http://" + addr + path)
			if err != nil {
				return false, err
			}
			body, err := io.ReadAll(resp.Body)
			return resp.StatusCode == want && strings.Contains(string(body), because), errors.Join(err, resp.Body.Close())
		}
	}
	testkit.Eventually(t, "it to live", answers("/healthz", http.StatusOK, ""))
	testkit.Eventually(t, "it not to be ready", answers("/readyz", http.StatusServiceUnavailable, ""))
	openDB()
	testkit.Eventually(t, "it to live without the schema", answers("/healthz", http.StatusOK, ""))
	testkit.Eventually(t, "it to say what it waits for",
		answers("/readyz", http.StatusServiceUnavailable, "run `tidings migrate`"))
	if _, err := owner.Exec(t.Context(), `ALTER TABLE held RENAME TO tidings_projections_migrations`); err != nil {
		t.Fatal(err)
	}
	openNATS()
	testkit.Eventually(t, "readiness", answers("/readyz", http.StatusOK, ""))
	stop()
	if err := <-done; err != nil {
		t.Errorf("stopped with %v", err)
	}
}

func TestAProjectorThatWaitsStopsCleanly(t *testing.T) {
	url, _ := testkit.Gate(t, testkit.Postgres(t).URL)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := daemon.Alone(ctx, "test", "127.0.0.1:0", projector.Part(load(t, map[string]string{"DATABASE_URL": url}),
		followercounts.New)); err != nil {
		t.Errorf("stopped with %v", err)
	}
}

func TestAProjectorSaysWhichSettingIsMissing(t *testing.T) {
	err := daemon.Alone(t.Context(), "test", "127.0.0.1:0", projector.Part(load(t, nil), followercounts.New))
	if err == nil || !strings.Contains(err.Error(), "PROJECTIONS_DATABASE_URL") {
		t.Errorf("got %v", err)
	}
}

func TestCellsThatCannotBeReadAreRefused(t *testing.T) {
	for want, env := range map[string]map[string]string{
		"":                         {"NATS_CELLS": "EVENTS-a:events-a,EVENTS-b:events-b", "PROJECTIONS_DATABASE_URL": "x"},
		"two cells the subjects":   {"NATS_CELLS": "EVENTS-a:events,EVENTS-b:events", "PROJECTIONS_DATABASE_URL": "x"},
		"NATS_STREAM is":           {"NATS_CELLS": "EVENTS.a:events-a", "PROJECTIONS_DATABASE_URL": "x"},
		"NATS_CELLS leaves out EV": {"NATS_CELLS": "EVENTS-a:events-a,EVENTS-b:events-b", "DATABASE_URL": "x"},
	} {
		if err := load(t, env).Validate(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", env, err, want)
		}
	}
}
