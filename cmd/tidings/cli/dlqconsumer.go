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
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
)

// parkedFlags are the flags of `tidings dlq consumer`: those of `tidings dlq outbox`, and two more.
type parkedFlags struct {
	dlqFlags
	consumer string
	first    bool
}

func (f *parkedFlags) add(c *cobra.Command, limit int) {
	f.dlqFlags.add(c, limit)
	c.Flags().StringVar(&f.consumer, "consumer", "", "only of this consumer")
}

func (f *parkedFlags) parse(c *cobra.Command, args []string) error {
	if err := f.dlqFlags.parse(c, args, time.Now()); err != nil {
		return err
	}
	return checkConsumer("--consumer", f.consumer, true)
}

func (f *parkedFlags) parked() consumers.DeadLetterFilter {
	return consumers.DeadLetterFilter{
		Consumer: f.consumer, TenantID: f.filter.TenantID, IDs: f.filter.IDs, AggregateType: f.filter.AggregateType,
		AggregateID: f.filter.AggregateID,
		EventType:   f.filter.EventType, DeadBefore: f.filter.DeadBefore, DeadAfter: f.filter.DeadAfter, First: f.first,
	}
}

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
	AggregateID   int64               `json:"aggregate_id,string"`
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

func deadLetterOf(l consumers.DeadLetter) deadLetter {
	d := deadLetter{
		ID: l.ID, Consumer: l.Consumer, First: l.First, TenantID: l.TenantID, AggregateType: l.AggregateType,
		AggregateID: l.AggregateID, EventID: l.EventID,
		EventType: l.EventType, EventVersion: l.EventVersion, Partition: l.Partition, StreamSeq: l.StreamSeq, Error: l.Error,
		DeadAt: event.Time{Time: l.DeadAt}, Headers: l.Headers,
	}
	switch {
	case json.Valid(l.Payload):
		d.Payload = json.RawMessage(l.Payload)
	case l.Payload != nil:
		d.Payload = string(l.Payload)
	}
	return d
}

// parkedAction is a line of the output of retry and discard with --json.
type parkedAction struct {
	Action        string `json:"action"`
	DryRun        bool   `json:"dry_run"`
	Actor         string `json:"actor"`
	Reason        string `json:"reason,omitempty"`
	ID            int64  `json:"id,string"`
	Consumer      string `json:"consumer"`
	TenantID      int64  `json:"tenant_id,string"`
	AggregateType string `json:"aggregate_type"`
	AggregateID   int64  `json:"aggregate_id,string"`
	EventID       string `json:"event_id"`
	EventType     string `json:"event_type"`
	Gone          int    `json:"gone"`            // applied or discarded dead letters
	Left          int64  `json:"left"`            // remaining dead letters of the aggregate
	Next          int64  `json:"next_id,string"`  // the first remaining one, or 0
	Error         string `json:"error,omitempty"` // why the consumer could not apply that one
}

func (p Process) dlqConsumerCommand() *cobra.Command {
	c := &cobra.Command{Use: "consumer", Short: "Dead letters of consumers: events that a consumer could not apply, and the later " +
		"events of their aggregates"}
	c.AddCommand(p.parkedListCommand(), p.parkedShowCommand(), p.parkedActCommand(consumers.DeadLetterRetry),
		p.parkedActCommand(consumers.DeadLetterDiscard))
	return c
}

// projectionsPool connects to the projections' database.
func (p Process) projectionsPool(ctx context.Context, data, name string) (*pgxpool.Pool, error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return nil, err
	}
	pool, err := postgres.Open(ctx, s.ProjectionsDatabaseURL, s.Postgres, postgres.RoleSystem, name)
	if err != nil {
		return nil, err
	}
	if err := migrations.Check(ctx, pool, migrations.Projections); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

func (p Process) deadLetters(ctx context.Context, data string) (_ *consumers.DeadLetters, closePool func(), err error) {
	pool, err := p.projectionsPool(ctx, data, "dlq")
	if err != nil {
		return nil, nil, err
	}
	catalog := kinds.NewCatalog(pool, kinds.Projections, slog.New(slog.DiscardHandler))
	if err := catalog.Load(ctx); err != nil {
		pool.Close()
		return nil, nil, err
	}
	return consumers.NewDeadLetters(pool, fleet.Projections(catalog.Now)...), pool.Close, nil
}

