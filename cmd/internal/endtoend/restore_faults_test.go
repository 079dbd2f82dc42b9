//go:build faults

package endtoend_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/restore"
)

// TestARestoreRenewsThePartitionOfAnEarlierRepair restores after a repair replaced a partition. The
// restore renews the new partition like any other.
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

// TestALostReviewThatWasWrittenAgainEndsTheRestore takes the truth back to before some reviews.
// Before the restore, their authors write others in the same places, where the kind allows one per
// author.
func TestALostReviewThatWasWrittenAgainEndsTheRestore(t *testing.T) {
	for _, from := range []string{"the streams", "the histories"} {
		t.Run("from "+from, func(t *testing.T) {
			t.Parallel()
			s := &site{truthDB: testkit.Postgres(t), projectionsDB: testkit.Postgres(t), others: testkit.Postgres(t),
				nats: testkit.NATSProcess(t)}
			s.open(t)
			s.run()
			const product = 5
			edited := s.writeReview("3", event.IDOf(product))
			applied := func() { testkit.Eventually(t, "everything to be applied", s.applied) }
			applied()
			backup := s.truthDB.Copy(t)

			again := s.writeReview("1", event.IDOf(product)) // and the author writes another one
			withdrawn := s.writeReview("2", event.IDOf(product))
			s.deleteReview(withdrawn)
			replaced := s.writeReview("2", event.IDOf(product))
			s.deleteReview(edited)
			beside := s.writeReview("3", event.IDOf(product))
			kept := s.writeReview("4", event.IDOf(product))
			applied()
			for name := range s.parts {
				s.stop(name)
			}

			s.truthDB = backup
			if from == "the histories" {
				s.nats = testkit.NATSProcess(t)
			}
			s.open(t)
			if from == "the streams" { // the author's edit wins over the lost deletion, so the lost review beside it loses
				s.editReview(edited)
			}
			first, second := s.writeReview("1", event.IDOf(product)), s.writeReview("2", event.IDOf(product))
			s.run()
			code, stdout, stderr := s.tidings("restore", "--since", "1h", "--wait", "3m", "--yes", "--json")
			var report restore.Report
			if err := json.Unmarshal([]byte(stdout), &report); err != nil || code != 0 || !report.Verified.OK {
				t.Fatalf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
			}
			type version struct {
				State   string
				Version int64
			}
			got := make(map[string]version)
			var id string
			var v version
			rows, _ := s.truth.Query(t.Context(), `SELECT child_id::text, author_state, version FROM children WHERE kind = 'review'`)
			if _, err := pgx.ForEachRow(rows, []any{&id, &v.State, &v.Version}, func() error { got[id] = v; return nil }); err != nil {
				t.Fatal(err)
			}
			// A review loses to the one that its author has now. It becomes DELETED, a version
			// above each lost one.
			want := map[string]version{again: {event.AuthorDeleted, 2}, withdrawn: {event.AuthorDeleted, 3},
				replaced: {event.AuthorDeleted, 2}, edited: {event.AuthorActive, 3}, beside: {event.AuthorDeleted, 2},
				kept: {event.AuthorActive, 1}, first: {event.AuthorActive, 1}, second: {event.AuthorActive, 1}}
			if from == "the histories" {
				want[edited], want[beside] = version{event.AuthorDeleted, 2}, version{event.AuthorActive, 1}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("reviews (-want +got):\n%s", diff)
			}
			published := s.reviewEvents()
			for id, last := range got {
				if published[id] != last.Version {
					t.Errorf("review %s is at version %d, and the streams end with %d", id, last.Version, published[id])
				}
			}
			if code, stdout, stderr := s.tidings("restore", "--since", "1h", "--wait", "3m", "--yes", "--json"); code != 0 {
				t.Errorf("restored again: exit code %d\n%s\n%s", code, stdout, stderr)
			}
		})
	}
}
