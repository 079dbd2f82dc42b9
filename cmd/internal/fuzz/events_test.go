package fuzz_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/projections/followercounts"
)

// eventsSQL reads a tenant's events that the lane has not read.
const eventsSQL = `
SELECT id, event_id::text, aggregate_type, aggregate_id, event_type, event_version, payload FROM outbox_messages WHERE tenant_id = $1
AND id > $2 ORDER BY id`

// offsetSQL stores the offset of followercounts in a tenant's events. Each tenant has a stream of
// its own here. The API's page cache depends on the offset.
const offsetSQL = `
INSERT INTO consumer_offsets AS o (consumer_name, partition_key, last_processed_id, as_of) VALUES ($1, $2, $3, now())
    ON CONFLICT (consumer_name, partition_key) DO UPDATE SET last_processed_id = excluded.last_processed_id, as_of = excluded.as_of`

func stream(tenant int64) string { return fmt.Sprint("EVENTS-", tenant) }

// unseen reads the events since the last call.
func (l *lane) unseen() ([]event.Event, error) {
	rows, _ := l.system.Query(l.ctx, eventsSQL, l.tenant, l.seen)
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (event.Event, error) {
		e := event.Event{TenantID: l.tenant, Stream: stream(l.tenant)}
		err := row.Scan(&e.OutboxID, &e.ID, &e.AggregateType, &e.AggregateID, &e.Type, &e.Version, &e.Payload)
		e.Seq = uint64(e.OutboxID)
		return e, err
	})
}

// catchUp compares the new events with the model and applies them. They must be the next versions
// in the model.
func (l *lane) catchUp() error {
	events, err := l.unseen()
	if err == nil {
		err = l.apply(events)
	}
	if err == nil {
		err = l.project(events)
	}
	return err
}

// apply gives events to the projections and to the page caches of the API processes.
func (l *lane) apply(events []event.Event) error {
	if len(events) == 0 {
		return nil
	}
	for i := range events {
		for _, p := range l.pages {
			p.Hear(&events[i], nil)
		}
	}
	return postgres.InTx(l.ctx, l.system, pgx.TxOptions{}, func(tx pgx.Tx) error {
		for _, p := range l.fleet {
			var wanted []event.Event
			for _, e := range events {
				if p.Wants(e.AggregateType) {
					wanted = append(wanted, e)
				}
			}
			if err := p.Apply(l.ctx, tx, wanted); err != nil {
				return err
			}
		}
		_, err := tx.Exec(l.ctx, offsetSQL, followercounts.Name, stream(l.tenant), events[len(events)-1].OutboxID)
		return err
	})
}

// project compares events with the model and records that the projections have them. No version may
// remain without an event.
func (l *lane) project(events []event.Event) error {
	for i := range events {
		if err := l.projectOne(&events[i]); err != nil {
			return fmt.Errorf("event %d, %s.%s: %w: %s", events[i].OutboxID, events[i].AggregateType,
				events[i].Type, err, events[i].Payload)
		}
		l.seen = events[i].OutboxID
	}
	var errs []error
	for key, r := range l.m.edges {
		if r.projected != len(r.states) {
			errs = append(errs, fmt.Errorf("edge %v has %d versions and %d events", key, len(r.states), r.projected))
		}
	}
	for _, r := range l.m.children {
		if r.projected != len(r.states) {
			errs = append(errs, fmt.Errorf("%s %s has %d versions and %d events", r.k.Name, r.now().ID, len(r.states), r.projected))
		}
	}
	for key, r := range l.m.threads {
		if r.projected != len(r.states) {
			errs = append(errs, fmt.Errorf("settings %v have %d versions and %d events", key, len(r.states), r.projected))
		}
	}
	return errors.Join(errs...)
}

// rowsSQL counts a tenant's rows in the tables of the truth and adds up their versions.
const rowsSQL = `
SELECT (SELECT count(*) FROM edges WHERE tenant_id = $1), (SELECT coalesce(sum(version), 0)::bigint FROM edges WHERE tenant_id = $1),
       (SELECT count(*) FROM children WHERE tenant_id = $1) + (SELECT count(*) FROM children_archive WHERE tenant_id = $1),
       (SELECT coalesce(sum(version), 0)::bigint FROM (SELECT version FROM children WHERE tenant_id = $1 UNION ALL SELECT version
       FROM children_archive WHERE tenant_id = $1) c),
       (SELECT count(*) FROM child_keys WHERE tenant_id = $1), (SELECT count(*) FROM threads WHERE tenant_id = $1)`