func (p Process) parkedListCommand() *cobra.Command {
	var f parkedFlags
	c := &cobra.Command{
		Use:   "list",
		Short: "List the dead letters by id: within an aggregate, in the order of the stream",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := f.parse(c, nil); err != nil {
				return err
			}
			d, closePool, err := p.deadLetters(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer closePool()
			return p.listParked(c.Context(), d, f)
		},
	}
	f.add(c, 50)
	c.Flags().BoolVar(&f.first, "first", false, "only the first dead letter of each aggregate, which has the cause")
	return c
}

func (p Process) listParked(ctx context.Context, d *consumers.DeadLetters, f parkedFlags) error {
	header := []string{"ID", "FIRST", "CONSUMER", "TENANT", "AGGREGATE", "TYPE", "DEAD SINCE", "ERROR"}
	more, err := f.pages(ctx, d, func(page []consumers.DeadLetter) error {
		rows := [][]string{header}
		for _, l := range page {
			if f.asJSON {
				if err := p.writeJSON(deadLetterOf(l)); err != nil {
					return err
				}
				continue
			}
			first := ""
			if l.First {
				first = "yes"
			}
			rows = append(rows, []string{fmt.Sprint(l.ID), first, l.Consumer, fmt.Sprint(l.TenantID),
				aggregate(l.AggregateType, l.AggregateID), cell(l.EventType), l.DeadAt.UTC().Format(time.RFC3339), cell(l.Error)})
		}
		if f.asJSON {
			return nil
		}
		return p.table(rows...)
	})
	if err == nil && more {
		fmt.Fprintln(p.Stderr, "There are more: use --limit N or --all.")
	}
	return err
}

// pages calls fn with the selected dead letters, page by page, at least once and up to the limit.
// It reports whether there are more.
func (f *parkedFlags) pages(ctx context.Context, d *consumers.DeadLetters, fn func([]consumers.DeadLetter) error) (more bool, err error) {
	filter := f.parked()
	for n := 0; ; {
		ask := consumers.MaxDeadLetters
		if !f.all {
			ask = min(ask, f.limit-n)
		}
		page, err := d.List(ctx, filter, ask)
		if err != nil {
			return false, err
		}
		if len(page) > 0 || n == 0 {
			if err := fn(page); err != nil {
				return false, err
			}
		}
		if len(page) < ask {
			return false, nil
		}
		n += len(page)
		filter.After = page[len(page)-1].ID
		if !f.all && n == f.limit {
			next, err := d.List(ctx, filter, 1)
			return len(next) > 0, err
		}
	}
}

func (p Process) parkedShowCommand() *cobra.Command {
	var f parkedFlags
	c := &cobra.Command{
		Use:   "show ID",
		Short: "Show a dead letter with its headers and payload",
		Args:  exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			id, err := event.ParseID(args[0])
			if err != nil {
				return &usageError{err}
			}
			d, closePool, err := p.deadLetters(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer closePool()
			l, err := d.Get(c.Context(), int64(id))
			if errors.Is(err, consumers.ErrNotParked) {
				return fmt.Errorf("there is no dead letter %d", id)
			}
			if err != nil {
				return err
			}
			if f.asJSON {
				return p.writeJSON(deadLetterOf(l))
			}
			headers, err := json.Marshal(l.Headers)
			if err != nil {
				return fmt.Errorf("write the headers: %w", err)
			}
			return p.table(
				[]string{"ID", fmt.Sprint(l.ID)},
				[]string{"CONSUMER", l.Consumer},
				[]string{"EVENT", l.EventID},
				[]string{"TENANT", fmt.Sprint(l.TenantID)},
				[]string{"AGGREGATE", aggregate(l.AggregateType, l.AggregateID)},
				[]string{"FIRST", fmt.Sprint(l.First)},
				[]string{"TYPE", cell(l.EventType)},
				[]string{"VERSION", fmt.Sprint(l.EventVersion)},
				[]string{"STREAM", fmt.Sprintf("%d in %s", l.StreamSeq, l.Partition)},
				[]string{"ERROR", cell(l.Error)},
				[]string{"DEAD SINCE", l.DeadAt.UTC().Format(event.TimeFormat)},
				[]string{"HEADERS", string(headers)},
				[]string{"PAYLOAD", cell(string(l.Payload))},
			)
		},
	}
	f.addOutput(c)
	return c
}

func parkedVerbOf(action string) verb {
	if action == consumers.DeadLetterRetry {
		return verb{"Apply dead letters again, in stream order per aggregate, until one fails", "apply", "Applied"}
	}
	return verb{"Delete the first dead letter of an aggregate: the next one takes its place", "discard", "Discarded"}
}

