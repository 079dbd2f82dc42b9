package console

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/ops/deadletters"
	"github.com/tidings/tidings/outbox"
)

const (
	deadRows   = 50
	recentOps  = 10
	recentOnOp = 5 // operations that a group's page lists
)

type deadGroupsPage struct {
	Groups     []deadletters.Group
	Some       bool // more groups exist than the desk reads
	Next       string
	Operations []deadletters.Operation
	Consumers  []string
	Any        bool // a filter is set
}

// deadGroupsData lists the groups. The group with the latest letter is first.
func (c *Console) deadGroupsData(ctx context.Context, v *view) (any, error) {
	tenant, err := v.tenant()
	if err != nil {
		return nil, err
	}
	f := deadletters.GroupFilter{TenantID: tenant, Source: v.query("source"), Consumer: v.query("consumer"),
		EventType: v.query("type"), Text: v.query("q")}
	p := deadGroupsPage{Any: f.Source+f.Consumer+f.EventType+f.Text != ""}
	for _, projection := range c.deps.Fleet {
		p.Consumers = append(p.Consumers, projection.Name())
	}
	if before := v.query("before"); before != "" {
		at, id, _ := strings.Cut(before, "_")
		last, err := time.Parse(time.RFC3339Nano, at)
		if err != nil {
			return nil, &inputError{"before is not the end of a page."}
		}
		f.After = &deadletters.GroupKey{Last: last, ID: id}
	}
	var more bool
	if p.Groups, more, p.Some, err = c.desk.Groups(ctx, f, deadRows); err != nil {
		return nil, err
	}
	if more {
		key := p.Groups[len(p.Groups)-1].Key()
		p.Next = v.with("before", key.Last.UTC().Format(time.RFC3339Nano)+"_"+key.ID)
	}
	p.Operations, err = c.desk.List(ctx, tenant, "", recentOps)
	return p, err
}

// deadRow is a dead letter of the outbox or of a consumer.
type deadRow struct {
	Source, Consumer      string
	ID, Tenant            int64
	AggregateType         string
	AggregateID           int64
	EventType, EventID    string
	Error, Group          string
	DeadAt                time.Time
	Attempts, Retries     int
	First                 bool // the first of its aggregate; always true for the outbox
	Stream                string
	Seq                   int64
	Payload, Headers      string // only on the page of one letter
	TraceParent           string
	OccurredAt, WrittenAt time.Time // only for the outbox
}

func rowOfMessage(m outbox.DLQMessage) deadRow {
	return deadRow{Source: deadletters.Outbox, ID: m.OutboxID, Tenant: m.TenantID, AggregateType: m.AggregateType,
		AggregateID: m.AggregateID, EventType: m.Type, EventID: m.ID,
		Error: m.LastError, Group: m.Group, DeadAt: m.DeadAt, Attempts: m.Attempts, Retries: m.Retries, First: true,
		Payload: string(m.Payload), TraceParent: m.TraceParent, OccurredAt: m.OccurredAt, WrittenAt: m.InsertedAt}
}

func rowOfLetter(l consumers.DeadLetter) deadRow {
	r := deadRow{Source: deadletters.Consumers, Consumer: l.Consumer, ID: l.ID, Tenant: l.TenantID, AggregateType: l.AggregateType,
		AggregateID: l.AggregateID, EventType: l.EventType,
		EventID: l.EventID, Error: l.Error, Group: l.Group, DeadAt: l.DeadAt, Retries: l.Retries, First: l.First,
		Stream: l.Partition, Seq: l.StreamSeq, Payload: strings.ToValidUTF8(string(l.Payload), "\uFFFD")}
	for name, values := range l.Headers {
		if strings.EqualFold(name, "traceparent") && len(values) > 0 {
			r.TraceParent = values[0]
		}
	}
	return r
}

// deadAsked selects letters of one source, for a page or an act.
type deadAsked struct {
	Tenant int64
	Source string
	Filter deadletters.Filter
}

