package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/kinds/catalog"
)

// checkConsumer returns a usageError if no consumer has the name. what is the flag.
func checkConsumer(what, name string, optional bool) error {
	if known := fleet.Names(); !slices.Contains(known, name) && (name != "" || !optional) {
		if name == "" {
			return &usageError{fmt.Errorf("%s is missing: want one of %s", what, strings.Join(known, ", "))}
		}
		return &usageError{fmt.Errorf("%s: there is no consumer %q: want one of %s", what, name, strings.Join(known, ", "))}
	}
	return nil
}

// deadLetter is a line of `tidings dlq consumer list --json`, and with headers and payload the
// output of show.
type deadLetter struct {
	ID            int64               `json:"id,string"`
	Consumer      string              `json:"consumer"`
	First         bool                `json:"first"`
	TenantID      int64               `json:"tenant_id,string"`
	AggregateType string              `json:"aggregate_type"`
	AggregateID   event.ID            `json:"aggregate_id"`
	EventID       string              `json:"event_id"`
	EventType     string              `json:"event_type"`
	EventVersion  int                 `json:"event_version"`
	Partition     string              `json:"partition"`
	StreamSeq     int64               `json:"stream_seq"`
	Error         string              `json:"error"`
	DeadAt        event.Time          `json:"dead_at"`
	Headers       map[string][]string `json:"headers,omitempty"`
	Payload       any                 `json:"payload,omitempty"` // a string if the bytes are not JSON
}

func deadLetterOf(l deadletter.Letter) any {
	e := l.Event
	d := deadLetter{
		ID: l.ID, Consumer: l.Consumer, First: l.First, TenantID: e.TenantID, AggregateType: e.AggregateType, AggregateID: e.AggregateID,
		EventID: e.ID, EventType: e.Type, EventVersion: e.Version, Partition: e.Stream, StreamSeq: int64(e.Seq), Error: l.Error,
		DeadAt: event.Time{Time: l.DeadAt}, Headers: l.Headers,
	}
	switch {
	case json.Valid(e.Payload):
		d.Payload = e.Payload
	case e.Payload != nil:
		d.Payload = string(e.Payload)
	}
	return d
}

// parkedAction is a line of the output of `tidings dlq consumer retry` and discard with --json.
type parkedAction struct {
	Action        string   `json:"action"`
	DryRun        bool     `json:"dry_run"`
	Actor         string   `json:"actor"`
	Reason        string   `json:"reason,omitempty"`
	ID            int64    `json:"id,string"`
	Consumer      string   `json:"consumer"`
	TenantID      int64    `json:"tenant_id,string"`
	AggregateType string   `json:"aggregate_type"`
	AggregateID   event.ID `json:"aggregate_id"`
	EventID       string   `json:"event_id"`
	EventType     string   `json:"event_type"`
	Gone          int      `json:"gone"`            // applied or discarded dead letters
	Left          int64    `json:"left"`            // remaining dead letters of the aggregate
	Next          int64    `json:"next_id,string"`  // the first remaining one, or 0
	Error         string   `json:"error,omitempty"` // why the consumer could not apply that one
}

// consumerLetters opens the letters of consumers.
func consumerLetters(ctx context.Context, s *session) (*letterDesk, error) {
	now, err := loadKinds(ctx, s.Projections, catalog.Projections, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	d := consumers.NewDeadLetters(s.Projections, fleet.Projections(now.Now)...)
	return &letterDesk{&d.Reader, func(ctx context.Context, action string, v verb, f dlqFlags) error {
		return s.actParked(ctx, d, action, v, f)
	}}, nil
}

// chooseParked returns the dead letters that f selects, and a sentence if more aggregates match.
func chooseParked(ctx context.Context, d *consumers.DeadLetters, f *dlqFlags) (todo []int64, more string, err error) {
	f.all = f.all || len(f.filter.IDs) > 0
	f.filter.First = len(f.filter.IDs) == 0 // a given ID that is not the first one gets an error of its own
	for l, err := range d.List(ctx, f.filter, f.most()) {
		if err != nil {
			return nil, "", err
		}
		if !f.all && len(todo) == f.limit {
			more = " More aggregates match: use --limit N or --all."
			break
		}
		todo = append(todo, l.ID)
	}
	return todo, more, nil
}

// missing returns an error for each given ID that is not in todo.
func (f dlqFlags) missing(todo []int64) (errs []error) {
	for _, id := range f.filter.IDs {
		if !slices.Contains(todo, id) {
			errs = append(errs, fmt.Errorf("there is no dead letter %d", id))
		}
	}
	return errs
}

// parked describes what became of a dead letter.
func (f dlqFlags) parked(action string, id int64, res consumers.DeadLetterResult, fault string) parkedAction {
	e := &res.Event
	return parkedAction{
		Action: action, DryRun: f.dryRun, Actor: f.actor, Reason: f.reason, ID: id, Consumer: res.Consumer, TenantID: e.TenantID,
		AggregateType: e.AggregateType, AggregateID: e.AggregateID, EventID: e.ID, EventType: e.Type,
		Gone: res.Gone, Left: res.Left, Next: res.Next, Error: fault,
	}
}

// actParked handles the first dead letters that existed at its start, each in transactions of its
// own.
func (s *session) actParked(ctx context.Context, d *consumers.DeadLetters, action string, v verb, f dlqFlags) error {
	todo, more, err := chooseParked(ctx, d, &f)
	if err != nil {
		return err
	}
	do := d.Retry
	if action == deadletter.Discard {
		do = d.Discard
		if err := s.askDiscard(int64(len(todo))); err != nil {
			return err
		}
	}
	rows := [][]string{{"ID", "CONSUMER", "TENANT", "AGGREGATE", "TYPE", strings.ToUpper(v.did), "REMAINING", "ERROR"}}
	var gone, failed int64
	var refused []error
	for _, id := range todo {
		res, err := do(ctx, consumers.DeadLetterRequest{ID: id, Actor: f.actor, Reason: f.reason, DryRun: f.dryRun})
		gone += int64(res.Gone)
		var notFirst *consumers.NotFirstError
		switch {
		case errors.As(err, &notFirst):
			refused = append(refused, notFirst)
			continue
		case errors.Is(err, consumers.ErrNotParked): // another operator handled it
			if len(f.filter.IDs) > 0 {
				refused = append(refused, fmt.Errorf("there is no dead letter %d", id))
			}
			continue
		case err != nil:
			return errors.Join(err, s.table(rows...), s.say(v, f, gone, ""))
		}
		fault := ""
		if res.Fault != nil {
			failed++
			fault = res.Fault.Error()
		}
		if s.asJSON {
			if err := s.writeJSON(f.parked(action, id, res, fault)); err != nil {
				return err
			}
		}
		e := &res.Event
		rows = append(rows, []string{strconv.FormatInt(id, 10), res.Consumer, fmt.Sprint(e.TenantID),
			aggregate(e.AggregateType, e.AggregateID), cell(e.Type), fmt.Sprint(res.Gone), count(res.Left), cell(fault)})
	}
	if !s.asJSON && len(rows) > 1 {
		if err := s.table(rows...); err != nil {
			return err
		}
	}
	if err := s.say(v, f, gone, more); err != nil {
		return err
	}
	refused = append(refused, f.missing(todo)...)
	if failed > 0 {
		refused = append(refused, fmt.Errorf("the consumer could not apply %s; later ones of the same aggregates wait", messages(failed)))
	}
	return errors.Join(refused...)
}
