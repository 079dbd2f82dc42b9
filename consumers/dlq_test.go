package consumers_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// bad is a defect of a projection: it refuses the follows of followee whose version is in versions.
type bad struct {
	mu       sync.Mutex
	followee event.ID
	versions map[int64]bool
}

func (b *bad) set(followee event.ID, versions ...int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.followee, b.versions = followee, map[int64]bool{}
	for _, v := range versions {
		b.versions[v] = true
	}
}

func (b *bad) hook(_ context.Context, _ pgx.Tx, events []event.Event) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range events {
		var f event.Follow
		if err := events[i].DecodePayload(&f); err != nil {
			return err
		}
		if events[i].AggregateID == b.followee && b.versions[f.Version] {
			return event.Permanent(fmt.Errorf("version %d is refused", f.Version))
		}
	}
	return nil
}

func (r *rig) letters(f consumers.DeadLetterFilter) []consumers.DeadLetter {
	r.t.Helper()
	all, err := postgres.Collect(consumers.NewDeadLetters[logbook](r.system).List(context.Background(), f, consumers.MaxDeadLetters))
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

// first returns the first dead letter of a followee.
func (r *rig) first(followee event.ID) consumers.DeadLetter {
	r.t.Helper()
	all := r.letters(consumers.DeadLetterFilter{AggregateID: followee, First: true})
	if len(all) != 1 {
		r.t.Fatalf("%d first dead letters of %s", len(all), followee)
	}
	return all[0]
}

// notes returns the recorded actions.
func (r *rig) notes() []string {
	r.t.Helper()
	rows, _ := r.owner.Query(context.Background(), `SELECT concat_ws(' ', actor, action, consumer_name, aggregate_id, stream_seq, error,
		reason) FROM consumer_dead_letter_actions ORDER BY id`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

// TestAnotherInstanceParksBehindDeadLetters starts an instance after another one has parked an
// event. A later event of its aggregate is parked with the headers that a retry reads.
func TestAnotherInstanceParksBehindDeadLetters(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 2)
	projection := logbook{hook: defect.hook}
	in := r.run(r.system, projection)
	r.publish(follow("1", "3", 1), follow("1", "3", 2))
	r.awaitLag(0)
	in.stop()
	defect.set("3")
	r.run(r.system, projection)
	r.publish(follow("1", "3", 3), follow("1", "35", 1))
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "35", 1}})
	all := r.letters(consumers.DeadLetterFilter{})
	if len(all) != 2 || all[1].Error != consumers.BehindAnother {
		t.Fatalf("dead letters %+v", all)
	}
	d := consumers.NewDeadLetters(r.system, projection)
	if res, err := d.Retry(t.Context(), consumers.DeadLetterRequest{ID: all[0].ID, Actor: "ann"}); err != nil || res.Gone != 2 {
		t.Errorf("a retry: %+v, %v", res, err)
	}
	r.wantLines([]line{{"1", "3", 1}, {"1", "35", 1}, {"1", "3", 2}, {"1", "3", 3}})
}

