package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// dlqFlags are the flags of `tidings dlq`.
type dlqFlags struct {
	filter        deadletter.Filter
	since, until  string
	limit         int
	all, dryRun   bool
	actor, reason string
}

// deadMessage is a line of `tidings dlq outbox list --json`, and with its payload the output of
// show.
type deadMessage struct {
	ID            int64           `json:"id,string"`
	EventID       string          `json:"event_id"`
	TenantID      int64           `json:"tenant_id,string"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   event.ID        `json:"aggregate_id"`
	EventType     string          `json:"event_type"`
	EventVersion  int             `json:"event_version"`
	Attempts      int             `json:"attempts"`
	LastError     string          `json:"last_error"`
	TraceParent   string          `json:"traceparent,omitempty"`
	OccurredAt    event.Time      `json:"occurred_at"`
	InsertedAt    event.Time      `json:"inserted_at"`
	DeadAt        event.Time      `json:"dead_at"`
	Payload       json.RawMessage `json:"payload,omitempty"`
}

func deadMessageOf(l deadletter.Letter) any {
	e := l.Event
	return deadMessage{
		ID: l.ID, EventID: e.ID, TenantID: e.TenantID, AggregateType: e.AggregateType, AggregateID: e.AggregateID, EventType: e.Type,
		EventVersion: e.Version, Attempts: l.Attempts, LastError: l.Error, TraceParent: e.TraceParent,
		OccurredAt: event.Time{Time: e.OccurredAt}, InsertedAt: event.Time{Time: l.InsertedAt}, DeadAt: event.Time{Time: l.DeadAt},
		Payload: e.Payload,
	}
}

// dlqAction is a line of the output of `tidings dlq outbox retry` and discard with --json.
type dlqAction struct {
	Action        string      `json:"action"`
	DryRun        bool        `json:"dry_run"`
	At            *event.Time `json:"at,omitempty"`
	Actor         string      `json:"actor"`
	Reason        string      `json:"reason,omitempty"`
	ID            int64       `json:"id,string"`
	NewID         int64       `json:"new_id,omitempty,string"`
	EventID       string      `json:"event_id"`
	TenantID      int64       `json:"tenant_id,string"`
	AggregateType string      `json:"aggregate_type"`
	AggregateID   event.ID    `json:"aggregate_id"`
	EventType     string      `json:"event_type"`
}

// letterSource has what differs between the commands for the two sources of dead letters.
type letterSource struct {
	name, short, list, show string
	columns, facts          []string // what list and show print
	gone                    string   // there is no such letter
	line                    func(deadletter.Letter) any
	verbs                   map[string]verb
	needs                   needs
	open                    func(ctx context.Context, s *session) (*letterDesk, error)
}

// verb has the words with which a command describes its action.
type verb struct{ short, long, will, did string }

// letterDesk is a source that a command has opened.
type letterDesk struct {
	*deadletter.Reader
	act func(ctx context.Context, action string, v verb, f dlqFlags) error
}

// chosen is the help about the choice of dead letters.
const chosen = "Give ids, or a filter, or --all: only one of them."

// chosenFirst is that of the dead letters of consumers.
const chosenFirst = `

An ID names the first dead letter of an aggregate (list --first). A filter also selects only first
dead letters. ` + chosen

func (p Process) dlqCommand() *cobra.Command {
	c := &cobra.Command{Use: "dlq", Short: "Show, retry and discard dead letters"}
	for _, s := range []letterSource{{
		name: "outbox", short: "Dead letters of the outbox: events that could not be published",
		list: "List the dead letters by id", show: "Show a dead letter with its payload", gone: "message %d is not in the DLQ",
		columns: []string{"ID", "TENANT", "AGGREGATE", "TYPE", "ATTEMPTS", "DEAD SINCE", "ERROR"},
		facts: []string{"ID", "EVENT", "TENANT", "AGGREGATE", "TYPE", "VERSION", "ATTEMPTS", "ERROR", "TRACE", "OCCURRED", "INSERTED",
			"DEAD SINCE", "PAYLOAD"},
		line: deadMessageOf, needs: needOutbox, open: outboxLetters, verbs: map[string]verb{
			deadletter.Retry:   {"Put dead letters back into the outbox, with new ids", chosen, "retry", "Retried"},
			deadletter.Discard: {"Delete dead letters with their payloads", chosen, "discard", "Discarded"},
		},
	}, {
		name:  "consumer",
		short: "Dead letters of consumers: events that a consumer could not apply, and the later events of their aggregates",
		list:  "List the dead letters by id: within an aggregate, in the order of the stream",
		show:  "Show a dead letter with its headers and payload", gone: "there is no dead letter %d",
		columns: []string{"ID", "FIRST", "CONSUMER", "TENANT", "AGGREGATE", "TYPE", "DEAD SINCE", "ERROR"},
		facts: []string{"ID", "CONSUMER", "EVENT", "TENANT", "AGGREGATE", "FIRST", "TYPE", "VERSION", "STREAM", "ERROR", "DEAD SINCE",
			"HEADERS", "PAYLOAD"},
		line: deadLetterOf, needs: needProjections, open: consumerLetters, verbs: map[string]verb{
			deadletter.Retry: {"Apply dead letters again, in stream order per aggregate, until one fails",
				"Retry applies dead letters again. Within an aggregate it keeps the order of the stream, and stops\nat the first failure." +
					chosenFirst, "apply", "Applied"},
			deadletter.Discard: {"Delete the first dead letter of an aggregate: the next one takes its place",
				"Discard deletes dead letters. Then the next dead letter of the aggregate becomes its first one." + chosenFirst,
				"discard", "Discarded"},
		},
	}} {
		of := &cobra.Command{Use: s.name, Short: s.short}
		of.AddCommand(p.dlqListCommand(s), p.dlqShowCommand(s), p.dlqActCommand(s, deadletter.Retry),
			p.dlqActCommand(s, deadletter.Discard))
		c.AddCommand(of)
	}
	return c
}

// outboxLetters opens the outbox's letters. The relay finds a retried message by polling.
func outboxLetters(_ context.Context, s *session) (*letterDesk, error) {
	d := outbox.NewDLQ(s.Truth, nil)
	return &letterDesk{&d.Reader, func(ctx context.Context, action string, v verb, f dlqFlags) error {
		return s.actDLQ(ctx, d, action, v, f)
	}}, nil
}

func (f *dlqFlags) add(c *cobra.Command, s letterSource, limit int) {
	c.Flags().Int64Var(&f.filter.TenantID, "tenant", 0, "only of this tenant")
	c.Flags().StringVar(&f.filter.AggregateType, "aggregate-type", "", "only of this aggregate type")
	c.Flags().StringVar((*string)(&f.filter.AggregateID), "aggregate-id", "", "only of the aggregates with this id")
	c.Flags().StringVar(&f.filter.EventType, "type", "", "only of this event type")
	c.Flags().StringVar(&f.since, "since", "", "only dead letters since then: a duration ago such as 24h, a date, or a time in RFC 3339")
	c.Flags().StringVar(&f.until, "until", "", "only dead letters from before then, in the same forms")
	c.Flags().IntVar(&f.limit, "limit", limit, "at most this many messages, lowest ids first")
	c.Flags().BoolVar(&f.all, "all", false, "no limit; without a filter, the whole DLQ")
	if s.name == "consumer" {
		c.Flags().StringVar(&f.filter.Consumer, "consumer", "", "only of this consumer")
	}
}

// askDiscard asks whether to discard n messages.
func (s *session) askDiscard(n int64) error {
	if n == 0 {
		return nil
	}
	them := "them"
	if n == 1 {
		them = "it"
	}
	return s.ask(textLines(messages(n)+" to discard.", payloads(n)+" deleted permanently; --dry-run lists "+them+"."))
}

// setActor sets an empty actor to the user of this system.
func setActor(actor *string) error {
	if *actor == "" {
		*actor = osUser()
	}
	if !store.ValidActor(*actor) {
		return &usageError{fmt.Errorf("--actor must be 1 to %d bytes of printable UTF-8", store.MaxActorBytes)}
	}
	return nil
}

// parse reads and checks the values that package pflag cannot. args are ids.
func (f *dlqFlags) parse(s *session, args []string) error {
	now := time.Now()
	for _, flag := range []struct {
		name, value string
		to          *time.Time
	}{{"--until", f.until, &f.filter.DeadBefore}, {"--since", f.since, &f.filter.DeadAfter}} {
		if flag.value == "" {
			continue
		}
		t, err := parseAge(flag.value, now)
		if err != nil {
			return &usageError{fmt.Errorf("%s: %w", flag.name, err)}
		}
		*flag.to = t
	}
	if err := s.checkList(f.limit, f.all, f.filter.AggregateID); err != nil {
		return err
	}
	ids, err := messageIDs(args)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if !slices.Contains(f.filter.IDs, id) {
			f.filter.IDs = append(f.filter.IDs, id)
		}
	}
	return checkConsumer("--consumer", f.filter.Consumer, true)
}

// most returns the limit of a list that also shows whether more letters match.
func (f *dlqFlags) most() int {
	if f.all {
		return -1
	}
	return f.limit + 1
}

// filtered reports whether a flag other than ids selects messages.
func (f *dlqFlags) filtered() bool {
	g := f.filter
	return g.TenantID != 0 || g.Consumer != "" || g.AggregateType != "" || g.AggregateID != "" || g.EventType != "" ||
		!g.DeadBefore.IsZero() || !g.DeadAfter.IsZero()
}

// parseAge reads a duration before now, a date (midnight UTC at its beginning), or a time.
func parseAge(s string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d).UTC(), nil
	}
	if t, err := time.Parse(time.DateOnly, s); err == nil {
		return t, nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return t, fmt.Errorf("%q is not a duration (24h), a date (2030-01-31) or a time (2030-01-31T12:00:00Z)", s)
	}
	return t.UTC(), nil
}

// tableRows is the limit of the rows of one table: a longer list is several tables.
const tableRows = 500

// printAll prints up to limit elements, as JSON lines or in tables, and says whether there are
// more. A negative limit is no limit.
func printAll[T any](s *session, all iter.Seq2[T, error], limit int, header []string, line func(T) any, row func(T) []string) error {
	rows := [][]string{header}
	n, more := 0, false
	for v, err := range all {
		if err != nil {
			return err
		}
		if more = n == limit; more {
			break
		}
		n++
		if s.asJSON {
			if err := s.writeJSON(line(v)); err != nil {
				return err
			}
			continue
		}
		if rows = append(rows, row(v)); len(rows) > tableRows {
			if err := s.table(rows...); err != nil {
				return err
			}
			rows = rows[:1]
		}
	}
	if !s.asJSON && (len(rows) > 1 || n == 0) {
		if err := s.table(rows...); err != nil {
			return err
		}
	}
	if more {
		fmt.Fprintln(s.Stderr, "There are more: use --limit N or --all.")
	}
	return nil
}

func (p Process) dlqListCommand(of letterSource) *cobra.Command {
	var f dlqFlags
	c := p.command(command{
		use: "list", short: of.list, name: "dlq", needs: of.needs, json: onePer("message"),
		check: func(s *session, _ []string) error { return f.parse(s, nil) },
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			d, err := of.open(ctx, s)
			if err != nil {
				return nil, err
			}
			return nil, printAll(s, d.List(ctx, f.filter, f.most()), f.most()-1, of.columns, of.line, func(l deadletter.Letter) []string {
				row := make([]string, len(of.columns))
				for i, name := range of.columns {
					row[i] = letterCell(l, name, false)
				}
				return row
			})
		},
	})
	f.add(c, of, 50)
	if of.name == "consumer" {
		c.Flags().BoolVar(&f.filter.First, "first", false, "only the first dead letter of each aggregate, which has the cause")
	}
	return c
}

// letterCell returns a part of a letter for the table of list, or for that of show.
func letterCell(l deadletter.Letter, name string, show bool) string {
	when := func(t time.Time) string { return t.UTC().Format(event.TimeFormat) }
	e := l.Event
	switch name {
	case "ID":
		return fmt.Sprint(l.ID)
	case "CONSUMER":
		return l.Consumer
	case "EVENT":
		return e.ID
	case "TENANT":
		return fmt.Sprint(e.TenantID)
	case "AGGREGATE":
		return aggregate(e.AggregateType, e.AggregateID)
	case "FIRST":
		if show {
			return fmt.Sprint(l.First)
		}
		return map[bool]string{true: "yes"}[l.First]
	case "TYPE":
		return cell(e.Type)
	case "VERSION":
		return fmt.Sprint(e.Version)
	case "STREAM":
		return fmt.Sprintf("%d in %s", e.Seq, e.Stream)
	case "ATTEMPTS":
		return fmt.Sprint(l.Attempts)
	case "ERROR":
		return cell(l.Error)
	case "TRACE":
		return cell(e.TraceParent)
	case "OCCURRED":
		return when(e.OccurredAt)
	case "INSERTED":
		return when(l.InsertedAt)
	case "DEAD SINCE":
		if show {
			return when(l.DeadAt)
		}
		return l.DeadAt.UTC().Format(time.RFC3339)
	case "HEADERS":
		headers, _ := json.Marshal(l.Headers) // text is always valid
		return string(headers)
	}
	if l.Source == deadletter.Outbox { // valid JSON
		return string(e.Payload)
	}
	return cell(string(e.Payload))
}

func (p Process) dlqShowCommand(of letterSource) *cobra.Command {
	var ids []int64
	return p.command(command{
		use: "show ID", short: of.show, args: exactArgs(1), name: "dlq", needs: of.needs, json: onePer("message"),
		check: func(_ *session, args []string) (err error) {
			ids, err = messageIDs(args)
			return err
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			d, err := of.open(ctx, s)
			if err != nil {
				return nil, err
			}
			l, err := d.Get(ctx, 0, ids[0])
			if errors.Is(err, deadletter.ErrNotFound) {
				return nil, fmt.Errorf(of.gone, ids[0])
			}
			if err != nil {
				return nil, err
			}
			var rows [][]string
			for _, name := range of.facts {
				rows = append(rows, []string{name, letterCell(l, name, true)})
			}
			return reports(of.line(l), rowsOf(rows...)), nil
		},
	})
}

func (p Process) dlqActCommand(of letterSource, action string) *cobra.Command {
	var f dlqFlags
	v := of.verbs[action]
	c := p.command(command{
		use: action + " [ID...]", short: v.short, long: v.long, args: cobra.ArbitraryArgs, name: "dlq", needs: of.needs,
		json: onePer("message"), actor: &f.actor, reason: &f.reason, dryRun: &f.dryRun, destructive: action == deadletter.Discard,
		check: func(s *session, args []string) error {
			if err := f.parse(s, args); err != nil {
				return err
			}
			if len(args) == 0 && !f.filtered() && !f.all {
				return &usageError{fmt.Errorf("dlq %s %s needs ids, a filter, or --all", of.name, action)}
			}
			if len(args) > 0 && (f.filtered() || f.all) {
				return &usageError{fmt.Errorf("dlq %s %s takes ids or a filter, not both", of.name, action)}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			d, err := of.open(ctx, s)
			if err != nil {
				return nil, err
			}
			return nil, d.act(ctx, action, v, f)
		},
	})
	f.add(c, of, deadletter.MaxBatch)
	return c
}

// actDLQ handles the messages in batches, one transaction each. It handles at most as many messages
// as matched at its start.
func (s *session) actDLQ(ctx context.Context, d *outbox.DLQ, action string, v verb, f dlqFlags) error {
	matching, err := d.Count(ctx, f.filter)
	if err != nil {
		return err
	}
	want := matching
	if !f.all && len(f.filter.IDs) == 0 {
		want = min(want, int64(f.limit))
	}
	do := d.Retry
	if action == deadletter.Discard {
		do = d.Discard
		if err := s.askDiscard(want); err != nil {
			return err
		}
	}
	var did int64
	seen := make(map[int64]bool, len(f.filter.IDs)) // which of the given ids were in the DLQ
	for did < want {
		batch, err := do(ctx, outbox.DLQRequest{
			DLQFilter: f.filter, Limit: int(min(want-did, deadletter.MaxBatch)), Actor: f.actor, Reason: f.reason, DryRun: f.dryRun,
		})
		if err != nil {
			return errors.Join(err, s.say(v, f, did, f.unmatched(matching-did)))
		}
		if len(batch) == 0 {
			break // another operator handled the rest
		}
		if err := s.printActions(f, did == 0, batch); err != nil {
			return err
		}
		for _, a := range batch {
			if len(f.filter.IDs) > 0 {
				seen[a.ID] = true
			}
		}
		did += int64(len(batch))
		f.filter.After = batch[len(batch)-1].ID
	}
	if err := s.say(v, f, did, f.unmatched(matching-did)); err != nil {
		return err
	}
	var missing []string
	for _, id := range f.filter.IDs {
		if !seen[id] {
			missing = append(missing, strconv.FormatInt(id, 10))
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("not in the DLQ: %s", strings.Join(missing, ", "))
	}
	return nil
}

// unmatched says that more messages match than the limit.
func (f *dlqFlags) unmatched(more int64) string {
	if more <= 0 || f.all || len(f.filter.IDs) > 0 {
		return ""
	}
	return fmt.Sprintf(" %s more match: use --limit N or --all.", count(more))
}

// say prints the summary.
func (s *session) say(v verb, f dlqFlags, did int64, more string) error {
	line := fmt.Sprintf("%s %s.", v.did, messages(did))
	if f.dryRun {
		line = fmt.Sprintf("Dry run: would %s %s.", v.will, messages(did))
	}
	if _, err := fmt.Fprintln(s.Stderr, line+more); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

func (s *session) printActions(f dlqFlags, header bool, batch []deadletter.Action) error {
	var rows [][]string
	if header {
		rows = append(rows, []string{"ID", "NEW ID", "TENANT", "AGGREGATE", "TYPE", "EVENT"})
	}
	for _, a := range batch {
		if s.asJSON {
			line := dlqAction{
				Action: a.Action, DryRun: f.dryRun, Actor: a.Actor, Reason: a.Reason, ID: a.ID, NewID: a.NewID,
				EventID: a.EventID, TenantID: a.TenantID,
				AggregateType: a.AggregateType, AggregateID: a.AggregateID, EventType: a.EventType,
			}
			if !a.At.IsZero() {
				line.At = &event.Time{Time: a.At}
			}
			if err := s.writeJSON(line); err != nil {
				return err
			}
			continue
		}
		newID := "-"
		if a.NewID != 0 {
			newID = fmt.Sprint(a.NewID)
		}
		rows = append(rows, []string{fmt.Sprint(a.ID), newID, fmt.Sprint(a.TenantID), aggregate(a.AggregateType, a.AggregateID),
			cell(a.EventType), a.EventID})
	}
	if s.asJSON {
		return nil
	}
	return s.table(rows...)
}

// osUser returns the name of the user who runs the command.
func osUser() string {
	if u, err := user.Current(); err == nil && u.Username != "" {
		return u.Username
	}
	return fmt.Sprintf("uid %d", os.Geteuid())
}

func messages(n int64) string { return words.Of(n, "message") }

func payloads(n int64) string {
	if n == 1 {
		return "Its payload is"
	}
	return "Their payloads are"
}

func aggregate(typ string, id event.ID) string { return cell(typ) + "/" + cell(string(id)) }

// cell makes any text safe for a table on a terminal. It quotes text with invisible or control
// characters, which dead letters may contain.
func cell(s string) string {
	plain := strings.IndexFunc(s, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) }) < 0
	if plain && strings.TrimSpace(s) == s {
		return s
	}
	return strconv.Quote(s)
}
