package letters

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// logbook is a projection that records its events. Events of the aggregate that it refuses fail.
type logbook struct{ refuse map[event.ID]bool }

func (logbook) Name() string      { return "logbook" }
func (logbook) Wants(string) bool { return true }
func (l logbook) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	for _, e := range events {
		if l.refuse[e.AggregateID] {
			return event.Permanent(fmt.Errorf("aggregate %s is refused", e.AggregateID))
		}
		if _, err := tx.Exec(ctx, `INSERT INTO logbook (aggregate, seq) VALUES ($1, $2)`, e.AggregateID, int64(e.Seq)); err != nil {
			return err
		}
	}
	return nil
}

type rig struct {
	t     *testing.T
	pool  *pgxpool.Pool
	owner *pgxpool.Pool
	desk  *Desk
}

func newRig(t *testing.T, refuse ...event.ID) *rig {
	t.Helper()
	db := testkit.Postgres(t)
	r := &rig{t: t, pool: db.Pool(t, postgres.RoleSystem), owner: db.Pool(t, postgres.RoleOwner)}
	r.desk = r.newDesk(refuse...)
	r.exec(`CREATE TABLE logbook (n bigserial, aggregate bigint, seq bigint)`)
	r.exec(`GRANT ALL ON logbook, logbook_n_seq TO tidings_system`)
	return r
}

// newDesk returns the Desk of another process.
func (r *rig) newDesk(refuse ...event.ID) *Desk {
	book := logbook{make(map[event.ID]bool)}
	for _, id := range refuse {
		book.refuse[id] = true
	}
	return New(r.pool, r.pool, outbox.NewDLQ(r.pool, nil), consumers.NewDeadLetters(r.pool, book), testkit.Logger(r.t))
}