func TestARetryAppliesWhatWasParkedInItsOrder(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 2, 4)
	projection := logbook{hook: defect.hook}
	d := consumers.NewDeadLetters(r.system, projection)
	r.run(r.system, projection)
	r.publish(follow("1", "3", 1), follow("1", "3", 2), follow("1", "35", 1), follow("1", "3", 3), follow("1", "3", 4), follow("1", "3", 5))
	r.awaitLag(0)
	all := r.letters(consumers.DeadLetterFilter{})
	if len(all) != 4 || !all[0].First || all[1].First || all[0].Event.Seq != 2 || all[3].Event.Seq != 6 ||
		all[0].Event.Stream != "EVENTS-0" || all[0].Event.Type != event.Created {
		t.Fatalf("dead letters %+v", all)
	}
	retry := func(id int64, dry bool) consumers.DeadLetterResult {
		t.Helper()
		res, err := d.Retry(t.Context(), consumers.DeadLetterRequest{ID: id, Actor: "ann", Reason: "why", DryRun: dry})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	expect := func(res consumers.DeadLetterResult, gone int, left, next int64, fault string) {
		t.Helper()
		if res.Gone != gone || res.Left != left || res.Next != next || (res.Fault == nil) != (fault == "") ||
			res.Fault != nil && res.Fault.Error() != fault {
			t.Errorf("%+v, want %d gone, %d left from %d on, %q", res, gone, left, next, fault)
		}
	}
	applied := []line{{"1", "3", 1}, {"1", "35", 1}}
	expect(retry(all[0].ID, false), 0, 4, all[0].ID, "version 2 is refused")
	defect.set("3", 4)
	expect(retry(all[0].ID, true), 2, 2, all[2].ID, "version 4 is refused")
	r.wantLines(applied)
	expect(retry(all[0].ID, false), 2, 2, all[2].ID, "version 4 is refused")
	applied = append(applied, line{"1", "3", 2}, line{"1", "3", 3})
	r.wantLines(applied)
	if now := r.first("3"); now.ID != all[2].ID || now.Error != "version 4 is refused" {
		t.Errorf("the first one is %+v", now)
	}
	if _, err := d.Retry(t.Context(), consumers.DeadLetterRequest{ID: all[0].ID, Actor: "ann"}); !errors.Is(err, consumers.ErrNotParked) {
		t.Errorf("a second retry of an applied dead letter: %v", err)
	}
	var notFirst *consumers.NotFirstError
	for _, act := range []func(context.Context, consumers.DeadLetterRequest) (consumers.DeadLetterResult, error){d.Retry, d.Discard} {
		if _, err := act(t.Context(), consumers.DeadLetterRequest{ID: all[3].ID, Actor: "ann"}); !errors.As(err, &notFirst) ||
			notFirst.First != all[2].ID {
			t.Errorf("the second one: %v", err)
		}
	}
	if _, err := consumers.NewDeadLetters[logbook](r.system).Retry(t.Context(),
		consumers.DeadLetterRequest{ID: all[2].ID, Actor: "ann"}); err == nil {
		t.Error("a retry without the projection succeeded")
	}

	// A later event is parked behind the remaining ones, and Discard removes only the first.
	r.publish(follow("1", "3", 6))
	r.awaitLag(0)
	for _, dry := range []bool{true, false} {
		res, err := d.Discard(t.Context(), consumers.DeadLetterRequest{ID: all[2].ID, Actor: "bob", DryRun: dry})
		if err != nil {
			t.Fatal(err)
		}
		expect(res, 1, 2, all[3].ID, "")
		if n := len(r.letters(consumers.DeadLetterFilter{IDs: []int64{all[2].ID}})); dry != (n == 1) {
			t.Errorf("dry run %v: %d dead letters", dry, n)
		}
	}
	r.wantLines(applied)
	expect(retry(all[3].ID, false), 2, 0, 0, "")
	r.publish(follow("1", "3", 7))
	r.awaitLag(0)
	r.wantLines(append(applied, line{"1", "3", 5}, line{"1", "3", 6}, line{"1", "3", 7}))
	if diff := cmp.Diff([]string{
		"ann retry testlog 3 2 version 2 is refused why",
		"ann retry testlog 3 2  why", "ann retry testlog 3 4  why", "ann retry testlog 3 5 version 4 is refused why",
		"bob discard testlog 3 5  ",
		"ann retry testlog 3 6  why", "ann retry testlog 3 7  why",
	}, r.notes()); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}

