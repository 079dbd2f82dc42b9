//go:build faults

package relay

import (
	"context"
	"testing"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestARepairPublishesNothingAgainThatAnotherLeaderHas(t *testing.T) {
	t.Parallel()
	d, p := pastOf(t)
	p.Lead(0)
	d.repairsNothing(p, RepairOptions{})
}

func TestARepairBelievesALossThatAMajorityOfTheReplicasReports(t *testing.T) {
	t.Parallel()
	d, p := pastOf(t)
	p.Lead(0, 1)
	report, err := Repair(t.Context(), d.pool, p.Through(d.b).Config(), testkit.Logger(t), RepairOptions{DryRun: true})
	if err != nil || report.Healthy || report.Partitions[0].Republish == 0 {
		t.Errorf("%+v, %v", report, err)
	}
}

func TestARepairFillsNoHoleThatAnotherLeaderDoesNotHave(t *testing.T) {
	t.Parallel()
	b := testkit.NATSProcess(t)
	d := wrote(t, b)
	p := testkit.NewPast(t, b, b.Config().StreamName(0))
	then := *d
	then.b = p.Then
	then.js = jetStream(t, p.Then)
	then.deleteMessages(0, 3, 4, 7)
	p.Lead(0)
	d.repairsNothing(p, RepairOptions{})
}

// TestARestoreDeletesNoMessageThatAnEarlierAnswerOmitted lets the truth forget its last writes. The
// leader that is asked for them does not know them either. The next one does.
func TestARestoreDeletesNoMessageThatAnEarlierAnswerOmitted(t *testing.T) {
	t.Parallel()
	b := testkit.NATSProcess(t)
	d := wrote(t, b)
	tail, rows := d.count(`SELECT tail_seq FROM outbox_partitions`), d.rows()
	p := testkit.NewPast(t, b, b.Config().StreamName(0))
	d.write(20)
	lost := d.rows() - rows
	if d.exec(`DELETE FROM outbox_messages WHERE stream_seq > $1`, tail) != lost {
		t.Fatal("not all later rows were deleted")
	}
	d.exec(`UPDATE outbox_partitions SET tail_seq = $1`, tail)
	p.Forget("INFO", 2) // for the list of the streams and the redo
	redone := int64(0)
	report, err := Repair(t.Context(), d.pool, p.Through(b).Config(), testkit.Logger(t), RepairOptions{
		Redo: func(_ context.Context, lost []event.Event) ([]string, error) {
			redone += int64(len(lost))
			return nil, outbox.ErrRowsMissing // the test needs no more
		}})
	if redone != lost || report.Partitions != nil {
		t.Errorf("%d of %d lost writes were written again: %+v, %v", redone, lost, report, err)
	}
	if s := d.stream(0).CachedInfo().State; s.Msgs != s.LastSeq {
		t.Errorf("the stream lacks messages: %+v", s)
	}
}