// readAsked reads the selection from a URL or a form.
func readAsked(who tokens.Principal, in url.Values) (a deadAsked, err error) {
	get := func(name string) string { return strings.TrimSpace(in.Get(name)) }
	number := func(name string, to *int64) {
		if s := get(name); s != "" && err == nil {
			if *to, err = strconv.ParseInt(s, 10, 64); err != nil {
				err = &inputError{fmt.Sprintf("%s is not a number: %.40q.", name, s)}
			}
		}
	}
	if a.Tenant = who.TenantID; who.System() {
		if number("tenant", &a.Tenant); err == nil && a.Tenant < 0 {
			err = &inputError{"tenant is a positive number."}
		}
	}
	number("aggregate_id", &a.Filter.AggregateID)
	for _, s := range in["id"] {
		id, perr := strconv.ParseInt(s, 10, 64)
		if perr != nil {
			return a, &inputError{"id is not a number."}
		}
		a.Filter.IDs = append(a.Filter.IDs, id)
	}
	a.Source, a.Filter.Consumer, a.Filter.AggregateType, a.Filter.EventType = get("source"), get("consumer"), get("aggregate"), get("type")
	for name, to := range map[string]*time.Time{"from": &a.Filter.DeadAfter, "until": &a.Filter.DeadBefore} {
		if err == nil {
			*to, err = parseMoment(name, get(name))
		}
	}
	if g := get("group"); g != "" {
		id, perr := uuid.Parse(g)
		if perr != nil {
			return a, &inputError{"group is not the id of a group."}
		}
		a.Filter.Group = id.String()
	}
	switch {
	case err != nil:
	case a.Source != deadletters.Outbox && a.Source != deadletters.Consumers:
		err = &inputError{"source is outbox or consumers."}
	case a.Source == deadletters.Outbox && a.Filter.Consumer != "":
		err = &inputError{"The outbox's dead letters have no consumer."}
	}
	return a, err
}

// some returns up to limit letters with ids above after.
func (c *Console) some(ctx context.Context, a deadAsked, after int64, limit int) (rows []deadRow, err error) {
	f := a.Filter
	if a.Source == deadletters.Outbox {
		all, err := c.dlq.List(ctx, outbox.DLQFilter{TenantID: a.Tenant, IDs: f.IDs, AggregateType: f.AggregateType,
			AggregateID: f.AggregateID, EventType: f.EventType, Group: f.Group,
			DeadBefore: f.DeadBefore, DeadAfter: f.DeadAfter, After: after}, limit)
		for _, m := range all {
			rows = append(rows, rowOfMessage(m))
		}
		return rows, err
	}
	all, err := c.letters.List(ctx, consumers.DeadLetterFilter{Consumer: f.Consumer, TenantID: a.Tenant, IDs: f.IDs,
		AggregateType: f.AggregateType, AggregateID: f.AggregateID,
		EventType: f.EventType, Group: f.Group, DeadBefore: f.DeadBefore, DeadAfter: f.DeadAfter, After: after}, limit)
	for _, l := range all {
		rows = append(rows, rowOfLetter(l))
	}
	return rows, err
}

type deadLettersPage struct {
	Asked      deadAsked
	Group      *deadletters.Group // nil if the page is not about one group
	Behind     bool               // the letters only wait behind earlier ones of their aggregates
	Rows       []deadRow
	Next       string
	In         url.Values // input for acts on all these letters
	Operations []deadletters.Operation
	Since      *deadSince
	Consumers  []string
}

// deadSince describes the letters that died after the last retry of a group.
type deadSince struct {
	Operation deadletters.Operation
	New       int64 // letters that died since; deadletters.MaxCount+1 if there are more
	Again     int64 // letters among them that had been retried before
}

// deadLettersData shows the letters of a group or of a filter.
func (c *Console) deadLettersData(ctx context.Context, v *view) (any, error) {
	a, err := readAsked(v.who, v.r.URL.Query())
	if err != nil {
		return nil, err
	}
	after, err := v.queryInt("before")
	if err != nil {
		return nil, err
	}
	p := deadLettersPage{Asked: a, In: url.Values{}}
	for _, projection := range c.deps.Fleet {
		p.Consumers = append(p.Consumers, projection.Name())
	}
	for _, name := range []string{"tenant", "source", "group", "consumer", "aggregate", "aggregate_id", "type", "from", "until"} {
		if s := v.query(name); s != "" {
			p.In.Set(name, s)
		}
	}
	if p.Rows, err = c.some(ctx, a, after, deadRows+1); err != nil {
		return nil, err
	}
	if len(p.Rows) > deadRows {
		p.Rows = p.Rows[:deadRows]
		p.Next = v.with("before", p.Rows[deadRows-1].ID)
	}
	if a.Filter.Group == "" {
		return p, nil
	}
	if p.Group, err = c.desk.Group(ctx, a.Tenant, a.Source, a.Filter.Group); err != nil {
		return nil, err
	}
	p.Behind = p.Group != nil && p.Group.Cause == consumers.BehindAnother
	if p.Operations, err = c.desk.List(ctx, a.Tenant, a.Filter.Group, recentOnOp); err != nil {
		return nil, err
	}
	for _, o := range p.Operations {
		if o.Action == deadletters.Retry && p.Group != nil {
			p.Since = &deadSince{Operation: o}
			p.Since.New, p.Since.Again, err = c.desk.Since(ctx, a.Tenant, *p.Group, o.Requested)
			break
		}
	}
	return p, err
}

