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

	"github.com/tidings/tidings/cmd/internal/doctor"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// TestEveryCheckOfTheFleetFindsItsIllness has each check find one state, and nothing in a healthy one.
func TestEveryCheckOfTheFleetFindsItsIllness(t *testing.T) {
	healthy := func() systemState {
		return systemState{
			Outbox:     &outbox.Stats{LagSeconds: 5, Undelivered: 5, RangesAhead: 2},
			Partitions: []partitionState{{Partition: 0, State: stateOpen, Replicas: 3, Current: 3}, {Partition: 1, State: "closed"}},
			Consumers:  []consumerState{{ConsumerLag: consumers.ConsumerLag{Consumer: "c", Seconds: 5}}},
		}
	}
	if all := fleetFindings(healthy()); len(all) > 0 {
		t.Errorf("a healthy fleet: %v", all)
	}
	for want, harm := range map[string]func(st *systemState){
		"unavailable":      func(st *systemState) { st.Away = []awayServer{{"NATS", "nats://x", "refused"}} },
		"blocked-session":  func(st *systemState) { st.Blocked = []postgres.Blocked{{PID: 7}} },
		"refused-stream":   func(st *systemState) { st.Partitions[0].Refused = "it lost events" },
		"no-leader":        func(st *systemState) { st.Partitions[0].NoLeader = "nobody" },
		"no-stream":        func(st *systemState) { st.Partitions[0].Replicas, st.Partitions[0].Current = 0, 0 },
		"replica-behind":   func(st *systemState) { st.Partitions[0].Current = 2 },
		"unheld-partition": func(st *systemState) { st.Unheld = []unheldState{{"relay", []int{0}}} },
		"outbox-lag":       func(st *systemState) { st.Outbox.Undelivered = 301 },
		"outbox-retrying":  func(st *systemState) { st.Outbox.Retrying = 1 },
		"outbox-dlq":       func(st *systemState) { st.Outbox.DLQDepth = 1 },
		"outbox-ranges":    func(st *systemState) { st.Outbox.RangesAhead = 0 },
		"lost-events":      func(st *systemState) { st.Consumers[0].Lost = []string{"EVENTS-0"} },
		"paused":           func(st *systemState) { st.Consumers[0].Paused = &consumers.Paused{Actor: "x"} },
		"consumer-lag":     func(st *systemState) { st.Consumers[0].Seconds = 61 },
		"dead-letters":     func(st *systemState) { st.Consumers[0].DeadLetters = 1 },
	} {
		st := healthy()
		harm(&st)
		if all := fleetFindings(st); len(all) != 1 || all[0].Check != want || all[0].What == "" || all[0].Mend == "" || all[0].Where == "" {
			t.Errorf("%s: found %+v", want, all)
		}
	}
	now := time.Now()
	if all := jobFindings([]jobs.LastRun{{Job: "a", SucceededAt: now}, {Job: "b", FailedAt: now, LastError: "no luck"}}); len(all) != 1 || all[0].Check != "job-failed" || all[0].Where != "b" {
		t.Errorf("of two jobs one failed: %+v", all)
	}
}

