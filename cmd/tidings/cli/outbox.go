package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/outbox"
)

// waitingMessage is a line of `tidings outbox list --json`, and with its payload the output of
// show.
type waitingMessage struct {
	ID            int64           `json:"id,string"`
	EventID       string          `json:"event_id"`
	TenantID      int64           `json:"tenant_id,string"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   event.ID        `json:"aggregate_id"`
	EventType     string          `json:"event_type"`
	EventVersion  int             `json:"event_version"`
	Attempts      int             `json:"attempts"`
	LastError     string          `json:"last_error,omitempty"`
	Behind        int64           `json:"behind,omitempty,string"`
	AvailableAt   event.Time      `json:"available_at"`
	DueIn         float64         `json:"due_in_seconds"` // 0 when it is due
	TraceParent   string          `json:"traceparent,omitempty"`
	OccurredAt    event.Time      `json:"occurred_at"`
	InsertedAt    event.Time      `json:"inserted_at"`
	Payload       json.RawMessage `json:"payload,omitempty"`
}

func waitingMessageOf(m outbox.WaitingMessage) any {
	return waitingMessage{
		ID: m.OutboxID, EventID: m.ID, TenantID: m.TenantID, AggregateType: m.AggregateType, AggregateID: m.AggregateID, EventType: m.Type,
		EventVersion: m.Version, Attempts: m.Attempts, LastError: m.LastError, Behind: m.Behind,
		AvailableAt: event.Time{Time: m.AvailableAt}, DueIn: max(m.DueIn, 0).Seconds(),
		TraceParent: m.TraceParent, OccurredAt: event.Time{Time: m.OccurredAt},
		InsertedAt: event.Time{Time: m.InsertedAt}, Payload: m.Payload,
	}
}

// dueIn returns the time until a message is due.
func dueIn(d time.Duration) string {
	if d <= 0 {
		return "now"
	}
	return max(d.Round(time.Second), time.Second).String()
}

// behind returns the id of the message that a message waits for.
func behind(id int64) string {
	if id == 0 {
		return "-"
	}
	return fmt.Sprint(id)
}

func (p Process) outboxCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "outbox",
		Short: "Show, retry and kill pending messages of the outbox",
		Long: `A message of the outbox waits in three cases: after a failed publish, until the time that its writer
set, or for an earlier waiting message of its aggregate. After more than 10 attempts the relay moves
it to the DLQ (tidings dlq outbox).`,
	}
	c.AddCommand(p.outboxListCommand(), p.outboxShowCommand(), p.outboxRetryCommand(), p.outboxKillCommand())
	return c
}

func (p Process) outboxListCommand() *cobra.Command {
	var (
		f     outbox.WaitingFilter
		limit int
		all   bool
	)
	c := p.command(command{
		use: "list", short: "List the pending messages by id", name: "outbox", needs: needOutbox, json: onePer("message"),
		check: func(s *session, _ []string) error { return s.checkList(limit, all, f.AggregateID) },
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			most := limit + 1
			if all {
				most = -1
			}
			header := []string{"ID", "EVENT", "TENANT", "AGGREGATE", "TYPE", "ATTEMPTS", "DUE IN", "BEHIND", "LAST ERROR"}
			return nil, printAll(s, outbox.ListWaiting(ctx, s.Truth, f, most), most-1, header, waitingMessageOf,
				func(m outbox.WaitingMessage) []string {
					return []string{fmt.Sprint(m.OutboxID), m.ID, fmt.Sprint(m.TenantID), aggregate(m.AggregateType, m.AggregateID),
						cell(m.Type), fmt.Sprint(m.Attempts), dueIn(m.DueIn), behind(m.Behind), cell(m.LastError)}
				})
		},
	})
	c.Flags().Int64Var(&f.TenantID, "tenant", 0, "only of this tenant")
	c.Flags().StringVar(&f.AggregateType, "aggregate-type", "", "only of this aggregate type")
	c.Flags().StringVar((*string)(&f.AggregateID), "aggregate-id", "", "only of the aggregates with this id")
	c.Flags().StringVar(&f.EventType, "type", "", "only of this event type")
	c.Flags().IntVar(&limit, "limit", 50, "at most this many messages, lowest ids first")
	c.Flags().BoolVar(&all, "all", false, "no limit")
	return c
}

// checkList checks the flags of a list of messages.
func (s *session) checkList(limit int, all bool, aggregate event.ID) error {
	switch {
	case all && s.changed("limit"):
		return &usageError{errors.New("--limit and --all exclude each other")}
	case limit < 1:
		return &usageError{errors.New("--limit must be a positive number")}
	case s.changed("aggregate-id"): // also with an empty value, which would select more than was asked
		return checkID("--aggregate-id", aggregate)
	}
	return nil
}

// messageIDs reads the ids of messages.
func messageIDs(args []string) (ids []int64, err error) {
	for _, a := range args {
		id, err := event.ParseNumber(a)
		if err != nil {
			return nil, &usageError{err}
		}
		ids = append(ids, int64(id))
	}
	return ids, nil
}

func (p Process) outboxShowCommand() *cobra.Command {
	var ids []int64
	return p.command(command{
		use: "show ID", short: "Show a pending message with its payload", args: exactArgs(1), name: "outbox", needs: needOutbox,
		json: oneObject,
		check: func(_ *session, args []string) (err error) {
			ids, err = messageIDs(args)
			return err
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			m, err := outbox.GetWaiting(ctx, s.Truth, ids[0])
			if err != nil {
				return nil, explainWaiting(ids[0], err)
			}
			when := func(t time.Time) string { return t.UTC().Format(event.TimeFormat) }
			return reports(waitingMessageOf(m), rowsOf(
				[]string{"ID", fmt.Sprint(m.OutboxID)},
				[]string{"EVENT", m.ID},
				[]string{"TENANT", fmt.Sprint(m.TenantID)},
				[]string{"AGGREGATE", aggregate(m.AggregateType, m.AggregateID)},
				[]string{"TYPE", cell(m.Type)},
				[]string{"VERSION", fmt.Sprint(m.Version)},
				[]string{"ATTEMPTS", fmt.Sprint(m.Attempts)},
				[]string{"DUE", when(m.AvailableAt)},
				[]string{"DUE IN", dueIn(m.DueIn)},
				[]string{"BEHIND", behind(m.Behind)},
				[]string{"LAST ERROR", cell(m.LastError)},
				[]string{"TRACE", cell(m.TraceParent)},
				[]string{"OCCURRED", when(m.OccurredAt)},
				[]string{"INSERTED", when(m.InsertedAt)},
				[]string{"PAYLOAD", string(m.Payload)},
			)), nil
		},
	})
}

// explainWaiting explains to a person why the command could not act on a message.
func explainWaiting(id int64, err error) error {
	switch {
	case errors.Is(err, outbox.ErrNotWaiting):
		return fmt.Errorf("message %d is not waiting: `tidings events find --id %d` shows where it is", id, id)
	case errors.Is(err, outbox.ErrBehind):
		return fmt.Errorf("%w; retry or kill that one, and message %d follows", err, id)
	case errors.Is(err, outbox.ErrDue):
		return fmt.Errorf("message %d is due, and a relay may be publishing it. If the publish fails, repeat this command", id)
	}
	return err
}

// showWaiting shows the messages that the command would kill.
func showWaiting(ctx context.Context, w io.Writer, pool *pgxpool.Pool, ids []int64) error {
	rows := [][]string{{"ID", "EVENT", "TENANT", "AGGREGATE", "TYPE"}}
	for _, id := range ids {
		m, err := outbox.GetWaiting(ctx, pool, id)
		if errors.Is(err, outbox.ErrNotWaiting) {
			continue
		}
		if err != nil {
			return err
		}
		rows = append(rows, []string{fmt.Sprint(m.OutboxID), m.ID, fmt.Sprint(m.TenantID),
			aggregate(m.AggregateType, m.AggregateID), cell(m.Type)})
	}
	if len(rows) == 1 {
		return errNothingToDelete
	}
	fmt.Fprintln(w, "The command moves these messages to the DLQ. The relay then publishes the messages that wait for them:")
	return tableTo(w, rows...)
}

// waiting makes a command that calls act for each message that its arguments name, also after an
// error of act.
func (p Process) waiting(d command, ask func(ctx context.Context, s *session, ids []int64) error,
	act func(ctx context.Context, s *session, id int64) error) *cobra.Command {
	var ids []int64
	d.args, d.name, d.needs = rangeArgs(1, math.MaxInt), "outbox", needOutbox
	d.check = func(_ *session, args []string) (err error) {
		if d.destructive && *d.reason == "" {
			return &usageError{errors.New("outbox kill needs --reason, which Tidings keeps with the message")}
		}
		ids, err = messageIDs(args)
		return err
	}
	d.run = func(ctx context.Context, s *session, _ []string) (*report, error) {
		if err := ask(ctx, s, ids); err != nil {
			return nil, err
		}
		var errs []error
		for _, id := range ids {
			errs = append(errs, explainWaiting(id, act(ctx, s, id)))
		}
		return nil, errors.Join(errs...)
	}
	return p.command(d)
}

func (p Process) outboxRetryCommand() *cobra.Command {
	var actor, reason string
	return p.waiting(command{
		use: "retry ID...", short: "Retry pending messages now, and those that wait for them", actor: &actor, reason: &reason,
	}, func(context.Context, *session, []int64) error { return nil }, func(ctx context.Context, s *session, id int64) error {
		says := "Message %d is due now. The relay tries it within seconds.\n"
		err := outbox.RetryWaiting(ctx, s.Truth, id, actor, reason)
		if errors.Is(err, outbox.ErrDue) {
			says, err = "Message %d was already due.\n", nil
		}
		if err == nil {
			_, err = fmt.Fprintf(s.Stdout, says, id)
		}
		return err
	})
}

func (p Process) outboxKillCommand() *cobra.Command {
	var actor, reason string
	return p.waiting(command{
		use: "kill ID... --reason REASON", short: "Move pending messages to the DLQ, and unblock those that wait for them",
		long: `Kill moves waiting messages to the DLQ, like the relay after more than 10 attempts. The relay then
publishes the messages that wait for them. Kill refuses a due message, because a relay may be
publishing it.`,
		actor: &actor, reason: &reason, destructive: true,
	}, func(ctx context.Context, s *session, ids []int64) error {
		return s.ask(func(w io.Writer) error { return showWaiting(ctx, w, s.Truth, ids) })
	}, func(ctx context.Context, s *session, id int64) error {
		err := outbox.KillWaiting(ctx, s.Truth, id, actor, reason)
		if err == nil {
			_, err = fmt.Fprintf(s.Stdout, "Message %d is in the DLQ: `tidings dlq outbox show %d`.\n", id, id)
		}
		return err
	})
}