type deadLetterPage struct {
	deadRow
	Actions []deadAction
	TraceID string
	In      url.Values
}

// deadAction is an action of a person on a letter.
type deadAction struct {
	At            time.Time
	Actor, Action string
	Token         string // of the API; "" otherwise
	Consumer      string
	Error, Reason string
}

// deadLetterData shows one letter.
func (c *Console) deadLetterData(ctx context.Context, v *view) (any, error) {
	a, err := readAsked(v.who, v.r.URL.Query())
	if err != nil || len(a.Filter.IDs) != 1 {
		return nil, errors.Join(err, errNotFound)
	}
	p := deadLetterPage{In: url.Values{"source": {a.Source}, "id": {v.query("id")}}}
	if t := v.query("tenant"); t != "" {
		p.In.Set("tenant", t)
	}
	if a.Source == deadletters.Outbox {
		m, err := c.dlq.Get(ctx, a.Tenant, a.Filter.IDs[0])
		if errors.Is(err, outbox.ErrNotInDLQ) {
			return nil, errNotFound
		}
		if err != nil {
			return nil, err
		}
		p.deadRow = rowOfMessage(m)
	} else {
		l, err := c.letters.Get(ctx, a.Filter.IDs[0])
		if errors.Is(err, consumers.ErrNotParked) || err == nil && a.Tenant != 0 && l.TenantID != a.Tenant {
			return nil, errNotFound
		}
		if err != nil {
			return nil, err
		}
		p.deadRow = rowOfLetter(l)
	}
	// an act on the letter removes it, and with it this page
	p.In.Set("back", address("dead-letters/letters", "source", a.Source, "group", p.Group, "tenant", v.query("tenant")))
	if v.query("payload") != "show" || !v.mayReadPayloads() {
		p.Payload = ""
	}
	p.TraceID = traceID(p.TraceParent)
	p.Actions, err = c.actionsOn(ctx, p.Tenant, p.EventID)
	return p, err
}

// actionsOn returns the actions of people on the dead letters of an event, in the outbox and in
// consumers.
func (c *Console) actionsOn(ctx context.Context, tenant int64, eventID string) (all []deadAction, err error) {
	did, err := outbox.ActionsOn(ctx, c.deps.Truth, tenant, eventID)
	if err != nil {
		return nil, err
	}
	for _, d := range did {
		all = append(all, deadAction{At: d.At, Actor: d.Actor, Token: d.Token, Action: d.Action, Reason: d.Reason})
	}
	parked, err := c.letters.ActionsOn(ctx, tenant, eventID)
	for _, d := range parked {
		all = append(all, deadAction{At: d.At, Actor: d.Actor, Action: d.Action, Consumer: d.Consumer, Error: d.Error, Reason: d.Reason})
	}
	return all, err
}

// deadOperationData shows the progress of an operation.
func (c *Console) deadOperationData(ctx context.Context, v *view) (any, error) {
	tenant := v.who.TenantID // 0 for a system token: any tenant
	if _, err := uuid.Parse(v.query("id")); err != nil {
		return nil, errNotFound
	}
	o, err := c.desk.Get(ctx, tenant, v.query("source"), v.query("id"))
	if errors.Is(err, deadletters.ErrNotFound) {
		return nil, errNotFound
	}
	return o, err
}

