package doctor

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

// TestEveryCheckOfTheFleetFindsItsIllness has each check find one problem, and no check find one in
// a healthy state.
func TestEveryCheckOfTheFleetFindsItsIllness(t *testing.T) {
	healthy := func() status.State {
		return status.State{
			Outbox:     &outbox.Stats{LagSeconds: 5, Undelivered: 5, RangesAhead: 2},
			Partitions: []status.Partition{{Partition: 0, State: status.Open, Replicas: 3, Current: 3}, {Partition: 1, State: "closed"}},
			Consumers:  []status.Consumer{{ConsumerLag: consumers.ConsumerLag{Consumer: "c", Seconds: 5}}},
			Blocked:    []postgres.Blocked{{PID: 6, Seconds: 0.2, By: postgres.Blocker{PID: 5, Transaction: 0.3}}},
		}
	}
	if all := Fleet(healthy()); len(all) > 0 {
		t.Errorf("a healthy fleet: %v", all)
	}
	for want, harm := range map[string]func(st *status.State){
		"unavailable": func(st *status.State) {
			st.Unavailable = []status.Unavailable{{Server: "NATS", URL: "nats://x", Error: "refused"}}
		},
		"blocked-session": func(st *status.State) {
			st.Blocked = []postgres.Blocked{{PID: 7, By: postgres.Blocker{PID: 5, Transaction: 2}}}
		},
		"refused-stream":   func(st *status.State) { st.Partitions[0].Refused = "it lost events" },
		"no-leader":        func(st *status.State) { st.Partitions[0].NoLeader = "nobody" },
		"no-stream":        func(st *status.State) { st.Partitions[0].Replicas, st.Partitions[0].Current = 0, 0 },
		"replica-behind":   func(st *status.State) { st.Partitions[0].Current = 2 },
		"unheld-partition": func(st *status.State) { st.Unheld = []status.Unheld{{Kind: "relay", Partitions: []int{0}}} },
		"outbox-lag":       func(st *status.State) { st.Outbox.Undelivered = 301 },
		"outbox-retrying":  func(st *status.State) { st.Outbox.Retrying = 1 },
		"outbox-dlq":       func(st *status.State) { st.Outbox.DLQDepth = 1 },
		"outbox-ranges":    func(st *status.State) { st.Outbox.RangesAhead = 0 },
		"lost-events":      func(st *status.State) { st.Consumers[0].Lost = []string{"EVENTS-0"} },
		"paused":           func(st *status.State) { st.Consumers[0].Paused = &consumers.Paused{Actor: "x"} },
		"consumer-lag":     func(st *status.State) { st.Consumers[0].Seconds = 61 },
		"dead-letters":     func(st *status.State) { st.Consumers[0].DeadLetters = 1 },
		"lease-refused":    func(st *status.State) { st.Refusals = []status.Refusal{{Kind: "c", By: "c-1"}} },
		"publish-fails":    func(st *status.State) { st.Partitions[0].Trouble = "NATS has no room" },
		"subscriber-absent": func(st *status.State) {
			st.External = []broker.Durable{{Name: "m", Stream: "A", State: broker.Unserved},
				{Name: "m", Stream: "B", State: broker.Unserved},
				{Name: "other", State: broker.Working}}
		},
		"subscribers-unknown":   func(st *status.State) { st.NotListed = "no answer" },
		"subscriber-redelivers": func(st *status.State) { st.External = []broker.Durable{{Name: "m", State: broker.Redelivers}} },
		"lag-unknown":           func(st *status.State) { st.Consumers[0].Unknown = "no leader" },
	} {
		st := healthy()
		harm(&st)
		if all := Fleet(st); len(all) != 1 || all[0].Check != want || all[0].What == "" || all[0].Action() == "" || all[0].Where == "" {
			t.Errorf("%s: found %+v", want, all)
		}
	}
	st := healthy()
	for _, want := range []string{"tidings replay --consumer " + st.Consumers[0].Consumer, "tidings repair stream --dry-run"} {
		st.Partitions[0].Stream, st.Consumers[0].Lost = "EVENTS-0", []string{"EVENTS-0"}
		if got := Fleet(st); got[len(got)-1].Action() != want+" (docs/runbook/ConsumerPartitionStuck.md)" {
			t.Errorf("of a consumer that lost events: %+v, want %q", got, want)
		}
		st.Partitions[0].Refused = "the stream is gone"
	}
	st.External = []broker.Durable{{Name: "mailer", Stream: "EVENTS-0", State: broker.Unserved, Behind: 3}}
	st.Consumers, st.Partitions = nil, nil
	if got := Fleet(st); len(got) != 1 || !strings.HasPrefix(got[0].String(), "Subscriber mailer: 3 messages of EVENTS-0 wait for it") {
		t.Errorf("of a subscriber: %v, want its name as it is", got) // a sentence begins with a capital
	}
	now := time.Now()
	if all := failedJobs([]jobs.LastRun{{Job: "a", SucceededAt: now}, {Job: "b", FailedAt: now, LastError: "no luck"}}); len(all) != 1 ||
		all[0].Check != "job-failed" || all[0].Where != "b" {
		t.Errorf("of two jobs one failed: %+v", all)
	}
}