func TestDeadLettersAreFiltered(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 1)
	r.run(r.system, logbook{hook: defect.hook})
	r.publish(follow("1", "3", 1), follow("1", "3", 2), follow("1", "3", 3))
	r.awaitLag(0)
	if _, err := r.owner.Exec(t.Context(), `UPDATE consumer_dead_letters
		SET dead_at = timestamptz '2026-01-01 00:00:00Z' + interval '1 hour' * stream_seq`); err != nil {
		t.Fatal(err)
	}
	if lag, err := consumers.Lag(t.Context(), r.system, r.js, r.cfg, name); err != nil || lag[0].DeadLetters != 3 {
		t.Errorf("the consumer has %+v, %v, want 3 dead letters", lag, err)
	}
	all := r.letters(consumers.DeadLetterFilter{})
	at := func(hour int) time.Time { return time.Date(2026, 1, 1, hour, 0, 0, 0, time.UTC) }
	for name, c := range map[string]struct {
		filter consumers.DeadLetterFilter
		want   []int64
	}{
		"nothing":            {consumers.DeadLetterFilter{}, []int64{1, 2, 3}},
		"a consumer":         {consumers.DeadLetterFilter{Consumer: all[0].Consumer}, []int64{1, 2, 3}},
		"another consumer":   {consumers.DeadLetterFilter{Consumer: "other"}, nil},
		"another tenant":     {consumers.DeadLetterFilter{TenantID: 99}, nil},
		"ids":                {consumers.DeadLetterFilter{IDs: []int64{all[2].ID}}, []int64{3}},
		"another type":       {consumers.DeadLetterFilter{AggregateType: "block"}, nil},
		"another aggregate":  {consumers.DeadLetterFilter{AggregateID: "4"}, nil},
		"another event type": {consumers.DeadLetterFilter{EventType: "deleted"}, nil},
		"an event":           {consumers.DeadLetterFilter{EventID: all[1].Event.ID}, []int64{2}},
		"before a time":      {consumers.DeadLetterFilter{DeadBefore: at(2)}, []int64{1}},
		"from a time on":     {consumers.DeadLetterFilter{DeadAfter: at(2)}, []int64{2, 3}},
		"a span of time":     {consumers.DeadLetterFilter{DeadAfter: at(2), DeadBefore: at(3)}, []int64{2}},
		"the first ones":     {consumers.DeadLetterFilter{First: true}, []int64{1}},
		"the next page":      {consumers.DeadLetterFilter{After: all[0].ID}, []int64{2, 3}},
	} {
		var got []int64
		for _, l := range r.letters(c.filter) {
			got = append(got, int64(l.Event.Seq))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestADeadLetterOfAnOlderReleaseOrMendedByHandIsApplied(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	broken := follow("1", "3", 2)
	broken.Payload = []byte(`{"follower_id": 1`)
	r.publish(follow("1", "3", 1), broken, follow("1", "3", 3))
	r.run(r.system, logbook{})
	r.awaitLag(0)
	d := consumers.NewDeadLetters(r.system, logbook{})
	l, err := d.Get(t.Context(), 0, r.first("3").ID)
	if err != nil || string(l.Event.Payload) != string(broken.Payload) || l.Headers[event.HeaderID][0] != broken.ID {
		t.Errorf("%+v, %v", l, err)
	}
	r.exec(`UPDATE consumer_dead_letters SET payload = $1 WHERE id = $2`, []byte(follow("1", "3", 2).Payload), l.ID)
	if res, err := d.Retry(t.Context(), consumers.DeadLetterRequest{ID: l.ID, Actor: "ann"}); err != nil || res.Gone != 2 {
		t.Errorf("%+v, %v", res, err)
	}
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}, {"1", "3", 3}})
}

// TestARetryBesideTheConsumerLosesDoublesAndReordersNothing lets two operators retry an aggregate
// again and again, while the consumer parks and applies its events and others of the partition.
func TestARetryBesideTheConsumerLosesDoublesAndReordersNothing(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var refuse atomic.Int64 // with n above 0, each nth call fails for any event of the aggregate
	var calls atomic.Int64
	refuse.Store(3)
	projection := logbook{hook: func(_ context.Context, _ pgx.Tx, events []event.Event) error {
		n := refuse.Load()
		for i := range events {
			if n > 0 && events[i].AggregateID == "3" && calls.Add(1)%n == 0 {
				return event.Permanent(errors.New("refused by chance"))
			}
		}
		return nil
	}}
	var want []line
	publish := func(from, to int) {
		for i := from; i <= to; i++ {
			id := event.IDOf(i)
			r.publish(follow(id, "3", 1), follow(id, "35", 1))
			want = append(want, line{id, "3", 1}, line{id, "35", 1})
		}
	}
	publish(1, 100) // the first batches have many events of the aggregate, so one of them is parked
	r.run(r.system, projection)
	d := consumers.NewDeadLetters(r.system, projection)
	ctx, stop := context.WithCancel(t.Context())
	var operators sync.WaitGroup
	var gone atomic.Int64
	for range 2 {
		operators.Go(func() {
			for ctx.Err() == nil {
				all, err := postgres.Collect(d.List(ctx, consumers.DeadLetterFilter{First: true}, 1))
				if err != nil || len(all) == 0 {
					continue
				}
				res, err := d.Retry(ctx, consumers.DeadLetterRequest{ID: all[0].ID, Actor: "ann"})
				var notFirst *consumers.NotFirstError
				if err != nil && ctx.Err() == nil && !errors.Is(err, consumers.ErrNotParked) && !errors.As(err, &notFirst) {
					t.Error(err)
				}
				gone.Add(int64(res.Gone))
			}
		})
	}
	t.Cleanup(func() { stop(); operators.Wait() })
	publish(101, 400)
	r.awaitLag(0)
	refuse.Store(0)
	testkit.Eventually(t, "the rest to be retried",
		func() (bool, error) { return len(r.letters(consumers.DeadLetterFilter{})) == 0, nil })
	r.wantLines(want)
	// An operator counts after the commit, so the database may show it earlier.
	testkit.Eventually(t, "at least 20 retries to be counted, for a meaningful run", func() (bool, error) {
		if n := gone.Load(); n < 20 {
			return false, fmt.Errorf("%d are counted", n)
		}
		return true, nil
	})
}