// says describes the selected letters in words.
func (a *deadAsked) says(g *deadletters.Group) string {
	f := a.Filter
	switch {
	case len(f.IDs) == 1:
		return fmt.Sprintf("dead letter %d of the %s", f.IDs[0], a.Source)
	case g != nil && g.Consumer != "":
		return fmt.Sprintf("group %q of %s, %s", g.Cause, g.Consumer, g.EventType)
	case g != nil:
		return fmt.Sprintf("group %q of the outbox, %s", g.Cause, g.EventType)
	}
	var all []string
	for _, one := range []struct{ name, value string }{{"consumer", f.Consumer}, {"aggregate type", f.AggregateType},
		{"type", f.EventType}} {
		if one.value != "" {
			all = append(all, one.name+" "+one.value)
		}
	}
	if f.AggregateID != 0 {
		all = append(all, fmt.Sprint("aggregate ", f.AggregateID))
	}
	for name, t := range map[string]time.Time{"from": f.DeadAfter, "until": f.DeadBefore} {
		if !t.IsZero() {
			all = append(all, name+" "+t.UTC().Format(time.RFC3339))
		}
	}
	if len(f.IDs) > 0 {
		all = append(all, fmt.Sprint(len(f.IDs), " ids"))
	}
	if len(all) == 0 {
		return "all dead letters of the " + a.Source
	}
	return "dead letters of the " + a.Source + ": " + strings.Join(all, ", ")
}

func (a *deadAsked) back() string {
	if len(a.Filter.IDs) == 1 && a.Filter.Group == "" {
		return root + "dead-letters"
	}
	in := []any{"source", a.Source, "group", a.Filter.Group}
	if a.Tenant != 0 {
		in = append(in, "tenant", a.Tenant)
	}
	return address("dead-letters/letters", in...)
}

// lookDeadLetters describes the effect of a retry or a discard.
func (c *Console) lookDeadLetters(action string) func(context.Context, *view, url.Values) (subject, error) {
	return func(ctx context.Context, v *view, in url.Values) (subject, error) {
		a, err := readAsked(v.who, in)
		if err != nil {
			return subject{}, err
		}
		n, err := c.desk.Count(ctx, deadletters.Operation{Source: a.Source, TenantID: a.Tenant, Action: action, Filter: a.Filter})
		if err != nil {
			return subject{}, err
		}
		if n == 0 {
			return subject{}, &problem{404, "There is no such dead letter",
				"Somebody retried or discarded it, or it failed again under another id. See the groups."}
		}
		var g *deadletters.Group
		if a.Filter.Group != "" {
			if g, err = c.desk.Group(ctx, a.Tenant, a.Source, a.Filter.Group); err != nil {
				return subject{}, err
			}
		}
		return subject{Target: a.says(g), Tenant: a.Tenant, Back: a.back(), Says: whatHappens(a, action, n)}, nil
	}
}

func whatHappens(a deadAsked, action string, n int64) []string {
	letters := func(what string) string { return words.Of(n, what) }
	switch {
	case action == deadletters.Retry && a.Source == deadletters.Outbox:
		return []string{"Puts " + letters("message") + " back into the outbox, behind all others. A relay publishes them.",
			"A message that fails again returns here under a new id."}
	case action == deadletters.Retry:
		return []string{"Applies the dead letters of " + letters("aggregate") + ", each in the order of the stream, until one fails again.",
			"The consumer resumes an aggregate when none of its letters is left."}
	case a.Source == deadletters.Outbox:
		return []string{"Deletes " + letters("message") + ". No copy remains, and no consumer ever sees the deleted messages.",
			"This cannot be undone."}
	}
	return []string{"Deletes " + letters("dead letter") +
		", unless an earlier one of its aggregate remains. The projection never gets these events: verify and repair it afterwards.",
		"This cannot be undone."}
}

// doDeadLetters starts an operation. Another process continues it if this one ends.
func (c *Console) doDeadLetters(action string) func(context.Context, *doing) (string, error) {
	return func(ctx context.Context, d *doing) (string, error) {
		a, err := readAsked(d.Who, d.In)
		if err != nil {
			return "", err
		}
		o, err := c.desk.Start(ctx, deadletters.Operation{ID: d.Act.ActID.String(), Source: a.Source, TenantID: a.Tenant, Action: action,
			Filter: a.Filter, Actor: d.actor(), Reason: d.Act.Reason})
		if err != nil {
			return "", err
		}
		o, err = c.desk.Work(ctx, o.Source, o.ID, func(o deadletters.Operation) { d.progress(o.Seen, o.Total) })
		if err != nil { // the operation is stored, and Run continues it
			c.log.WarnContext(ctx, "operation on dead letters interrupted, a process will continue it",
				"operation", d.Act.ActID, "err", err)
			return "", errContinues
		}
		return outcomeOf(o), nil
	}
}

