package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// dlqFlags are the flags of `tidings dlq outbox`.
type dlqFlags struct {
	data          string
	filter        outbox.DLQFilter
	since, until  string
	limit         int
	all, dryRun   bool
	sure          *asking
	actor, reason string
	asJSON        bool
}

// deadMessage is a line of `tidings dlq outbox list --json`, and with its payload the output of
// show.
type deadMessage struct {
	ID            int64           `json:"id,string"`
	EventID       string          `json:"event_id"`
	TenantID      int64           `json:"tenant_id,string"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   int64           `json:"aggregate_id,string"`
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

func deadMessageOf(m outbox.DLQMessage) deadMessage {
	return deadMessage{
		ID: m.OutboxID, EventID: m.ID, TenantID: m.TenantID, AggregateType: m.AggregateType, AggregateID: m.AggregateID, EventType: m.Type,
		EventVersion: m.Version, Attempts: m.Attempts, LastError: m.LastError, TraceParent: m.TraceParent,
		OccurredAt: event.Time{Time: m.OccurredAt},
		InsertedAt: event.Time{Time: m.InsertedAt}, DeadAt: event.Time{Time: m.DeadAt}, Payload: m.Payload,
	}
}

// dlqAction is a line of the output of retry and discard with --json.
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
	AggregateID   int64       `json:"aggregate_id,string"`
	EventType     string      `json:"event_type"`
}

func (p Process) dlqCommand() *cobra.Command {
	c := &cobra.Command{Use: "dlq", Short: "Show, retry and discard dead letters"}
	o := &cobra.Command{Use: "outbox", Short: "Dead letters of the outbox: events that could not be published"}
	o.AddCommand(p.dlqListCommand(), p.dlqShowCommand(), p.dlqActCommand(outbox.DLQRetry), p.dlqActCommand(outbox.DLQDiscard))
	c.AddCommand(o, p.dlqConsumerCommand())
	return c
}

func (f *dlqFlags) add(c *cobra.Command, limit int) {
	c.Flags().Int64Var(&f.filter.TenantID, "tenant", 0, "only of this tenant")
	c.Flags().StringVar(&f.filter.AggregateType, "aggregate-type", "", "only of this aggregate type")
	c.Flags().Int64Var(&f.filter.AggregateID, "aggregate-id", 0, "only of the aggregates with this id")
	c.Flags().StringVar(&f.filter.EventType, "type", "", "only of this event type")
	c.Flags().StringVar(&f.since, "since", "", "only dead letters since then: a duration ago such as 24h, a date, or a time in RFC 3339")
	c.Flags().StringVar(&f.until, "until", "", "only dead letters from before then, in the same forms")
	c.Flags().IntVar(&f.limit, "limit", limit, "at most this many messages, lowest ids first")
	c.Flags().BoolVar(&f.all, "all", false, "no limit; without a filter, the whole DLQ")
	f.addOutput(c)
}

func (f *dlqFlags) addOutput(c *cobra.Command) {
	c.Flags().BoolVar(&f.asJSON, "json", false, "print JSON objects, one per message and line")
	dataFlag(c, &f.data)
}

// addAct adds the flags of the commands that change something.
func (f *dlqFlags) addAct(c *cobra.Command) {
	c.Flags().BoolVar(&f.dryRun, "dry-run", false, "show what the command would do, and change nothing")
	addActor(c, &f.actor, &f.reason)
}

// askDiscard asks whether to discard n messages.
func (f *dlqFlags) askDiscard(n int64) error {
	if n == 0 || f.dryRun {
		return nil
	}
	them := "them"
	if n == 1 {
		them = "it"
	}
	return f.sure.ask(textLines(messages(n)+" to discard.", payloads(n)+" deleted permanently; --dry-run lists "+them+"."))
}

func addActor(c *cobra.Command, actor, reason *string) {
	c.Flags().StringVar(actor, "actor", "", "the actor to record (default: the user of this system)")
	c.Flags().StringVar(reason, "reason", "", "the reason to record")
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
func (f *dlqFlags) parse(c *cobra.Command, args []string, now time.Time) error {
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
	if f.all && c.Flags().Changed("limit") {
		return &usageError{errors.New("--limit and --all exclude each other")}
	}
	if f.limit < 1 {
		return &usageError{errors.New("--limit must be a positive number")}
	}
	for _, a := range args {
		id, err := event.ParseID(a)
		if err != nil {
			return &usageError{err}
		}
		if !slices.Contains(f.filter.IDs, int64(id)) {
			f.filter.IDs = append(f.filter.IDs, int64(id))
		}
	}
	return nil
}

// filtered reports whether a flag other than ids selects messages.
func (f *dlqFlags) filtered() bool {
	g := f.filter
	return g.TenantID != 0 || g.AggregateType != "" || g.AggregateID != 0 || g.EventType != "" ||
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

// dlq connects to the truth. The relay finds a retried message by polling.
func (p Process) dlq(ctx context.Context, data string) (_ *outbox.DLQ, closeDLQ func(), err error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return nil, nil, err
	}
	pool, err := postgres.Open(ctx, s.DatabaseURL, s.Postgres, postgres.RoleSystem, "dlq")
	if err != nil {
		return nil, nil, err
	}
	if err := migrations.Check(ctx, pool, migrations.Truth); err != nil {
		pool.Close()
		return nil, nil, err
	}
	return outbox.NewDLQ(pool, nil), pool.Close, nil
}

func (p Process) dlqListCommand() *cobra.Command {
	var f dlqFlags
	c := &cobra.Command{
		Use:   "list",
		Short: "List the dead letters by id",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := f.parse(c, nil, time.Now()); err != nil {
				return err
			}
			d, closeDLQ, err := p.dlq(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer closeDLQ()
			return p.listDLQ(c.Context(), d, f)
		},
	}
	f.add(c, 50)
	return c
}

func (p Process) listDLQ(ctx context.Context, d *outbox.DLQ, f dlqFlags) error {
	header := []string{"ID", "TENANT", "AGGREGATE", "TYPE", "ATTEMPTS", "DEAD SINCE", "ERROR"}
	for n := 0; f.all || n < f.limit; {
		ask := outbox.MaxDLQBatch
		if !f.all {
			ask = min(ask, f.limit-n)
		}
		page, err := d.List(ctx, f.filter, ask)
		if err != nil {
			return err
		}
		n += len(page)
		rows := [][]string{header}
		for _, m := range page {
			if f.asJSON {
				if err := p.writeJSON(deadMessageOf(m)); err != nil {
					return err
				}
				continue
			}
			rows = append(rows, []string{fmt.Sprint(m.OutboxID), fmt.Sprint(m.TenantID),
				aggregate(m.AggregateType, m.AggregateID), cell(m.Type),
				fmt.Sprint(m.Attempts), m.DeadAt.UTC().Format(time.RFC3339), cell(m.LastError)})
		}
		if !f.asJSON && (len(page) > 0 || n == 0) {
			if err := p.table(rows...); err != nil {
				return err
			}
		}
		if len(page) < ask {
			return nil
		}
		f.filter.After = page[len(page)-1].OutboxID
	}
	if more, err := d.List(ctx, f.filter, 1); err != nil || len(more) == 0 {
		return err
	}
	fmt.Fprintln(p.Stderr, "There are more: use --limit N or --all.")
	return nil
}

func (p Process) dlqShowCommand() *cobra.Command {
	var f dlqFlags
	c := &cobra.Command{
		Use:   "show ID",
		Short: "Show a dead letter with its payload",
		Args:  exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			id, err := event.ParseID(args[0])
			if err != nil {
				return &usageError{err}
			}
			d, closeDLQ, err := p.dlq(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer closeDLQ()
			m, err := d.Get(c.Context(), 0, int64(id))
			if errors.Is(err, outbox.ErrNotInDLQ) {
				return fmt.Errorf("message %d is not in the DLQ", id)
			}
			if err != nil {
				return err
			}
			if f.asJSON {
				return p.writeJSON(deadMessageOf(m))
			}
			when := func(t time.Time) string { return t.UTC().Format(event.TimeFormat) }
			return p.table(
				[]string{"ID", fmt.Sprint(m.OutboxID)},
				[]string{"EVENT", m.ID},
				[]string{"TENANT", fmt.Sprint(m.TenantID)},
				[]string{"AGGREGATE", aggregate(m.AggregateType, m.AggregateID)},
				[]string{"TYPE", cell(m.Type)},
				[]string{"VERSION", fmt.Sprint(m.Version)},
				[]string{"ATTEMPTS", fmt.Sprint(m.Attempts)},
				[]string{"ERROR", cell(m.LastError)},
				[]string{"TRACE", cell(m.TraceParent)},
				[]string{"OCCURRED", when(m.OccurredAt)},
				[]string{"INSERTED", when(m.InsertedAt)},
				[]string{"DEAD SINCE", when(m.DeadAt)},
				[]string{"PAYLOAD", string(m.Payload)},
			)
		},
	}
	f.addOutput(c)
	return c
}

// verb has the words with which a command describes its action.
type verb struct{ short, will, did string }

func verbOf(action string) verb {
	if action == outbox.DLQRetry {
		return verb{"Put dead letters back into the outbox, with new ids", "retry", "Retried"}
	}
	return verb{"Delete dead letters with their payloads", "discard", "Discarded"}
}

// chosen is the help about the choice of dead letters.
const chosen = "Give ids, a filter, or --all. Ids exclude filters and --all."

func (p Process) dlqActCommand(action string) *cobra.Command {
	var f dlqFlags
	v := verbOf(action)
	c := &cobra.Command{
		Use:   action + " [ID...]",
		Short: v.short,
		Long:  chosen,
		RunE: func(c *cobra.Command, args []string) error {
			if err := f.parse(c, args, time.Now()); err != nil {
				return err
			}
			if len(args) == 0 && !f.filtered() && !f.all {
				return &usageError{fmt.Errorf("dlq outbox %s needs ids, a filter, or --all", action)}
			}
			if len(args) > 0 && (f.filtered() || f.all) {
				return &usageError{fmt.Errorf("dlq outbox %s takes ids or a filter, not both", action)}
			}
			if err := setActor(&f.actor); err != nil {
				return err
			}
			d, closeDLQ, err := p.dlq(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer closeDLQ()
			return p.actDLQ(c.Context(), d, action, f)
		},
	}
	f.add(c, outbox.MaxDLQBatch)
	f.addAct(c)
	if action == outbox.DLQDiscard {
		f.sure = p.destructive(c)
	}
	return c
}

// actDLQ handles the messages in batches, one transaction each. It handles at most as many messages
// as matched at its start.
func (p Process) actDLQ(ctx context.Context, d *outbox.DLQ, action string, f dlqFlags) error {
	v := verbOf(action)
	matching, err := d.Count(ctx, f.filter)
	if err != nil {
		return err
	}
	want := matching
	if !f.all && len(f.filter.IDs) == 0 {
		want = min(want, int64(f.limit))
	}
	do := d.Retry
	if action == outbox.DLQDiscard {
		do = d.Discard
		if err := f.askDiscard(want); err != nil {
			return err
		}
	}
	var did int64
	seen := make(map[int64]bool, len(f.filter.IDs)) // which of the given ids were in the DLQ
	for did < want {
		batch, err := do(ctx, outbox.DLQRequest{
			DLQFilter: f.filter, Limit: int(min(want-did, outbox.MaxDLQBatch)), Actor: f.actor, Reason: f.reason, DryRun: f.dryRun,
		})
		if err != nil {
			return errors.Join(err, p.say(v, f, did, matching))
		}
		if len(batch) == 0 {
			break // another operator handled the rest
		}
		if err := p.printActions(f, did == 0, batch); err != nil {
			return err
		}
		for _, a := range batch {
			if len(f.filter.IDs) > 0 {
				seen[a.DLQID] = true
			}
		}
		did += int64(len(batch))
		f.filter.After = batch[len(batch)-1].DLQID
	}
	if err := p.say(v, f, did, matching); err != nil {
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

// say prints the summary.
func (p Process) say(v verb, f dlqFlags, did, matching int64) error {
	line := fmt.Sprintf("%s %s.", v.did, messages(did))
	if f.dryRun {
		line = fmt.Sprintf("Dry run: would %s %s.", v.will, messages(did))
	}
	if more := matching - did; more > 0 && !f.all && len(f.filter.IDs) == 0 {
		line += fmt.Sprintf(" %s more match: use --limit N or --all.", count(more))
	}
	if _, err := fmt.Fprintln(p.Stderr, line); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

func (p Process) printActions(f dlqFlags, header bool, batch []outbox.DLQAction) error {
	var rows [][]string
	if header {
		rows = append(rows, []string{"ID", "NEW ID", "TENANT", "AGGREGATE", "TYPE", "EVENT"})
	}
	for _, a := range batch {
		if f.asJSON {
			line := dlqAction{
				Action: a.Action, DryRun: f.dryRun, Actor: a.Actor, Reason: a.Reason, ID: a.DLQID, NewID: a.NewID,
				EventID: a.EventID, TenantID: a.TenantID,
				AggregateType: a.AggregateType, AggregateID: a.AggregateID, EventType: a.EventType,
			}
			if !a.At.IsZero() {
				line.At = &event.Time{Time: a.At}
			}
			if err := p.writeJSON(line); err != nil {
				return err
			}
			continue
		}
		newID := "-"
		if a.NewID != 0 {
			newID = fmt.Sprint(a.NewID)
		}
		rows = append(rows, []string{fmt.Sprint(a.DLQID), newID, fmt.Sprint(a.TenantID), aggregate(a.AggregateType, a.AggregateID),
			cell(a.EventType), a.EventID})
	}
	if f.asJSON {
		return nil
	}
	return p.table(rows...)
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

func aggregate(typ string, id int64) string { return cell(typ) + "/" + strconv.FormatInt(id, 10) }

// cell makes any text safe for a table on a terminal. It quotes text with invisible or control
// characters, which dead letters may contain.
func cell(s string) string {
	plain := strings.IndexFunc(s, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) }) < 0
	if plain && strings.TrimSpace(s) == s {
		return s
	}
	return strconv.Quote(s)
}
