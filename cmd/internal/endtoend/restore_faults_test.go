//go:build faults

package endtoend_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/restore"
	"github.com/tidings/tidings/internal/testkit"
)

// TestARestoreRenewsThePartitionOfAnEarlierRepair restores after a repair replaced a partition. The restore renews the
// new partition like any other.
func TestARestoreRenewsThePartitionOfAnEarlierRepair(t *testing.T) {
	s := &site{truthDB: testkit.Postgres(t), projectionsDB: testkit.Postgres(t), others: testkit.Postgres(t), nats: testkit.NATSProcess(t)}
	s.open(t)
	s.run()
	s.writeMore(20)
	if err := s.js.DeleteStream(t.Context(), s.nats.Config().Stream+"-0"); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := s.tidings("repair", "stream", "--yes"); code != 0 {
		t.Fatalf("repair: exit code %d\n%s", code, stderr)
	}
	s.writeMore(20)
	code, stdout, stderr := s.tidings("restore", "--since", "1h", "--wait", "3m", "--yes", "--json")
	var report restore.Report
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || code != 0 || !slices.Equal(report.Renewed, []int{1}) {
		t.Errorf("exit code %d, %v, renewed %v, want partition 1\n%s", code, err, report.Renewed, stderr)
	}

	s.stop("archiver")
	s.writeMore(1)
	if code, _, stderr := s.tidings("restore", "--since", "1h", "--wait", "2s", "--yes"); code != 3 ||
		!strings.Contains(stderr, "not finished") {
		t.Errorf("without the archiver: exit code %d\n%s", code, stderr)
	}
}
