package cli

import (
	"context"
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

func TestADoctorWaitsForAFleetThatStarts(t *testing.T) {
	starting := []doctor.Finding{{Severity: doctor.Warning}, {Severity: doctor.Error}}
	for _, c := range []struct {
		wait, startsIn time.Duration
		took           time.Duration
		findings       int
	}{
		{0, time.Minute, 0, 2}, {time.Minute, 0, 0, 1}, {time.Minute, 3500 * time.Millisecond, 4 * time.Second, 1},
		{2 * time.Second, 3 * time.Second, 2 * time.Second, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			all, err := awaitHealth(t.Context(), c.wait, func(context.Context) ([]doctor.Finding, error) {
				if since := time.Since(began); since < c.startsIn/2 {
					return nil, errors.New("no schema")
				} else if since < c.startsIn {
					return starting, nil
				}
				return starting[:1], nil
			})
			if took := time.Since(began); took != c.took || c.wait > 0 && (err != nil || len(all) != c.findings) {
				t.Errorf("%+v: after %s %v, %v", c, took, all, err)
			}
		})
	}
}

// TestADoctorsCommandsExist checks that each finding names a command of this program, or a page of
// the documents.
func TestADoctorsCommandsExist(t *testing.T) {
	st := status.State{Outbox: &outbox.Stats{LagSeconds: 99, Retrying: 1, DLQDepth: 1}, Blocked: []postgres.Blocked{{}},
		Unheld:     []status.Unheld{{Kind: "x"}},
		Partitions: []status.Partition{{Refused: "x"}, {NoLeader: "x"}, {State: status.Open}, {Replicas: 1}},
		Consumers: []status.Consumer{{ConsumerLag: consumers.ConsumerLag{Consumer: "threadcache", Seconds: 99, DeadLetters: 1,
			Lost: []string{"x"}}, Paused: &consumers.Paused{}}}}
	ran := 0
	for _, f := range doctor.Fleet(st) {
		if command := regexp.MustCompile(`^tidings (.*)`).FindStringSubmatch(f.Repair); command != nil {
			ran++
			if code, _, stderr := run(t, nil, "", append(strings.Fields(command[1]), "--help")...); code != exitOK {
				t.Errorf("%s: %s", f.Repair, stderr)
			}
		}
	}
	if ran < 5 {
		t.Errorf("%d commands", ran)
	}
}

// TestDoctorEndsByWhatItFinds checks the findings and exit codes: a stopped fleet lists the missing
// processes, an old schema names the command.
func TestDoctorEndsByWhatItFinds(t *testing.T) {
	t.Parallel()
	n, db := testkit.NATS(t), testkit.Postgres(t)
	cfg := n.Config()
	js, err := jetstream.New(n.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": n.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix,
		"NATS_LIVE_PREFIX": cfg.LivePrefix}
	owner := db.Pool(t, postgres.RoleOwner)
	for _, set := range []string{"truth", "projections"} {
		if _, err := owner.Exec(t.Context(), `INSERT INTO tidings_`+set+
			`_migrations (version_id, is_applied) VALUES (99999, true)`); err != nil {
			t.Fatal(err)
		}
	}
	code, stdout, stderr := run(t, env, "", "doctor", "--json")
	var checks []string
	for line := range strings.Lines(stdout) {
		var f doctor.Finding
		if err := json.Unmarshal([]byte(line), &f); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		checks = append(checks, f.Check)
	}
	if code != exitAgain || !slices.Contains(checks, "unheld-partition") || slices.Contains(checks, "no-stream") ||
		strings.Count(stdout, `"schema-newer"`) != 2 {
		t.Errorf("exit code %d, findings %v: %s", code, checks, stderr)
	}
	if _, err := owner.Exec(t.Context(), `DROP TABLE tidings_outbox_migrations`); err != nil {
		t.Fatal(err)
	}
	if code, stdout, _ := run(t, env, "", "doctor"); code != exitAgain || !strings.Contains(stdout, "tidings migrate") {
		t.Errorf("without a schema: exit code %d: %s", code, stdout)
	}
	var out strings.Builder
	if _, err := findings([]doctor.Finding{{Severity: doctor.Warning}}); !errors.Is(err, errWarnings) {
		t.Errorf("with a warning alone: %v", err)
	}
	none, err := findings(nil)
	if err := errors.Join(err, none.text(&out)); err != nil || out.String() != "No findings.\n" {
		t.Errorf("with none: %v, %q", err, out.String())
	}
}

func TestVersionNamesTheSchemas(t *testing.T) {
	code, stdout, stderr := run(t, nil, "", "version", "--json")
	var b build
	if err := json.Unmarshal([]byte(stdout), &b); err != nil || code != exitOK {
		t.Fatalf("%d: %s%s: %v", code, stdout, stderr, err)
	}
	if b.Version == "" || !strings.HasPrefix(b.Go, "go1.") || b.Truth < 1 || b.Projections < 1 || b.Slots != event.Slots {
		t.Errorf("%+v", b)
	}
}