func (r *rig) exec(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.owner.Exec(r.t.Context(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) count(sql string, args ...any) (n int) {
	r.t.Helper()
	if err := r.owner.QueryRow(r.t.Context(), sql, args...).Scan(&n); err != nil {
		r.t.Fatal(err)
	}
	return n
}

// bury puts n messages of a cause into the DLQ, with ids from first on. Every second message is
// tenant 2's.
func (r *rig) bury(first, n int, cause string) {
	r.t.Helper()
	r.exec(`INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts,
		       event_id, inserted_at, slot, last_error, cause, dead_at)
		SELECT g, 1 + g % 2, 'post', g, 'created', 1, '{}', now(), now(), 11, gen_random_uuid(), now(), 0, $3, $3,
		now() - interval '1 minute'
		  FROM generate_series($1::bigint, $1 + $2 - 1) g`, first, n, cause)
}

// park parks n letters of each of the aggregates 1 to m, in turn. The first letter of an aggregate
// has the cause, and the others are behind it.
func (r *rig) park(n, m int, cause string) {
	r.t.Helper()
	r.exec(`INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ('logbook', 'p', 1000000)
		ON CONFLICT DO NOTHING`)
	r.exec(`INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id, event_id,
		event_type,
		       event_version, headers, payload, error, cause, dead_at)
		SELECT 'logbook', g, 'p', 1, 'thing', a, id, 'created', 1,
		       jsonb_build_object('ce-id', ARRAY[id], 'ce-type', ARRAY['tidings.thing.created.v1'], 'ce-subject', ARRAY[a::text],
		                          'ce-time', ARRAY['2030-01-01T00:00:00.000000Z'], 'Tidings-Outbox-Id', ARRAY[g::text]),
		       '{}', e, e, now() - interval '1 minute'
		  FROM (SELECT g, 1 + (g - 1) % $2::int AS a, gen_random_uuid() AS id, CASE WHEN g <= $2::int THEN $3::text ELSE $4::text END AS e
		  FROM generate_series(1, $1::int * $2::int) g) f ORDER BY g`,
		n, m, cause, consumers.BehindAnother)
}

func (r *rig) start(o Operation) Operation {
	r.t.Helper()
	o.ID, o.Actor, o.Reason = uuid.NewString(), "ann", "mended"
	started, err := r.desk.Start(r.t.Context(), o)
	if err != nil {
		r.t.Fatal(err)
	}
	return started
}

func (r *rig) work(d *Desk, o Operation) (Operation, []string) {
	r.t.Helper()
	var steps []string
	o, err := d.Work(r.t.Context(), o.Source, o.ID, func(o Operation) { steps = append(steps, fmt.Sprintf("%d/%d", o.Seen, o.Total)) })
	if err != nil {
		r.t.Fatal(err)
	}
	return o, steps
}

func (r *rig) group(f GroupFilter) Group {
	r.t.Helper()
	all, _, _, err := r.desk.Groups(r.t.Context(), f, 10)
	if err != nil || len(all) != 1 {
		r.t.Fatalf("groups: %+v, %v", all, err)
	}
	return all[0]
}

func TestStatements(t *testing.T) {
	r := newRig(t)
	for _, s := range r.desk.sources {
		for _, sql := range []string{startSQL, getSQL, listSQL, unfinishedSQL, claimSQL, moveSQL, releaseSQL, stopSQL} {
			testkit.Prepare(t, r.pool, s.sql(sql))
		}
	}
	for _, sql := range []string{notesSQL, noteSQL, unnoteSQL} {
		testkit.Prepare(t, r.pool, sql)
	}
}

func TestAnOperationTakesItsGroupAndNoOtherLetter(t *testing.T) {
	r := newRig(t)
	r.bury(1, 500, "too large")
	r.bury(1001, 10, "no stream")
	g := r.group(GroupFilter{Text: "LARGE"})
	o := r.start(Operation{Source: deadletter.Outbox, Action: deadletter.Retry, TenantID: 1, Filter: deadletter.Filter{Group: g.ID}})
	if o.Total != 250 || o.Filter.Group != g.ID || o.FinishedAt != nil {
		t.Fatalf("operation: %+v", o)
	}
	if again, err := r.desk.Start(t.Context(), Operation{ID: o.ID, Source: deadletter.Outbox, Action: deadletter.Retry,
		Actor: "bob"}); err != nil ||
		again.Actor != "ann" || again.Total != 250 {
		t.Errorf("a second start with the same id: %+v, %v", again, err)
	}
	r.bury(2001, 2, "too large")
	r.exec(`UPDATE outbox_messages_dlq SET dead_at = now() WHERE id > 2000`) // died after the request
	o, steps := r.work(r.desk, o)
	if diff := cmp.Diff([]string{"0/250", "200/250", "250/250", "250/250"}, steps); diff != "" || o.Done != 250 ||
		o.FinishedAt == nil || o.Failed != 0 {
		t.Errorf("operation %+v (-want +got):\n%s", o, diff)
	}
	if left, fresh := r.count(`SELECT count(*) FROM outbox_messages_dlq`),
		r.count(`SELECT count(*) FROM outbox_messages WHERE tenant_id = 1`); left != 262 || fresh != 250 {
		t.Errorf("%d messages left in the DLQ, %d in the outbox", left, fresh)
	}
	if n := r.count(`SELECT count(*) FROM outbox_dlq_actions WHERE actor = 'ann' AND reason = 'mended' AND action = 'retry'`); n != 250 {
		t.Errorf("%d actions recorded", n)
	}
	if o, _ := r.work(r.desk, o); o.Done != 250 {
		t.Errorf("a second Work: %+v", o)
	}
	for tenant, want := range map[int64]error{0: nil, 1: nil, 2: ErrNotFound} {
		if _, err := r.desk.Get(t.Context(), tenant, deadletter.Outbox, o.ID); !errors.Is(err, want) {
			t.Errorf("tenant %d: %v", tenant, err)
		}
		if all, err := r.desk.List(t.Context(), tenant, g.ID, 10); err != nil || (len(all) == 1) != (want == nil) {
			t.Errorf("tenant %d: %+v, %v", tenant, all, err)
		}
	}
	o, _ = r.work(r.desk, r.start(Operation{Source: deadletter.Outbox, Action: deadletter.Discard,
		Filter: deadletter.Filter{IDs: []int64{1001, 1002}}}))
	if o.Done != 2 || r.count(`SELECT count(*) FROM outbox_messages_dlq WHERE id BETWEEN 1001 AND 1010`) != 8 {
		t.Errorf("operation: %+v", o)
	}
}

func TestLettersOfConsumersGoAggregateByAggregate(t *testing.T) {
	const aggregates, each = 60, 3
	r := newRig(t, "7") // aggregate 7 fails again
	r.park(each, aggregates, "refused")
	g := r.group(GroupFilter{Source: deadletter.Consumers, Text: "refused"})
	o, _ := r.work(r.desk, r.start(Operation{Source: deadletter.Consumers, Action: deadletter.Retry, TenantID: 1,
		Filter: deadletter.Filter{Group: g.ID}}))
	if o.Total != aggregates || o.Seen != aggregates || o.Done != (aggregates-1)*each || o.Failed != 1 ||
		o.LastError != "aggregate 7 is refused" {
		t.Errorf("operation: %+v", o)
	}
	if n := r.count(`SELECT count(*) FROM logbook l WHERE seq = (SELECT count(*) - 1 FROM logbook e WHERE e.aggregate = l.aggregate
		AND e.n <= l.n) * $1 + aggregate`, aggregates); n != (aggregates-1)*each {
		t.Errorf("%d events applied in order", n)
	}
	again := r.group(GroupFilter{Source: deadletter.Consumers, Text: "aggregate #"}) // now it fails for another reason
	if again.Count != 1 || again.Again != 1 {
		t.Errorf("group after the second failure: %+v", again)
	}
	// A discard also takes the letters that become the first ones, if the filter selects them.
	o, _ = r.work(r.desk, r.start(Operation{Source: deadletter.Consumers, Action: deadletter.Discard,
		Filter: deadletter.Filter{AggregateType: "thing", AggregateID: "7"}}))
	if o.Total != each || o.Seen != each || o.Done != each || r.count(`SELECT count(*) FROM consumer_dead_letters`) != 0 {
		t.Errorf("operation: %+v", o)
	}
}

// TestAnOperationGoesOnWhereItBrokeOff fails the work at each step, as a lost connection does.
// Another desk takes over after the lease, and then the first one thaws.
func TestAnOperationGoesOnWhereItBrokeOff(t *testing.T) {
	r := newRig(t)
	r.bury(1, 450, "too large")
	r.park(2, 60, "refused")
	broken := fmt.Errorf("broken off: %w", io.ErrUnexpectedEOF) // as a lost connection does
	for source, want := range map[string]int64{deadletter.Outbox: 450, deadletter.Consumers: 120} {
		o := r.start(Operation{Source: source, Action: deadletter.Retry})
		for i, step := range []string{"slice", "moved", "slice", "moved"} {
			d := r.newDesk()
			n := 0
			d.at = func(at string) error {
				if at != step {
					return nil
				}
				if n++; n == 2 || i < 2 {
					return broken
				}
				return nil
			}
			if _, err := d.Work(t.Context(), source, o.ID, func(Operation) {}); !errors.Is(err, broken) {
				t.Fatalf("%s, %s: %v", source, step, err)
			}
			r.exec(fmt.Sprintf(`UPDATE %s SET lease_until = 'infinity' WHERE operation_id = $1`, r.desk.sources[source].table), o.ID)
			if _, err := r.newDesk().workOn(t.Context(), r.desk.sources[source], o.ID, nil); !errors.Is(err, errLost) {
				t.Errorf("%s: another process took a leased operation: %v", source, err)
			}
			r.exec(fmt.Sprintf(`UPDATE %s SET lease_until = '-infinity' WHERE operation_id = $1`, r.desk.sources[source].table), o.ID)
		}
		// The process freezes before a slice. Another one finishes the operation, and then the
		// first one thaws.
		frozen, completed := r.newDesk(), 0
		d := r.newDesk()
		d.OnCompleted(func(Operation) { completed++ })
		frozen.at = func(step string) error {
			if step == "slice" && completed == 0 {
				r.exec(fmt.Sprintf(`UPDATE %s SET lease_until = '-infinity' WHERE operation_id = $1`, r.desk.sources[source].table), o.ID)
				if err := d.runOnce(t.Context()); err != nil {
					t.Error(err)
				}
			}
			return nil
		}
		o, _ = r.work(frozen, o)
		if o.Seen != o.Total || o.Done != want || o.Failed != 0 || o.FinishedAt == nil || completed != 1 {
			t.Errorf("%s: %+v, completed %d times", source, o, completed)
		}
	}
	for what, got := range map[string]int{"in the DLQ": r.count(`SELECT count(*) FROM outbox_messages_dlq`),
		"parked":        r.count(`SELECT count(*) FROM consumer_dead_letters`),
		"retried twice": 450 - r.count(`SELECT count(DISTINCT dlq_id) FROM outbox_dlq_actions`),
		"applied twice": 120 - r.count(`SELECT count(DISTINCT seq) FROM logbook`),
		"notes": 570 - r.count(`SELECT (SELECT count(*) FROM outbox_dlq_actions) + (SELECT count(*)
			FROM consumer_dead_letter_actions)`)} {
		if got != 0 {
			t.Errorf("%s: %d", what, got)
		}
	}
}

func TestAProcessThatThawsChangesNothingWhileAnotherWorks(t *testing.T) {
	r := newRig(t)
	r.bury(1, 500, "too large")
	o := r.start(Operation{Source: deadletter.Outbox, Action: deadletter.Retry})
	frozen, other := r.newDesk(), r.newDesk()
	slices := 0
	other.at = func(step string) error {
		if step == "slice" {
			slices++
		}
		if slices == 2 {
			return io.ErrUnexpectedEOF
		}
		return nil
	}
	frozen.at = func(step string) error {
		if step == "slice" {
			r.exec(`UPDATE outbox_dlq_operations SET lease_until = '-infinity'`)
			if _, err := other.workOn(t.Context(), other.sources[deadletter.Outbox], o.ID,
				func(Operation) {}); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Error(err)
			}
		}
		return nil
	}
	if now, err := frozen.workOn(t.Context(), frozen.sources[deadletter.Outbox], o.ID, func(Operation) {}); !errors.Is(err, errLost) {
		t.Errorf("%+v, %v: want errLost", now, err)
	}
	if n := r.count(`SELECT count(*) FROM outbox_messages_dlq`); n != 300 {
		t.Errorf("%d letters left, want 300: the other process took 200", n)
	}
}

func TestSeveralProcessesDoOneOperationOnce(t *testing.T) {
	r := newRig(t)
	r.bury(1, 2000, "too large")
	o := r.start(Operation{Source: deadletter.Outbox, Action: deadletter.Retry})
	var wg sync.WaitGroup
	for range 3 {
		d := r.newDesk()
		wg.Go(func() {
			if o, err := d.Work(t.Context(), deadletter.Outbox, o.ID, func(Operation) {}); err != nil || o.Done != 2000 {
				t.Errorf("operation: %+v, %v", o, err)
			}
		})
	}
	wg.Wait()
	if n := r.count(`SELECT count(*) FROM outbox_messages`); n != 2000 {
		t.Errorf("%d messages left", n)
	}
}

func TestAnOperationIsStopped(t *testing.T) {
	r := newRig(t)
	r.bury(1, 500, "too large")
	o := r.start(Operation{Source: deadletter.Outbox, Action: deadletter.Discard, TenantID: 1})
	if err := r.desk.Stop(t.Context(), 2, deadletter.Outbox, o.ID, "bob"); !errors.Is(err, ErrNotFound) {
		t.Errorf("stopped by another tenant: %v", err)
	}
	o, err := r.desk.Work(t.Context(), deadletter.Outbox, o.ID, func(o Operation) {
		if o.Done == 200 {
			if err := r.desk.Stop(t.Context(), 1, deadletter.Outbox, o.ID, "bob"); err != nil {
				t.Error(err)
			}
		}
	})
	if err != nil || o.Done != 200 || o.StoppedBy != "bob" || o.FinishedAt == nil ||
		r.count(`SELECT count(*) FROM outbox_messages_dlq`) != 300 {
		t.Errorf("operation: %+v, %v", o, err)
	}
	if err := r.desk.Stop(t.Context(), 0, deadletter.Outbox, o.ID, "bob"); !errors.Is(err, ErrFinished) {
		t.Errorf("a second stop: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	o = r.start(Operation{Source: deadletter.Outbox, Action: deadletter.Discard, TenantID: 2})
	if o, err = r.desk.Work(ctx, deadletter.Outbox, o.ID, func(o Operation) {
		if o.Done > 0 {
			cancel()
		}
	}); !errors.Is(err, context.Canceled) || o.FinishedAt != nil {
		t.Errorf("after the stop of the process: %+v, %v", o, err)
	}
	if err := r.newDesk().runOnce(t.Context()); err != nil { // at once, before the lease expires
		t.Error(err)
	}
	if o, err := r.desk.Get(t.Context(), 0, deadletter.Outbox, o.ID); err != nil || o.Done != 250 || o.FinishedAt == nil {
		t.Errorf("operation: %+v, %v", o, err)
	}
}

func TestOneMessageThatCannotGoKeepsNoOther(t *testing.T) {
	r := newRig(t)
	r.bury(1, 5, "too large")
	r.exec(`ALTER TABLE outbox_messages ADD CONSTRAINT not_three CHECK (aggregate_id <> '3')`)
	o, _ := r.work(r.desk, r.start(Operation{Source: deadletter.Outbox, Action: deadletter.Retry}))
	if o.Done != 4 || o.Failed != 1 || o.Seen != 5 || o.LastError == "" ||
		r.count(`SELECT count(*) FROM outbox_messages_dlq WHERE id = 3`) != 1 {
		t.Errorf("operation: %+v", o)
	}
}

func TestGroupsArePagedAndNoted(t *testing.T) {
	r := newRig(t)
	for i := range 7 {
		r.bury(i*10+1, i+1, fmt.Sprint("cause ", string(rune('a'+i))))
	}
	r.park(1, 2, "cause x")
	var paged []string
	f := GroupFilter{}
	for more := true; more; {
		var all []Group
		var err error
		if all, more, _, err = r.desk.Groups(t.Context(), f, 3); err != nil {
			t.Fatal(err)
		}
		for _, g := range all {
			paged = append(paged, fmt.Sprintf("%s %s %d", g.Source, g.Cause, g.Count))
		}
		key := all[len(all)-1].Key()
		f.After = &key
	}
	slices.Sort(paged)
	if diff := cmp.Diff([]string{"consumers cause x 2", "outbox cause a 1", "outbox cause b 2", "outbox cause c 3", "outbox cause d 4",
		"outbox cause e 5", "outbox cause f 6", "outbox cause g 7"}, paged); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
	g := r.group(GroupFilter{Text: "cause d"})
	for tenant, text := range map[int64]string{0: "the broker's limit", 1: "ours"} {
		if err := r.desk.SetNote(t.Context(), tenant, g.ID, " "+text+"\x00 ", "ann"); err != nil {
			t.Fatal(err)
		}
		if got := r.group(GroupFilter{TenantID: tenant, Text: "cause d"}); got.Note == nil || got.Note.Text != text ||
			got.Note.Actor != "ann" || time.Since(got.Note.At) > time.Minute {
			t.Errorf("tenant %d: %+v", tenant, got.Note)
		}
	}
	if got := r.group(GroupFilter{TenantID: 2, Text: "cause d"}); got.Note != nil || got.Count != 2 {
		t.Errorf("another tenant sees %+v, %+v", got, got.Note)
	}
	if err := r.desk.SetNote(t.Context(), 0, g.ID, " ", "ann"); err != nil || r.group(GroupFilter{Text: "cause d"}).Note != nil {
		t.Errorf("SetNote: %v", err)
	}
	if err := r.desk.SetNote(t.Context(), 0, g.ID, fmt.Sprintf("%2001d", 1), "ann"); err != nil { // SetNote trims spaces
		t.Error(err)
	}
	if n, again, err := r.desk.Since(t.Context(), 0, g, time.Now().Add(-30*time.Second)); err != nil || n != 0 || again != 0 {
		t.Errorf("since: %d letters, %d again, %v", n, again, err)
	}
}