func (p Process) parkedActCommand(action string) *cobra.Command {
	var f parkedFlags
	does := "Retry applies dead letters again. Within an aggregate it keeps the order of the stream, and stops\nat the first failure."
	if action == consumers.DeadLetterDiscard {
		does = "Discard deletes dead letters. Then the next dead letter of the aggregate becomes its first one."
	}
	c := &cobra.Command{
		Use:   action + " [ID...]",
		Short: parkedVerbOf(action).short,
		Long: does + `

An ID names the first dead letter of an aggregate (list --first). A filter also selects only first
dead letters. ` + chosen,
		RunE: func(c *cobra.Command, args []string) error {
			f.first = len(args) == 0 // a given ID that is not the first one gets an error of its own
			if err := f.parse(c, args); err != nil {
				return err
			}
			filtered := f.filtered() || f.consumer != ""
			if len(args) == 0 && !filtered && !f.all {
				return &usageError{fmt.Errorf("dlq consumer %s needs ids, a filter, or --all", action)}
			}
			if len(args) > 0 && (filtered || f.all) {
				return &usageError{fmt.Errorf("dlq consumer %s takes ids or a filter, not both", action)}
			}
			if err := setActor(&f.actor); err != nil {
				return err
			}
			d, closePool, err := p.deadLetters(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer closePool()
			return p.actParked(c.Context(), d, action, f)
		},
	}
	f.add(c, consumers.MaxDeadLetters)
	f.addAct(c)
	if action == consumers.DeadLetterDiscard {
		f.sure = p.destructive(c)
	}
	return c
}

// actParked handles the first dead letters that existed at its start, each in transactions of its
// own.
func (p Process) actParked(ctx context.Context, d *consumers.DeadLetters, action string, f parkedFlags) error {
	if len(f.filter.IDs) > 0 {
		f.all = true
	}
	var todo []int64
	more, err := f.pages(ctx, d, func(page []consumers.DeadLetter) error {
		for _, l := range page {
			todo = append(todo, l.ID)
		}
		return nil
	})
	if err != nil {
		return err
	}
	do := d.Retry
	if action == consumers.DeadLetterDiscard {
		do = d.Discard
		if err := f.askDiscard(int64(len(todo))); err != nil {
			return err
		}
	}
	rows := [][]string{{"ID", "CONSUMER", "TENANT", "AGGREGATE", "TYPE", strings.ToUpper(parkedVerbOf(action).did), "REMAINING", "ERROR"}}
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
			return errors.Join(err, p.table(rows...), p.sayParked(action, f, gone, false))
		}
		fault := ""
		if res.Fault != nil {
			failed++
			fault = res.Fault.Error()
		}
		if f.asJSON {
			if err := p.writeJSON(parkedAction{
				Action: action, DryRun: f.dryRun, Actor: f.actor, Reason: f.reason, ID: id, Consumer: res.Consumer, TenantID: res.TenantID,
				AggregateType: res.AggregateType, AggregateID: res.AggregateID, EventID: res.EventID, EventType: res.EventType,
				Gone: res.Gone, Left: res.Left, Next: res.Next, Error: fault,
			}); err != nil {
				return err
			}
		}
		rows = append(rows, []string{strconv.FormatInt(id, 10), res.Consumer, fmt.Sprint(res.TenantID),
			aggregate(res.AggregateType, res.AggregateID), cell(res.EventType), fmt.Sprint(res.Gone), count(res.Left), cell(fault)})
	}
	if !f.asJSON && len(rows) > 1 {
		if err := p.table(rows...); err != nil {
			return err
		}
	}
	if err := p.sayParked(action, f, gone, more); err != nil {
		return err
	}
	for _, id := range f.filter.IDs {
		if !slices.Contains(todo, id) {
			refused = append(refused, fmt.Errorf("there is no dead letter %d", id))
		}
	}
	if failed > 0 {
		refused = append(refused, fmt.Errorf("the consumer could not apply %s; later ones of the same aggregates wait", messages(failed)))
	}
	return errors.Join(refused...)
}

func (p Process) sayParked(action string, f parkedFlags, gone int64, more bool) error {
	v := parkedVerbOf(action)
	line := fmt.Sprintf("%s %s.", v.did, messages(gone))
	if f.dryRun {
		line = fmt.Sprintf("Dry run: would %s %s.", v.will, messages(gone))
	}
	if more {
		line += " More aggregates match: use --limit N or --all."
	}
	if _, err := fmt.Fprintln(p.Stderr, line); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}
