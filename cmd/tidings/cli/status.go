package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
)

func (p Process) statusCommand() *cobra.Command {
	var watch bool
	c := p.command(command{
		use:   "status",
		short: "Show lags, dead letters, partitions, leases and blocked sessions",
		long: `Status shows lags, dead letters, partitions, leases and blocked sessions. While a stream has no
leader, it retries for some seconds, as long as an election takes, and then shows the rest.

The exit code is 3 if something is missing or wrong: PostgreSQL or NATS is unavailable, another
session locks a table for 2 s, or relays refuse a stream. Status then names the cause and shows the
rest. With --watch it refreshes each second, with the rates of published and applied events.`,
		needs: needServers, json: oneObject + ", with --watch one per second",
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			if watch {
				return nil, s.watch(ctx)
			}
			st, err := s.sample(ctx, s.data)
			if err != nil {
				return nil, err
			}
			if len(st.Unavailable)+len(st.Unread) > 0 {
				err = errUnavailable
			} else if slices.ContainsFunc(st.Partitions, func(p status.Partition) bool { return p.Condition() == status.Refused }) {
				err = errUnhealthy
			}
			return stateReport(st), err
		},
	})
	c.Flags().BoolVar(&watch, "watch", false, "refresh each second")
	return c
}

func stateReport(st status.State) *report {
	return reports(st, func(w io.Writer) error { return printState(w, st) })
}

func printState(w io.Writer, st status.State) error {
	consumerRows := [][]string{{"CONSUMER", "BEHIND", "LAG", "DEAD LETTERS", "PAUSED"}}
	if st.PerSecond != nil {
		consumerRows[0] = append(consumerRows[0], "APPLIED/S")
	}
	for _, c := range st.Consumers {
		paused, behind, lag, dead := "no", count(c.Messages), seconds(c.Seconds), count(c.DeadLetters)
		if c.Unknown != "" {
			behind, lag, dead = "unknown", "unknown", "unknown"
		}
		if st.IsUnread(status.PartConsumers) {
			paused = "unknown"
		}
		if c.Paused != nil {
			paused = fmt.Sprintf("since %s by %s", c.Paused.At.Format(time.RFC3339), cell(c.Paused.Actor))
		}
		row := []string{c.Consumer, behind, lag, dead, paused}
		if st.PerSecond != nil {
			row = append(row, count(int64(st.PerSecond.Applied[c.Consumer])))
		}
		consumerRows = append(consumerRows, row)
	}
	leaseRows := [][]string{{"LEASES", "HOLDER", "COUNT", "PARTITIONS"}}
	for _, l := range st.Leases {
		leaseRows = append(leaseRows, []string{l.Kind, l.Owner, fmt.Sprint(len(l.Partitions)), words.Ranges(l.Partitions)})
	}
	outboxRows := [][]string{{"OUTBOX", "PENDING", "DELAYED", "RETRYING", "LAG", "DLQ", "MOST ATTEMPTS"}}
	if o := st.Outbox; o != nil {
		outboxRows = append(outboxRows, []string{"", words.Capped(int64(o.Pending), o.PendingMax), count(int64(o.Delayed)),
			count(int64(o.Retrying)), seconds(o.LagSeconds), count(int64(o.DLQDepth)), count(int64(o.MaxAttempts))})
	} else {
		outboxRows = append(outboxRows, []string{"", "unknown", "unknown", "unknown", "unknown", "unknown", "unknown"})
	}
	if st.PerSecond != nil {
		outboxRows[0], outboxRows[1] = append(outboxRows[0], "PUBLISHED/S"), append(outboxRows[1], count(int64(st.PerSecond.Published)))
	}
	externalRows := [][]string{{"EXTERNAL CONSUMER", "STREAM", "BEHIND", "UNACKNOWLEDGED", "REDELIVERED", "IDLE", "STATE"}}
	for _, e := range st.External {
		externalRows = append(externalRows, []string{cell(e.Name), e.Stream, count(int64(e.Behind)), count(int64(e.Unacked)),
			count(int64(e.Redelivered)), seconds(e.Idle), e.State})
	}
	if all := notes(st); len(all) > 0 {
		fmt.Fprint(w, strings.Join(all, "\n"), "\n\n")
	}
	tables := [][][]string{outboxRows, partitionRows(st.Partitions, false), consumerRows, leaseRows}
	if len(st.Jobs) > 0 {
		tables = append(tables, jobLeaseRows(st.Jobs))
	}
	if len(externalRows) > 1 {
		tables = append(tables, externalRows)
	}
	return tablesTo(w, tables...)
}

// notes returns the doctor's findings about the state, and the external consumers that it does not
// list.
func notes(st status.State) (all []string) {
	for _, f := range doctor.Fleet(st) {
		all = append(all, visible(f.String()))
	}
	for _, stream := range st.MoreOf {
		all = append(all, fmt.Sprintf("Stream %s has more external consumers than this list: `nats consumer ls %s` lists all.",
			stream, stream))
	}
	return all
}

func seconds(s float64) string { return words.Seconds(s) }
