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

func TestEveryCombinationOfBackupsEndsInOneTruth(t *testing.T) {
	restoreEach(t,
		mix{"the truth alone", 0, 2, 2, 2, false, 0, false, nil},
		mix{"the truth alone, and writers who do not wait", 0, 2, 2, 0, false, 60, false, nil},
		mix{"the stream alone", 2, 0, 2, 2, false, 0, false, nil},
		mix{"the projections alone", 2, 2, 0, 2, false, 0, false, nil},
		mix{"the truth is older than the stream, the projections are newer than both", 0, 1, 2, 2, true, 0, false,
			[]string{"what the streams have", "what the histories have", "replacing the streams", "until everything", "comparing"}},
		mix{"the stream is older than the truth, and the projections older than both", 2, 1, 0, 2, false, 0, false, nil},
		mix{"everything, while the projection outside is stopped", 0, 0, 0, 0, false, 0, true, nil},
		mix{"the truth is restored, and the streams are lost", 1, -1, 2, 2, true, 0, false, nil},
	)
}