// equalRows compares the rows of the truth with the model, so that refused requests have left none.
func (l *lane) equalRows() error {
	var got, want [6]int64
	if err := l.system.QueryRow(l.ctx, rowsSQL, l.tenant).Scan(&got[0], &got[1], &got[2], &got[3], &got[4], &got[5]); err != nil {
		return err
	}
	for _, r := range l.m.edges {
		want[0], want[1] = want[0]+1, want[1]+r.now().Version
	}
	for _, r := range l.m.children {
		want[2], want[3] = want[2]+1, want[3]+r.now().Version
	}
	want[4] = int64(len(l.m.keys))
	for _, r := range l.m.threads {
		want[5] += int64(len(r.states))
	}
	return differ(answer{request: "edges, their versions, children, theirs, keys, and settings of the truth"}, want, got)
}

var errNoVersion = errors.New("no answer reported this write")

func (l *lane) projectOne(e *event.Event) error {
	if e.AggregateType == event.AggregateThread {
		return l.projectThread(e)
	}
	if k, ok := l.kinds.Edge(e.AggregateType); ok {
		got, err := e.DecodeEdge(k.Names())
		r := l.m.edge(k, got.From, got.To)
		if err != nil || r.projected == len(r.states) {
			return errors.Join(err, errNoVersion)
		}
		want, last := &r.states[r.projected], event.Edge{}
		if r.projected > 0 {
			last = r.states[r.projected-1]
		}
		if want.UpdatedAt.IsZero() {
			want.UpdatedAt = later(got.UpdatedAt, last.UpdatedAt)
		}
		kind := event.Updated
		switch {
		case !want.Active():
			kind = event.Removed
		case !last.Active():
			kind = event.Created
		}
		payload, err := want.Encode(k.Names())
		r.projected++
		return errors.Join(err, sameEvent(e, kind, payload))
	}
	k, ok := l.kinds.Child(e.AggregateType)
	if !ok {
		return errors.New("there is no such kind")
	}
	got, err := e.DecodeChild(k.Names())
	r := l.m.byID[got.ID]
	if err != nil || r == nil || r.projected == len(r.states) {
		return errors.Join(err, errNoVersion)
	}
	want, last := &r.states[r.projected], event.Child{}
	if r.projected > 0 {
		last = r.states[r.projected-1]
	}
	if want.UpdatedAt.IsZero() {
		want.UpdatedAt = later(got.UpdatedAt, last.UpdatedAt)
	}
	kind := event.Edited
	switch {
	case want.Version == 1:
		kind = event.Created
	case want.AuthorState != last.AuthorState:
		kind = event.Deleted
	case want.ModerationState != last.ModerationState:
		kind = event.Moderated
	}
	told := *want
	if bare(told) {
		told.Body, told.Attributes = "", nil
	}
	payload, err := told.Encode(k.Names())
	r.projected++
	return errors.Join(err, sameEvent(e, kind, payload))
}

func (l *lane) projectThread(e *event.Event) error {
	var got event.Thread
	if err := json.Unmarshal(e.Payload, &got); err != nil {
		return err
	}
	r := l.m.thread(l.kinds.Children[got.Of()], got.PostID)
	if r.projected == len(r.states) {
		return errNoVersion
	}
	want := r.states[r.projected]
	if want.Kind = got.Kind; r.k.Name == event.AggregateComment {
		want.Kind = ""
	}
	payload, err := json.Marshal(want)
	r.projected++
	return errors.Join(err, sameEvent(e, event.Updated, payload))
}

func sameEvent(e *event.Event, kind string, payload []byte) error {
	a := answer{request: "the event " + e.ID}
	return errors.Join(differ(a, kind, e.Type), differ(a, generic(json.RawMessage(payload)), generic(e.Payload)))
}

// record keeps the answers of a read, to compare them again if they did not match at first.
type record struct {
	answers []answer
	again   bool
}

func (r *record) play(ask func() (answer, error)) (answer, error) {
	if r == nil {
		return ask()
	}
	if r.again {
		if len(r.answers) == 0 {
			return answer{}, errors.New("the read asked for more the second time")
		}
		a := r.answers[0]
		r.answers = r.answers[1:]
		return a, nil
	}
	a, err := ask()
	if err == nil {
		r.answers = append(r.answers, a)
	}
	return a, err
}

// beside returns a lane for a read that runs beside others.
func (l *lane) beside(seed uint64) *lane {
	c := *l
	c.rng, c.cursors, c.record = rand.New(rand.NewPCG(seed, 0)), nil, &record{}
	return &c
}