// completeAct records the outcome of an act that another process began and this one completed.
func (c *Console) completeAct(o deadletters.Operation) {
	id, err := uuid.Parse(o.ID)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), pageTimeout)
	defer cancel()
	if err := audit.Finish(ctx, c.deps.Truth, id, outcomeOf(o), false); err != nil {
		c.log.ErrorContext(ctx, "outcome of an act not recorded", "act_id", id, "err", err, "runbook", "ConsoleFails")
	}
}

// outcomeOf returns the sentence for the audit log.
func outcomeOf(o deadletters.Operation) string {
	did, letters := "Retried", "dead letters"
	if o.Action == deadletters.Discard {
		did = "Discarded"
	}
	if o.Done == 1 {
		letters = "dead letter"
	}
	says := fmt.Sprintf("%s %s %s.", did, num(o.Done), letters)
	if o.Failed > 0 {
		says += fmt.Sprintf(" %s failed and remain. The last error: %s", num(o.Failed), o.LastError)
	}
	if o.StoppedBy != "" {
		says += " " + o.StoppedBy + " stopped it early."
	}
	return says
}

func (c *Console) lookDeadStop(ctx context.Context, v *view, in url.Values) (subject, error) {
	if _, err := uuid.Parse(in.Get("operation")); err != nil {
		return subject{}, errNotFound
	}
	o, err := c.desk.Get(ctx, v.who.TenantID, in.Get("source"), in.Get("operation"))
	if errors.Is(err, deadletters.ErrNotFound) {
		return subject{}, errNotFound
	}
	if err != nil {
		return subject{}, err
	}
	if o.FinishedAt != nil {
		return subject{}, &problem{409, "The operation has ended", outcomeOf(o)}
	}
	return subject{Target: fmt.Sprintf("%s %s", o.Action, o.ID), Tenant: o.TenantID,
		Back: address("dead-letters/operation", "source", o.Source, "id", o.ID),
		Says: []string{fmt.Sprintf("Stops the %s after %s of %s letters. It undoes nothing.", o.Action, num(o.Seen), num(o.Total))}}, nil
}

func (c *Console) doDeadStop(ctx context.Context, d *doing) (string, error) {
	err := c.desk.Stop(ctx, d.Who.TenantID, d.In.Get("source"), d.In.Get("operation"), d.actor())
	if errors.Is(err, deadletters.ErrFinished) {
		return "The operation had ended already.", nil
	}
	if err != nil {
		return "", err
	}
	o, err := c.desk.Get(ctx, d.Who.TenantID, d.In.Get("source"), d.In.Get("operation"))
	return fmt.Sprintf("Stopped it after %s of %s.", num(o.Seen), num(o.Total)), err
}

func (c *Console) lookDeadNote(ctx context.Context, v *view, in url.Values) (subject, error) {
	a, err := readAsked(v.who, in)
	if err != nil || a.Filter.Group == "" {
		return subject{}, errors.Join(err, errNotFound)
	}
	g, err := c.desk.Group(ctx, a.Tenant, a.Source, a.Filter.Group)
	if err != nil || g == nil {
		return subject{}, errors.Join(err, errNotFound)
	}
	s := subject{Target: a.says(g), Tenant: a.Tenant, Back: a.back(), Says: []string{"Everybody who sees the group reads the note."}}
	f := field{Name: "note", Label: "Note", Hint: "At most 2,000 bytes; empty deletes it", Kind: "area"}
	if g.Note != nil {
		f.Value = g.Note.Text
	}
	s.Fields = []field{f}
	return s, nil
}

func (c *Console) doDeadNote(ctx context.Context, d *doing) (string, error) {
	a, err := readAsked(d.Who, d.In)
	if err != nil {
		return "", err
	}
	err = c.desk.SetNote(ctx, a.Tenant, a.Filter.Group, d.In.Get("note"), d.actor())
	if errors.Is(err, deadletters.ErrNote) {
		return "", &inputError{"A note has at most 2,000 bytes."}
	}
	if strings.TrimSpace(d.In.Get("note")) == "" {
		return "Deleted the note.", err
	}
	return "Wrote the note.", err
}