func TestADoctorWaitsForAFleetThatStarts(t *testing.T) {
	starting := []doctor.Finding{{Severity: doctor.Warning}, {Severity: doctor.Error}}
	for _, c := range []struct {
		wait, startsIn time.Duration
		took           time.Duration
		findings       int
	}{
		{0, time.Minute, 0, 2}, {time.Minute, 0, 0, 1}, {time.Minute, 3500 * time.Millisecond, 4 * time.Second, 1}, {2 * time.Second, 3 * time.Second, 2 * time.Second, 2},
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

// TestADoctorFindsMonthsWithoutAnExport looks at ranges as coldstore.Store.Due returns them.
func TestADoctorFindsMonthsWithoutAnExport(t *testing.T) {
	now := time.Date(2030, 6, 15, 0, 0, 0, 0, time.UTC)
	due := []outbox.Range{
		{FirstAt: time.Date(2030, 5, 31, 23, 0, 0, 0, time.UTC), ArchivedAt: now.Add(-exportLate - 1)}, {FirstAt: time.Date(2030, 5, 2, 0, 0, 0, 0, time.UTC), ArchivedAt: now.AddDate(0, 0, -9)},
		{FirstAt: time.Date(2030, 4, 2, 0, 0, 0, 0, time.UTC), ArchivedAt: now.AddDate(0, 0, -30)}, {FirstAt: now, ArchivedAt: now.Add(-exportLate)},
	}
	for _, c := range []struct {
		name, url string
		exported  bool
		due       []outbox.Range
		want      []string // where, and part of the rest
	}{
		{"the archive was never exported", "", false, due, nil},
		{"everything has an export", "file:///x", true, nil, nil},
		{"the export of a young range is on its way", "file:///x", true, due[3:], nil},
		{"two months have none", "file:///x", false, due, []string{"archive of 2030-04: 1 range without an export: ", "--month 2030-04", "archive of 2030-05: 2 ranges without", "--month 2030-05"}},
		{"exports were turned off", "", true, due[2:], []string{"archive of 2030-04: 1 range without an export, and exports are off", "outbox_archive_export_url="}},
	} {
		var said string
		all := exportFindings(c.url, c.exported, c.due, now)
		for _, f := range all {
			said += f.Where + ": " + f.What + " " + f.Mend + "\n"
			if f.Check != "archive-export" || f.Severity != doctor.Warning {
				t.Errorf("%s: %+v", c.name, f)
			}
		}
		if slices.ContainsFunc(c.want, func(s string) bool { return !strings.Contains(said, s) }) || len(all) != len(c.want)/2 {
			t.Errorf("%s: %s", c.name, said)
		}
	}
}

// TestADoctorsCommandsExist: what a finding tells to run is a command of this program, or a page of the documents.
func TestADoctorsCommandsExist(t *testing.T) {
	st := systemState{Outbox: &outbox.Stats{LagSeconds: 99, Retrying: 1, DLQDepth: 1}, Blocked: []postgres.Blocked{{}}, Unheld: []unheldState{{Kind: "x"}},
		Partitions: []partitionState{{Refused: "x"}, {NoLeader: "x"}, {State: stateOpen}, {Replicas: 1}},
		Consumers:  []consumerState{{ConsumerLag: consumers.ConsumerLag{Consumer: "threadcache", Seconds: 99, DeadLetters: 1, Lost: []string{"x"}}, Paused: &consumers.Paused{}}}}
	ran := 0
	for _, f := range fleetFindings(st) {
		if command := regexp.MustCompile(`^tidings (.*)`).FindStringSubmatch(f.Mend); command != nil {
			ran++
			if code, _, stderr := run(t, nil, "", append(strings.Fields(command[1]), "--help")...); code != exitOK {
				t.Errorf("%s: %s", f.Mend, stderr)
			}
		}
	}
	if ran < 5 {
		t.Errorf("%d commands", ran)
	}
}

// TestDoctorEndsByWhatItFinds: of a fleet that is not started it says who is missing, of an old schema what to run.
func TestDoctorEndsByWhatItFinds(t *testing.T) {
	n, db := testkit.NATS(t), testkit.Postgres(t)
	cfg := n.Config()
	js, err := jetstream.New(n.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": n.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix, "NATS_LIVE_PREFIX": cfg.LivePrefix}
	owner := db.Pool(t, postgres.RoleOwner)
	for _, set := range []string{"truth", "projections"} {
		if _, err := owner.Exec(t.Context(), `INSERT INTO tidings_`+set+`_migrations (version_id, is_applied) VALUES (99999, true)`); err != nil {
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
	if code != exitAgain || !slices.Contains(checks, "unheld-partition") || slices.Contains(checks, "no-stream") || strings.Count(stdout, `"schema-newer"`) != 2 {
		t.Errorf("exit code %d, findings %v: %s", code, checks, stderr)
	}
	if _, err := owner.Exec(t.Context(), `DROP TABLE tidings_truth_migrations`); err != nil {
		t.Fatal(err)
	}
	if code, stdout, _ := run(t, env, "", "doctor"); code != exitAgain || !strings.Contains(stdout, "tidings migrate") {
		t.Errorf("without a schema: exit code %d: %s", code, stdout)
	}
	var out strings.Builder
	p := Process{Stdout: &out}
	if err := p.printFindings([]doctor.Finding{{Severity: doctor.Warning}}, false); !errors.Is(err, errWarnings) {
		t.Errorf("with a warning alone: %v", err)
	}
	out.Reset()
	if err := p.printFindings(nil, false); err != nil || out.String() != "No findings.\n" {
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
