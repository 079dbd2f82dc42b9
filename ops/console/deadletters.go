package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/ops/letters"
)

const (
	deadRows   = 50
	recentOps  = 10
	recentOnOp = 5 // operations that a group's page lists
)

type deadGroupsPage struct {
	Groups     []letters.Group
	Some       bool // more groups exist than the desk reads
	Next       string
	Operations []letters.Operation
	Consumers  []string
	Any        bool // a filter is set
}

// deadGroupsData lists the groups. The group with the latest letter is first.
func (c *Console) deadGroupsData(ctx context.Context, v *view) (any, error) {
	tenant, err := v.tenant()
	if err != nil {
		return nil, err
	}
	f := letters.GroupFilter{TenantID: tenant, Source: v.query("source"), Consumer: v.query("consumer"),
		EventType: v.query("type"), Text: v.query("q")}
	p := deadGroupsPage{Any: f.Source+f.Consumer+f.EventType+f.Text != "", Consumers: c.observer.src.Consumers}
	if before := v.query("before"); before != "" {
		at, id, _ := strings.Cut(before, "_")
		last, err := time.Parse(time.RFC3339Nano, at)
		if err != nil {
			return nil, &inputError{"before is not the end of a page."}
		}
		f.After = &letters.GroupKey{Last: last, ID: id}
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

// deadAsked selects letters of one source, for a page or an act.
type deadAsked struct {
	Source string
	deadletter.Filter
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
	if a.TenantID = who.TenantID; who.System() {
		if number("tenant", &a.TenantID); err == nil && a.TenantID < 0 {
			err = &inputError{"tenant is a positive number."}
		}
	}
	if s := get("aggregate_id"); s != "" && err == nil {
		if a.AggregateID, err = event.ParseID(s); err != nil {
			err = &inputError{err.Error() + "."}
		}
	}
	for _, s := range in["id"] {
		id, perr := strconv.ParseInt(s, 10, 64)
		if perr != nil {
			return a, &inputError{"id is not a number."}
		}
		a.IDs = append(a.IDs, id)
	}
	a.Source, a.Consumer, a.AggregateType, a.EventType = get("source"), get("consumer"), get("aggregate"), get("type")
	for name, to := range map[string]*time.Time{"from": &a.DeadAfter, "until": &a.DeadBefore} {
		if err == nil {
			*to, err = parseMoment(name, get(name))
		}
	}
	if g := get("group"); g != "" {
		id, perr := uuid.Parse(g)
		if perr != nil {
			return a, &inputError{"group is not the id of a group."}
		}
		a.Group = id.String()
	}
	switch {
	case err != nil:
	case a.Source != deadletter.Outbox && a.Source != deadletter.Consumers:
		err = &inputError{"source is outbox or consumers."}
	case a.AggregateID != "" && a.TenantID == 0: // no index has aggregates without their tenant
		err = &inputError{"Enter the tenant of the aggregate."}
	case a.Source == deadletter.Outbox && a.Consumer != "":
		err = &inputError{"The outbox's dead letters have no consumer."}
	}
	return a, err
}

type deadLettersPage struct {
	Asked      deadAsked
	Group      *letters.Group // nil if the page is not about one group
	Behind     bool           // the letters only wait behind earlier ones of their aggregates
	Rows       []deadletter.Letter
	Next       string
	Part       bool       // the page ended because it had read many letters
	In         url.Values // input for acts on all these letters
	Operations []letters.Operation
	Since      *deadSince
	Consumers  []string
}

// deadSince describes the letters that died after the last retry of a group.
type deadSince struct {
	Operation letters.Operation
	New       int64 // letters that died since; deadletter.MaxCount+1 if there are more
	Again     int64 // letters among them that had been retried before
}

// readPlace reads the end of the page before.
func readPlace(before string) (p deadletter.Place, err error) {
	if before == "" {
		return p, nil
	}
	at, id, _ := strings.Cut(before, "_")
	if p.At, err = time.Parse(time.RFC3339Nano, at); err == nil {
		p.ID, err = strconv.ParseInt(id, 10, 64)
	}
	if err != nil {
		return p, &inputError{"before is not the end of a page."}
	}
	return p, nil
}

// deadLettersData shows the letters of a group or of a filter.
func (c *Console) deadLettersData(ctx context.Context, v *view) (any, error) {
	a, err := readAsked(v.who, v.r.URL.Query())
	if err != nil {
		return nil, err
	}
	after, err := readPlace(v.query("before"))
	if err != nil {
		return nil, err
	}
	p := deadLettersPage{Asked: a, In: url.Values{}, Consumers: c.observer.src.Consumers}
	for _, name := range []string{"tenant", "source", "group", "consumer", "aggregate", "aggregate_id", "type", "from", "until"} {
		if s := v.query(name); s != "" {
			p.In.Set(name, s)
		}
	}
	var next deadletter.Place
	if p.Rows, next, err = deadletter.Page(ctx, c.desk.Reader(a.Source), a.Filter, after, deadRows); err != nil {
		return nil, err
	}
	if next.ID != 0 {
		p.Next, p.Part = v.with("before", next.At.UTC().Format(time.RFC3339Nano)+"_"+strconv.FormatInt(next.ID, 10)), len(p.Rows) < deadRows
	}
	if a.Group == "" {
		return p, nil
	}
	if p.Group, err = c.desk.Group(ctx, a.TenantID, a.Source, a.Group); err != nil {
		return nil, err
	}
	p.Behind = p.Group != nil && p.Group.Cause == consumers.BehindAnother
	if p.Operations, err = c.desk.List(ctx, a.TenantID, a.Group, recentOnOp); err != nil {
		return nil, err
	}
	for _, o := range p.Operations {
		if o.Action == deadletter.Retry && p.Group != nil {
			p.Since = &deadSince{Operation: o}
			p.Since.New, p.Since.Again, err = c.desk.Since(ctx, a.TenantID, *p.Group, o.Requested)
			break
		}
	}
	return p, err
}

type deadLetterPage struct {
	deadletter.Letter
	Payload string
	Actions []deadletter.Action
	TraceID string
	In      url.Values
}

// deadLetterData shows one letter.
func (c *Console) deadLetterData(ctx context.Context, v *view) (any, error) {
	a, err := readAsked(v.who, v.r.URL.Query())
	if err != nil || len(a.IDs) != 1 {
		return nil, errors.Join(err, errNotFound)
	}
	p := deadLetterPage{In: url.Values{"source": {a.Source}, "id": {v.query("id")}}}
	if t := v.query("tenant"); t != "" {
		p.In.Set("tenant", t)
	}
	p.Letter, err = c.desk.Reader(a.Source).Get(ctx, a.TenantID, a.IDs[0])
	if errors.Is(err, deadletter.ErrNotFound) {
		return nil, errNotFound
	}
	if err != nil {
		return nil, err
	}
	// an act on the letter removes it, and with it this page
	p.In.Set("back", address("dead-letters/letters", "source", a.Source, "group", p.Group, "tenant", v.query("tenant")))
	if v.query("payload") == "show" && v.mayReadPayloads() {
		p.Payload = strings.ToValidUTF8(string(p.Event.Payload), "\uFFFD")
	}
	trace := p.Event.TraceParent
	for name, values := range p.Headers {
		if strings.EqualFold(name, "traceparent") && len(values) > 0 {
			trace = values[0]
		}
	}
	p.TraceID = traceID(trace)
	p.Actions, err = c.desk.ActionsOn(ctx, p.Event.TenantID, p.Event.ID)
	return p, err
}

// deadOperationData shows the progress of an operation.
func (c *Console) deadOperationData(ctx context.Context, v *view) (any, error) {
	tenant := v.who.TenantID // 0 for a system token: any tenant
	if _, err := uuid.Parse(v.query("id")); err != nil {
		return nil, errNotFound
	}
	o, err := c.desk.Get(ctx, tenant, v.query("source"), v.query("id"))
	if errors.Is(err, letters.ErrNotFound) {
		return nil, errNotFound
	}
	return o, err
}

// says describes the selected letters in words.
func (a *deadAsked) says(g *letters.Group) string {
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
	if f.AggregateID != "" {
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
	if len(a.IDs) == 1 && a.Group == "" {
		return root + "dead-letters"
	}
	in := []any{"source", a.Source, "group", a.Group}
	if a.TenantID != 0 {
		in = append(in, "tenant", a.TenantID)
	}
	return address("dead-letters/letters", in...)
}

// prepareDeadLetters describes the effect of a retry or a discard.
func (c *Console) prepareDeadLetters(action string) func(context.Context, *view, url.Values) (subject, error) {
	return func(ctx context.Context, v *view, in url.Values) (subject, error) {
		a, err := readAsked(v.who, in)
		if err != nil {
			return subject{}, err
		}
		n, few, err := c.desk.Count(ctx, letters.Operation{Source: a.Source, TenantID: a.TenantID, Action: action, Filter: a.Filter})
		if err != nil {
			return subject{}, err
		}
		if few && n == 0 {
			return subject{}, &problem{404, "There is no such dead letter",
				"Somebody retried or discarded it, or it failed again under another id. See the groups."}
		}
		var g *letters.Group
		if a.Group != "" {
			if g, err = c.desk.Group(ctx, a.TenantID, a.Source, a.Group); err != nil {
				return subject{}, err
			}
		}
		s := subject{Target: a.says(g), Tenant: a.TenantID, Back: a.back(), Says: effectOf(a, action, n, few)}
		if action == deadletter.Discard && len(a.IDs) != 1 {
			counted := strconv.FormatInt(n, 10)
			if !few {
				counted = "all"
			}
			in.Set("counted", cmp.Or(in.Get("counted"), counted)) // later letters change n
			s.Confirm = in.Get("counted")
			first, _, err := deadletter.Page(ctx, c.desk.Reader(a.Source), a.Filter, deadletter.Place{}, actSamples)
			if err != nil {
				return subject{}, err
			}
			for _, l := range first {
				e := l.Event
				s.Samples = append(s.Samples, fmt.Sprintf("%s of %s/%s: %s", e.Type, e.AggregateType, e.AggregateID, l.Error))
			}
		}
		return s, nil
	}
}

// effectOf describes an act on n letters, or on too many to count them for a form.
func effectOf(a deadAsked, action string, n int64, few bool) []string {
	some := func(what string) string {
		if !few {
			return "all " + what + "s that match (too many to count here)"
		}
		return words.Of(n, what)
	}
	switch {
	case action == deadletter.Retry && a.Source == deadletter.Outbox:
		return []string{"Puts " + some("message") + " back into the outbox, behind all others. A relay publishes them.",
			"A message that fails again returns here under a new id."}
	case action == deadletter.Retry:
		return []string{"Applies the dead letters of " + some("aggregate") + ", each in the order of the stream, until one fails again.",
			"The consumer resumes an aggregate when none of its letters is left."}
	case a.Source == deadletter.Outbox:
		return []string{"Deletes " + some("message") + ". No copy remains, and no consumer ever sees the deleted messages.",
			"This cannot be undone."}
	}
	return []string{"Deletes " + some("dead letter") +
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
		o, err := c.desk.Start(ctx, letters.Operation{ID: d.Act.ActID.String(), Source: a.Source, TenantID: a.TenantID, Action: action,
			Filter: a.Filter, Actor: d.actor(), Reason: d.Act.Reason})
		if err != nil {
			return "", err
		}
		o, err = c.desk.Work(ctx, o.Source, o.ID, func(o letters.Operation) { d.progress(o.Seen, o.Total) })
		if err != nil { // the operation is stored, and Run continues it
			c.log.WarnContext(ctx, "operation on dead letters interrupted, a process will continue it",
				"operation", d.Act.ActID, "err", err)
			return "", errContinues
		}
		if o.Failed > 0 {
			return "", failure(outcomeOf(o))
		}
		return outcomeOf(o), nil
	}
}

// completeAct records the outcome of an act that another process began and this one completed.
func (c *Console) completeAct(o letters.Operation) {
	id, err := uuid.Parse(o.ID)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), pageTimeout)
	defer cancel()
	if err := audit.Finish(ctx, c.deps.Truth, id, outcomeOf(o), o.Failed > 0); err != nil {
		c.log.ErrorContext(ctx, "outcome of an act not recorded", "act_id", id, "err", err, "runbook", "ConsoleFails")
	}
}

// outcomeOf returns the sentence for the audit log.
func outcomeOf(o letters.Operation) string {
	did, what := "Retried", "dead letters"
	if o.Action == deadletter.Discard {
		did = "Discarded"
	}
	if o.Done == 1 {
		what = "dead letter"
	}
	says := fmt.Sprintf("%s %s %s.", did, num(o.Done), what)
	if o.Failed > 0 {
		says = fmt.Sprintf("%s %s %s, %s failed. The last error: %s", did, num(o.Done), what, num(o.Failed), o.LastError)
	}
	if o.StoppedBy != "" {
		says += " " + o.StoppedBy + " stopped it early."
	}
	return says
}

func (c *Console) prepareDeadStop(ctx context.Context, v *view, in url.Values) (subject, error) {
	if _, err := uuid.Parse(in.Get("operation")); err != nil {
		return subject{}, errNotFound
	}
	o, err := c.desk.Get(ctx, v.who.TenantID, in.Get("source"), in.Get("operation"))
	if errors.Is(err, letters.ErrNotFound) {
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
	if errors.Is(err, letters.ErrFinished) {
		return "The operation had ended already.", nil
	}
	if err != nil {
		return "", err
	}
	o, err := c.desk.Get(ctx, d.Who.TenantID, d.In.Get("source"), d.In.Get("operation"))
	return fmt.Sprintf("Stopped it after %s of %s.", num(o.Seen), num(o.Total)), err
}

func (c *Console) prepareDeadNote(ctx context.Context, v *view, in url.Values) (subject, error) {
	a, err := readAsked(v.who, in)
	if err != nil || a.Group == "" {
		return subject{}, errors.Join(err, errNotFound)
	}
	g, err := c.desk.Group(ctx, a.TenantID, a.Source, a.Group)
	if err != nil || g == nil {
		return subject{}, errors.Join(err, errNotFound)
	}
	s := subject{Target: a.says(g), Tenant: a.TenantID, Back: a.back(), Says: []string{"Everybody who sees the group reads the note."}}
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
	err = c.desk.SetNote(ctx, a.TenantID, a.Group, d.In.Get("note"), d.actor())
	if errors.Is(err, letters.ErrNote) {
		return "", &inputError{"A note has at most 2,000 bytes."}
	}
	if strings.TrimSpace(d.In.Get("note")) == "" {
		return "Deleted the note.", err
	}
	return "Wrote the note.", err
}
