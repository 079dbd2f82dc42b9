//go:build faults

package endtoend_test

import (
	"encoding/json"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/restore"
	"github.com/tidings/tidings/ops/verify"
)

// failedOver returns an installation whose truth has a standby, after some writes, and the pair.
func failedOver(t *testing.T) (*site, *testkit.Pair) {
	t.Helper()
	pair := testkit.PostgresPair(t)
	s := &site{truthDB: pair.DB(t), projectionsDB: testkit.Postgres(t), others: testkit.Postgres(t), nats: testkit.NATS(t)}
	s.open(t)
	s.run()
	s.writeMore(100)
	s.applyAll()
	return s, pair
}

// promoted returns the installation on the promoted standby, with parts of its own.
func (s *site) promoted(db *testkit.DB) *site {
	s.t.Helper()
	next := &site{truthDB: db, projectionsDB: s.projectionsDB, others: s.others, nats: s.nats}
	next.open(s.t)
	next.run()
	return next
}

// applyAll waits until the consumers have applied every write.
func (s *site) applyAll() {
	s.t.Helper()
	testkit.Eventually(s.t, "everything to be applied", s.applied)
}

// equal requires that truth, streams and projections have the same.
func (s *site) equal() {
	s.t.Helper()
	s.applyAll()
	code, stdout, stderr := s.tidings("verify", "--json", "--wait", "3m")
	var v verify.Report
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != 0 || !v.OK {
		s.t.Errorf("verify: exit code %d, %v %v\n%s", code, err, v.Why, stderr)
	}
	s.checkStreams(true)
}

// TestWhatALaggingStandbyLostIsRestoredFromStreamsAndHistories promotes an asynchronous standby
// that lags. The API had answered the lost writes, and relay and consumers had passed them on.
func TestWhatALaggingStandbyLostIsRestoredFromStreamsAndHistories(t *testing.T) {
	s, pair := failedOver(t)
	pair.Async(t)
	pair.Link.Stall()
	s.writeMore(100)
	s.applyAll()
	then := states(t, s.truth)
	for name := range s.parts {
		s.stop(name)
	}
	s = s.promoted(pair.FailOver(t, s.truthDB))
	lost, now := 0, states(t, s.truth)
	for key, was := range then {
		if now[key].Version < was.Version {
			lost++
		}
	}
	if lost < 10 {
		t.Fatalf("the standby lost %d entities: it does not lag", lost)
	}
	code, stdout, stderr := s.tidings("restore", "--since", "1h", "--wait", "3m", "--yes", "--json")
	var report restore.Report
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || code != 0 || !report.Verified.OK {
		t.Fatalf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	s.checkRecovered(then, true)
	s.writeMore(100)
	s.equal()
}
