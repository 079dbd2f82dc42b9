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
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
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

// truth connects to the truth's database, of which the outbox must be there. name is the
// application name of the connections.
func (p Process) truth(ctx context.Context, data, name string) (*pgxpool.Pool, error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return nil, err
	}
	pool, err := postgres.Open(ctx, s.DatabaseURL, s.Postgres, postgres.RoleSystem, name)
	if err != nil {
		return nil, err
	}
	if err := migrations.Check(ctx, pool, migrations.Outbox); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

func (p Process) outboxListCommand() *cobra.Command {
	var (
		data        string
		f           outbox.WaitingFilter
		limit       int
		all, asJSON bool
	)
	c := &cobra.Command{
		Use:   "list",
		Short: "List the pending messages by id",
		Args:  exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			if all && c.Flags().Changed("limit") {
				return &usageError{errors.New("--limit and --all exclude each other")}
			}
			if limit < 1 {
				return &usageError{errors.New("--limit must be a positive number")}
			}
			if c.Flags().Changed("aggregate-id") {
				if err := checkID("--aggregate-id", f.AggregateID); err != nil {
					return err
				}
			}
			pool, err := p.truth(c.Context(), data, "outbox")
			if err != nil {
				return err
			}
			defer pool.Close()
			most := limit + 1
			if all {
				most = -1
			}
			header := []string{"ID", "EVENT", "TENANT", "AGGREGATE", "TYPE", "ATTEMPTS", "DUE IN", "BEHIND", "LAST ERROR"}
			return printAll(p, outbox.ListWaiting(c.Context(), pool, f, most), most-1, asJSON, header, waitingMessageOf,
				func(m outbox.WaitingMessage) []string {
					return []string{fmt.Sprint(m.OutboxID), m.ID, fmt.Sprint(m.TenantID), aggregate(m.AggregateType, m.AggregateID),
						cell(m.Type), fmt.Sprint(m.Attempts), dueIn(m.DueIn), behind(m.Behind), cell(m.LastError)}
				})
		},
	}
	c.Flags().Int64Var(&f.TenantID, "tenant", 0, "only of this tenant")
	c.Flags().StringVar(&f.AggregateType, "aggregate-type", "", "only of this aggregate type")
	c.Flags().StringVar((*string)(&f.AggregateID), "aggregate-id", "", "only of the aggregates with this id")
	c.Flags().StringVar(&f.EventType, "type", "", "only of this event type")
	c.Flags().IntVar(&limit, "limit", 50, "at most this many messages, lowest ids first")
	c.Flags().BoolVar(&all, "all", false, "no limit")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON objects, one per message and line")
	dataFlag(c, &data)
	return c
}

func (p Process) outboxShowCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "show ID",
		Short: "Show a pending message with its payload",
		Args:  exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			id, err := event.ParseNumber(args[0])
			if err != nil {
				return &usageError{err}
			}
			pool, err := p.truth(c.Context(), data, "outbox")
			if err != nil {
				return err
			}
			defer pool.Close()
			m, err := outbox.GetWaiting(c.Context(), pool, int64(id))
			if err != nil {
				return explainWaiting(int64(id), err)
			}
			if asJSON {
				return p.writeJSON(waitingMessageOf(m))
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
				[]string{"DUE", when(m.AvailableAt)},
				[]string{"DUE IN", dueIn(m.DueIn)},
				[]string{"BEHIND", behind(m.Behind)},
				[]string{"LAST ERROR", cell(m.LastError)},
				[]string{"TRACE", cell(m.TraceParent)},
				[]string{"OCCURRED", when(m.OccurredAt)},
				[]string{"INSERTED", when(m.InsertedAt)},
				[]string{"PAYLOAD", string(m.Payload)},
			)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
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

// actWaiting calls fn for each id, and continues after an error of fn. It returns all errors.
func (p Process) actWaiting(ctx context.Context, data string, args []string, actor *string, sure *asking,
	fn func(pool *pgxpool.Pool, id int64) error) error {
	var ids []int64
	for _, a := range args {
		id, err := event.ParseNumber(a)
		if err != nil {
			return &usageError{err}
		}
		ids = append(ids, int64(id))
	}
	if err := setActor(actor); err != nil {
		return err
	}
	pool, err := p.truth(ctx, data, "outbox")
	if err != nil {
		return err
	}
	defer pool.Close()
	if sure != nil {
		if err := sure.ask(func(w io.Writer) error { return showWaiting(ctx, w, pool, ids) }); err != nil {
			return err
		}
	}
	var errs []error
	for _, id := range ids {
		errs = append(errs, fn(pool, id))
	}
	return errors.Join(errs...)
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

func (p Process) outboxRetryCommand() *cobra.Command {
	var data, actor, reason string
	c := &cobra.Command{
		Use:   "retry ID...",
		Short: "Retry pending messages now, and those that wait for them",
		Args:  rangeArgs(1, math.MaxInt),
		RunE: func(c *cobra.Command, args []string) error {
			return p.actWaiting(c.Context(), data, args, &actor, nil, func(pool *pgxpool.Pool, id int64) error {
				err := outbox.RetryWaiting(c.Context(), pool, id, actor, reason)
				if errors.Is(err, outbox.ErrDue) {
					_, err := fmt.Fprintf(p.Stdout, "Message %d was already due.\n", id)
					return err
				}
				if err != nil {
					return explainWaiting(id, err)
				}
				_, err = fmt.Fprintf(p.Stdout, "Message %d is due now. The relay tries it within seconds.\n", id)
				return err
			})
		},
	}
	addActor(c, &actor, &reason)
	dataFlag(c, &data)
	return c
}

func (p Process) outboxKillCommand() *cobra.Command {
	var data, actor, reason string
	var sure *asking
	c := &cobra.Command{
		Use:   "kill ID... --reason REASON",
		Short: "Move pending messages to the DLQ, and unblock those that wait for them",
		Long: `Kill moves waiting messages to the DLQ, like the relay after more than 10 attempts. The relay then
publishes the messages that wait for them. Kill refuses a due message, because a relay may be
publishing it.`,
		Args: rangeArgs(1, math.MaxInt),
		RunE: func(c *cobra.Command, args []string) error {
			if reason == "" {
				return &usageError{errors.New("outbox kill needs --reason, which Tidings keeps with the message")}
			}
			return p.actWaiting(c.Context(), data, args, &actor, sure, func(pool *pgxpool.Pool, id int64) error {
				if err := outbox.KillWaiting(c.Context(), pool, id, actor, reason); err != nil {
					return explainWaiting(id, err)
				}
				_, err := fmt.Fprintf(p.Stdout, "Message %d is in the DLQ: `tidings dlq outbox show %d`.\n", id, id)
				return err
			})
		},
	}
	addActor(c, &actor, &reason)
	sure = p.destructive(c)
	dataFlag(c, &data)
	return c
}