// TestAnEventThatComesDuringARetryIsAppliedBehindIt holds a retry in its transaction until the
// consumer waits for the offset with the aggregate's next event. The consumer must read whether the
// aggregate is parked after that wait.
func TestAnEventThatComesDuringARetryIsAppliedBehindIt(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 2)
	r.run(r.system, logbook{hook: defect.hook})
	r.publish(follow("1", "3", 1), follow("1", "3", 2), follow("1", "3", 3))
	r.awaitLag(0)
	held := logbook{hook: func(context.Context, pgx.Tx, []event.Event) error {
		r.publish(follow("1", "3", 4))
		r.awaitOffsetLock()
		return nil
	}}
	res, err := consumers.NewDeadLetters(r.system, held).Retry(t.Context(), consumers.DeadLetterRequest{ID: r.first("3").ID, Actor: "ann"})
	if err != nil || res.Gone != 2 || res.Left != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}, {"1", "3", 3}, {"1", "3", 4}})
}

func TestARetryThatIsCutOffHasDoneNothing(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 2)
	r.run(r.system, logbook{hook: defect.hook})
	r.publish(follow("1", "3", 1), follow("1", "3", 2), follow("1", "3", 3))
	r.awaitLag(0)
	var victim cutter
	id := r.first("3").ID
	cut := logbook{hook: func(context.Context, pgx.Tx, []event.Event) error {
		victim.set(true)
		return nil
	}}
	if _, err := consumers.NewDeadLetters(victim.pool(t, r.url), cut).Retry(t.Context(),
		consumers.DeadLetterRequest{ID: id, Actor: "ann"}); err == nil {
		t.Error("the retry succeeded")
	}
	if n, notes := len(r.letters(consumers.DeadLetterFilter{})), r.notes(); n != 2 || len(notes) != 0 {
		t.Errorf("%d dead letters, notes %v", n, notes)
	}
	r.publish(follow("1", "3", 4), follow("1", "35", 1)) // the offset is no longer locked
	r.awaitLag(0)
	if res, err := consumers.NewDeadLetters(r.system, logbook{}).Retry(t.Context(),
		consumers.DeadLetterRequest{ID: id, Actor: "ann"}); err != nil || res.Gone != 3 {
		t.Errorf("%+v, %v", res, err)
	}
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}, {"1", "3", 3}, {"1", "3", 4}, {"1", "35", 1}})
}

// TestDeadLettersOutliveTheirStream repairs a lost stream: a new stream gets the same events.
func TestDeadLettersOutliveTheirStream(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 2)
	r.run(r.system, logbook{hook: defect.hook})
	for v := range int64(3) {
		r.publish(follow("1", "3", v+1))
	}
	r.awaitLag(0)
	if n := len(r.letters(consumers.DeadLetterFilter{})); n != 2 {
		t.Fatalf("%d dead letters", n)
	}
	r.replace()
	for v := range int64(4) {
		r.publish(follow("1", "3", v+1))
	}
	r.awaitLag(0)
	d := consumers.NewDeadLetters(r.system, logbook{})
	if res, err := d.Retry(t.Context(), consumers.DeadLetterRequest{ID: r.first("3").ID, Actor: "ann"}); err != nil ||
		res.Gone != 6 || res.Left != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	// Unlike projections, the logbook does not compare versions.
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}, {"1", "3", 3}, {"1", "3", 1}, {"1", "3", 2}, {"1", "3", 3}, {"1", "3", 4}})
}

// replace puts another partition in the place of partition 0, whose stream is lost, as a repair
// does.
func (r *rig) replace() {
	r.t.Helper()
	r.remake(-1)
	old := r.open[0].Partition
	r.open = r.open[1:]
	s := r.declare(broker.Partition{Number: 7, FirstSlot: old.FirstSlot, LastSlot: old.LastSlot, After: []int{old.Number}})
	for range 2 { // a second call changes nothing
		if err := consumers.Rebase(context.Background(), r.system, r.cfg.StreamName(old.Number), 0, s); err != nil {
			r.t.Fatal(err)
		}
	}
}