// fresh chooses tokens and returns the view of a read with them. If a projection lacks writes that
// they name, the read shows the newest state of those entities.
func (l *lane) fresh() (header string, v view) {
	v = view{m: l.m, ahead: map[any]bool{}}
	var chosen []given
	var tokens []string
	for range 1 + l.rng.IntN(3) {
		g := l.tokens[max(0, len(l.tokens)-1-l.rng.IntN(12))]
		chosen, tokens = append(chosen, g), append(tokens, g.token)
	}
	behind := map[bool]bool{} // whether the projection of edges is behind, and that of children
	edge := func(g given) bool { _, ok := g.row.(*edgeRow); return ok }
	for _, g := range chosen {
		behind[edge(g)] = behind[edge(g)] || projectedOf(g.row) < g.version
	}
	for _, g := range chosen {
		if behind[edge(g)] {
			v.ahead[g.row] = true
		}
	}
	return strings.Join(tokens, ", "), v
}

// names describes the rows that the view has ahead of the projections.
func (v view) names() string {
	var b strings.Builder
	for row := range v.ahead {
		switch r := row.(type) {
		case *edgeRow:
			fmt.Fprintf(&b, "%s %s/%s at %d of %d, ", r.k.Name, r.from, r.to, r.projected, len(r.states))
		case *childRow:
			fmt.Fprintf(&b, "%s %s under %s at %d of %d: %s, ", r.k.Name, r.now().ID, r.now().Parent, r.projected,
				len(r.states), stateWord(r.now()))
		case *threadRow:
			fmt.Fprintf(&b, "settings of %s of %s at %d of %d, ", r.k.Plural, r.object, r.projected, len(r.states))
		}
	}
	return b.String()
}

// date reads the deleted children that the view has ahead of the projections, if the model lacks
// the time of a deletion: neither an answer nor an event has told it.
func (l *lane) date(v view) error {
	for row := range v.ahead {
		if r, ok := row.(*childRow); ok && r.now().UpdatedAt.IsZero() {
			if err := l.readState(r); err != nil {
				return err
			}
		}
	}
	return nil
}

func projectedOf(row any) int64 {
	switch r := row.(type) {
	case *edgeRow:
		return int64(r.projected)
	case *childRow:
		return int64(r.projected)
	}
	return int64(row.(*threadRow).projected)
}

// readOwn reads with tokens, several reads at once because they wait. Half of the time the
// projections catch up meanwhile: then a read may see either state.
func (l *lane) readOwn() error {
	if len(l.tokens) == 0 {
		return nil
	}
	const reads = 8
	events, err := l.unseen()
	if err != nil {
		return err
	}
	meanwhile := l.chance(2)
	var wg sync.WaitGroup
	sides, views, seeds, fresh, errs := make([]*lane, reads), make([]view, reads), make([]uint64, reads),
		make([]string, reads), make([]error, reads)
	for i := range reads {
		seeds[i] = l.rng.Uint64()
		fresh[i], views[i] = l.fresh()
		if err := l.date(views[i]); err != nil {
			return err
		}
	}
	for i := range reads {
		sides[i] = l.beside(seeds[i])
		wg.Go(func() { errs[i] = sides[i].readSome(views[i], fresh[i]) })
	}
	var applied error
	if meanwhile {
		select {
		case <-l.ctx.Done():
		case <-time.After(time.Duration(l.rng.IntN(150)) * time.Millisecond):
		}
		applied = l.apply(events)
	}
	wg.Wait()
	if applied == nil && meanwhile {
		applied = l.project(events)
	}
	for i, side := range sides {
		if errs[i] != nil && meanwhile {
			second := l.beside(seeds[i])
			second.record = &record{answers: side.record.answers, again: true}
			if second.readSome(l.view(), fresh[i]) == nil {
				errs[i] = nil
			}
		}
		if errs[i] != nil {
			errs[i] = fmt.Errorf("%w\nthe tokens name %s; the projections caught up meanwhile: %t", errs[i], views[i].names(), meanwhile)
		}
		l.cursors = append(l.cursors, side.cursors...)
	}
	return errors.Join(applied, errors.Join(errs...))
}

// readSome makes one read, or reads a page and its next pages with the same tokens.
func (l *lane) readSome(v view, fresh string) error {
	switch l.rng.IntN(6) {
	case 0:
		return l.numbers(v, fresh)
	case 1:
		return l.around(v, fresh)
	case 2:
		return l.document(v, fresh)
	case 3:
		p := l.edgeList()
		p.fresh = fresh
		return l.ask(p, v, nil)
	}
	p, err := page{}, error(nil)
	switch l.rng.IntN(3) {
	case 0:
		p = l.chronological()
	case 1:
		p = l.inThread()
	default:
		p = l.pending()
	}
	p.fresh = fresh
	return errors.Join(err, l.ask(p, v, nil))
}