// TestRootCausesComeBeforeWhatFollowsFromThem has a relay that cannot reach NATS, and a consumer
// that somebody paused beside one that is late for its own reasons.
func TestRootCausesComeBeforeWhatFollowsFromThem(t *testing.T) {
	late := func(name string, paused *consumers.Paused) status.Consumer {
		return status.Consumer{ConsumerLag: consumers.ConsumerLag{Consumer: name, Seconds: LateSeconds + 1}, Paused: paused}
	}
	var got []string
	for _, f := range Fleet(status.State{Consumers: []status.Consumer{late("a", &consumers.Paused{}), late("b", nil)}}) {
		got = append(got, f.Check+" "+f.Where+"<"+f.FollowsFrom)
	}
	for _, f := range Fleet(status.State{Unheld: []status.Unheld{{Kind: "relay"}},
		Outbox:      &outbox.Stats{LagSeconds: LateSeconds + 1, RangesAhead: 1},
		Unavailable: []status.Unavailable{{Server: status.ServerNATS}}}) {
		got = append(got, f.Check+" "+f.Where+"<"+f.FollowsFrom)
	}
	leaderless := status.State{Unheld: []status.Unheld{{Kind: "relay", Partitions: []int{0}}},
		Partitions: []status.Partition{{Stream: "EVENTS-0", Replicas: 3, NoLeader: broker.ErrNoLeader.Error() + ": EVENTS-0"}}}
	for _, f := range Rank(append(Fleet(leaderless), finding("jetstream", "NATS", "no answer", ""))) {
		got = append(got, f.Check+" "+f.Where+"<"+f.FollowsFrom)
	}
	want := []string{"paused a<", "consumer-lag b<", "consumer-lag a<paused a", "unavailable NATS<",
		"unheld-partition relay<unavailable NATS", "outbox-lag outbox<unavailable NATS",
		"no-leader partition 0<", "unheld-partition relay<no-leader partition 0", "jetstream NATS<no-leader partition 0"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
	leaderless.Unheld[0].Partitions = []int{0, 1}
	if f := Fleet(leaderless)[1]; f.Check != "unheld-partition" || f.FollowsFrom != "" {
		t.Errorf("a partition with a leader is unheld for another reason: %+v", f)
	}
	leaderless.Unheld[0].Partitions = []int{0}
	if got := Fleet(leaderless)[0].What; !strings.HasSuffix(got, "wait too: EVENTS-0") {
		t.Errorf("it says twice that the stream waits: %s", got)
	}
	if got, want := Fleet(leaderless)[1].String(), "No running relay holds partition 0 (follows from no-leader partition 0)"; got != want {
		t.Errorf("got %q, want %q: its own remedy, to start a relay, does not help", got, want)
	}
}

// TestARefusedStreamNamesOneCommand: the reason has the command, which a restore needs and a repair
// does not.
func TestARefusedStreamNamesOneCommand(t *testing.T) {
	st := status.State{Partitions: []status.Partition{{Refused: "this database went back in time; run `tidings restore`"}}}
	if all := Fleet(st); len(all) != 1 || strings.Contains(all[0].String()+all[0].Action(), "repair stream") {
		t.Errorf("%v, action %q", all, all[0].Action())
	}
}

// TestAFullLockTableIsNoWrongAddress: PostgreSQL then refuses logins too, so the server looks
// unavailable.
func TestAFullLockTableIsNoWrongAddress(t *testing.T) {
	st := status.State{Unavailable: []status.Unavailable{{Server: "PostgreSQL", URL: "postgres://x",
		Error: "failed to connect: server error: FATAL: out of shared memory (SQLSTATE 53200)"}}}
	if all := Fleet(st); len(all) == 0 || !strings.Contains(all[0].Repair, "max_locks_per_transaction") {
		t.Errorf("%+v", all)
	}
}