// TestARetryOfAnEndedStreamKeepsItsSuccessorsWaiting holds a retry in its transaction until the
// consumer waits with the aggregate's next event. That event is on another stream than the dead
// letter.
func TestARetryOfAnEndedStreamKeepsItsSuccessorsWaiting(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 2)
	r.run(r.system, logbook{hook: defect.hook})
	r.publish(follow("1", "3", 1), follow("1", "3", 2))
	r.close(0)
	r.declare(broker.Partition{Number: 1, FirstSlot: 0, LastSlot: 31, After: []int{0}})
	r.publish(follow("1", "4", 1))
	r.awaitLag(0)
	held := logbook{hook: func(context.Context, pgx.Tx, []event.Event) error {
		r.publish(follow("1", "3", 3))
		r.awaitOffsetLock()
		return nil
	}}
	res, err := consumers.NewDeadLetters(r.system, held).Retry(t.Context(), consumers.DeadLetterRequest{ID: r.first("3").ID, Actor: "ann"})
	if err != nil || res.Gone != 1 || res.Left != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	r.awaitLag(0)
	r.wantLines([]line{{"1", "3", 1}, {"1", "3", 2}, {"1", "3", 3}, {"1", "4", 1}})
}

func TestDeadLettersOfOneCauseAreAGroup(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	var defect bad
	defect.set("3", 2)
	projection := logbook{hook: defect.hook}
	r.run(r.system, projection)
	r.publish(follow("1", "3", 1), follow("1", "3", 2), follow("1", "3", 3), follow("1", "3", 4))
	r.awaitLag(0)
	d := consumers.NewDeadLetters(r.system, projection)
	groups := func(tenant int64) (is []string, all []*deadletter.Group) {
		t.Helper()
		all, more, err := d.Groups(t.Context(), tenant)
		if err == nil {
			err = d.CountGroups(t.Context(), tenant, all, time.Time{})
		}
		if err != nil || more {
			t.Fatal(err, more)
		}
		for _, g := range all {
			is = append(is, fmt.Sprintf("%s %s %s: %d, %d again", g.Consumer, g.EventType, g.Cause, g.Count, g.Again))
		}
		slices.Sort(is)
		slices.SortFunc(all, func(a, b *deadletter.Group) int { return strings.Compare(a.Cause, b.Cause) })
		return is, all
	}
	is, all := groups(0)
	if diff := cmp.Diff([]string{"testlog created an earlier event of its aggregate is parked: 2, 0 again",
		"testlog created version # is refused: 1, 0 again"}, is); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	if is, _ := groups(99); len(is) != 0 {
		t.Errorf("of another tenant: %q", is)
	}
	got := r.letters(consumers.DeadLetterFilter{Group: all[1].ID})
	if len(got) != 1 || got[0].Group != all[1].ID || !got[0].First {
		t.Fatalf("%+v", got)
	}
	defect.set("3", 3)
	refused := errors.New("refused")
	var noted []string
	request := consumers.DeadLetterRequest{ID: got[0].ID, Actor: "ann",
		Within: func(_ context.Context, _ pgx.Tx, gone int, fault error) error {
			noted = append(noted, fmt.Sprint(gone, " ", fault))
			return refused
		}}
	if _, err := d.Retry(t.Context(), request); !errors.Is(err, refused) || len(r.letters(consumers.DeadLetterFilter{})) != 3 {
		t.Errorf("%v", err)
	}
	refused = nil
	if res, err := d.Retry(t.Context(), request); err != nil || res.Gone != 1 ||
		!slices.Equal(noted, []string{"1 version 3 is refused", "1 version 3 is refused"}) {
		t.Errorf("%+v, %v, noted %q", res, err, noted)
	}
	kept := r.letters(consumers.DeadLetterFilter{Consumer: name, TenantID: 1, AggregateType: "follow", AggregateID: "3",
		EventID: r.first("3").Event.ID})
	if len(kept) != 1 || kept[0].Retries != 1 {
		t.Fatalf("%+v", kept)
	}
	if did, err := d.ActionsOn(t.Context(), 1, kept[0].Event.ID); err != nil || len(did) != 1 || did[0].Actor != "ann" ||
		did[0].Error != "version 3 is refused" || did[0].Consumer != name {
		t.Errorf("%+v, %v", did, err)
	}
	if at, err := consumers.Positions(t.Context(), r.system, "EVENTS-0"); err != nil || len(at) != 1 || at[0].Consumer != name ||
		at[0].Seq != 4 || at[0].Closed || time.Since(at[0].At) > time.Minute {
		t.Errorf("%+v, %v", at, err)
	}
	is, _ = groups(0)
	if diff := cmp.Diff([]string{"testlog created an earlier event of its aggregate is parked: 1, 0 again",
		"testlog created version # is refused: 1, 1 again"}, is); diff != "" {
		t.Errorf("after a retry (-want +got):\n%s", diff)
	}
}
