package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
)

// system has connections to the databases and to NATS. The connection to an unavailable server is
// nil.
type system struct {
	status.Sources
	kinds *kinds.Catalog // of the projections' database, loaded; nil after someSystem
}

// system connects to the servers. It returns an error if one is unavailable, or if a database does
// not have this program's schema.
func (p Process) system(ctx context.Context, data, name string) (*system, error) {
	y, err := p.someSystem(ctx, data, name)
	if err != nil {
		return nil, err
	}
	if len(y.Unavailable) > 0 {
		y.close()
		return nil, errors.New(y.Unavailable[0].String())
	}
	y.kinds = kinds.NewCatalog(y.Projections, kinds.Projections, daemon.CommandLogger(p.Stderr, slog.LevelError))
	if err := y.kinds.Load(ctx); err != nil {
		y.close()
		return nil, err
	}
	return y, nil
}

// someSystem connects to the servers that answer. It returns an error if a database does not have
// this program's schema.
func (p Process) someSystem(ctx context.Context, data, name string) (_ *system, err error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return nil, err
	}
	y := &system{Sources: status.Sources{Broker: s.Broker, Consumers: fleet.Names()}}
	defer func() {
		if err != nil {
			y.close()
		}
	}()
	if y.Truth, err = y.database(ctx, status.ServerTruth, s.DatabaseURL, s.Postgres, name, migrations.Truth); err != nil {
		return nil, err
	}
	if s.ProjectionsDatabaseURL != s.DatabaseURL || y.Truth != nil {
		y.Projections, err = y.database(ctx, status.ServerProjections, s.ProjectionsDatabaseURL, s.Postgres, name, migrations.Projections)
		if err != nil {
			return nil, err
		}
	}
	log := daemon.CommandLogger(p.Stderr, slog.LevelError)
	if err := s.Broker.Validate(); err != nil {
		return nil, err
	}
	if y.NATS, err = broker.Connect(s.Broker, name, log, nats.RetryOnFailedConnect(false)); err != nil {
		y.Unavailable = append(y.Unavailable, status.NewUnavailable(status.ServerNATS, s.Broker.URL, err))
		return y, nil
	}
	if y.JetStream, err = jetstream.New(y.NATS); err != nil {
		return nil, fmt.Errorf("use JetStream: %w", err)
	}
	return y, nil
}

// database connects to a database, which must have this program's schema. It returns nil if the
// server is unavailable.
func (y *system) database(ctx context.Context, server, url string, cfg postgres.Config, name string,
	schema migrations.Set) (*pgxpool.Pool, error) {
	pool, err := postgres.Open(ctx, url, cfg, postgres.RoleSystem, name)
	if err != nil {
		return nil, err
	}
	if err := pool.Ping(ctx); postgres.IsTransient(err) {
		pool.Close()
		y.Unavailable = append(y.Unavailable, status.NewUnavailable(server, url, err))
		return nil, nil
	}
	if err := migrations.Check(ctx, pool, schema); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

func (y *system) close() {
	if y.NATS != nil {
		y.NATS.Close()
	}
	if y.Projections != nil {
		y.Projections.Close()
	}
	if y.Truth != nil {
		y.Truth.Close()
	}
}

func (p Process) statusCommand() *cobra.Command {
	var (
		data          string
		asJSON, watch bool
	)
	c := &cobra.Command{
		Use:   "status",
		Short: "Show lags, dead letters, partitions, leases and blocked sessions",
		Long: `Status shows lags, dead letters, partitions, leases and blocked sessions. While a stream has no
leader, it retries for some seconds, as long as an election takes, and then shows the rest. If
PostgreSQL or NATS is unavailable, it names that server, shows the state of the other one, and ends
with exit code 3. If another session locks a table for 2 s, it names that session, shows the rest,
and ends with exit code 3 too, as it does if relays refuse a stream. With --watch it refreshes each
second, with the rates of published and applied events.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			show := p.printState
			if asJSON {
				show = func(st status.State) error { return p.writeJSON(st) }
			}
			if watch {
				return p.watch(c.Context(), data, show)
			}
			st, err := p.sample(c.Context(), data)
			if err != nil {
				return err
			}
			if err := show(st); err != nil {
				return err
			}
			if len(st.Unavailable)+len(st.Unread) > 0 {
				return errAway
			}
			if slices.ContainsFunc(st.Partitions, func(p status.Partition) bool { return p.Condition() == status.Refused }) {
				return errIllness
			}
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, with --watch one per second")
	c.Flags().BoolVar(&watch, "watch", false, "refresh each second")
	dataFlag(c, &data)
	return c
}

func (p Process) printState(st status.State) error {
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
	externalRows := [][]string{{"EXTERNAL CONSUMER", "STREAM", "BEHIND", "UNACKNOWLEDGED"}}
	for _, e := range st.External {
		externalRows = append(externalRows, []string{e.Name, e.Stream, count(int64(e.Behind)), count(int64(e.Unacked))})
	}
	var noted error
	if all := notes(st); len(all) > 0 {
		_, noted = fmt.Fprint(p.Stdout, strings.Join(all, "\n"), "\n\n")
	}
	blank := func() error { _, err := fmt.Fprintln(p.Stdout); return err }
	tables := [][][]string{outboxRows, partitionRows(st.Partitions, false), consumerRows, leaseRows}
	if len(st.Jobs) > 0 {
		tables = append(tables, jobLeaseRows(st.Jobs))
	}
	if len(externalRows) > 1 {
		tables = append(tables, externalRows)
	}
	errs := []error{noted}
	for n, rows := range tables {
		if n > 0 {
			errs = append(errs, blank())
		}
		errs = append(errs, p.table(rows...))
	}
	return errors.Join(errs...)
}

// notes returns the doctor's findings about the state, and the external consumers that it does not
// list.
func notes(st status.State) (all []string) {
	for _, f := range doctor.Fleet(st) {
		all = append(all, f.String())
	}
	for _, stream := range st.MoreOf {
		all = append(all, fmt.Sprintf("Stream %s has more external consumers than this list: `nats consumer ls %s` lists all.", stream, stream))
	}
	if st.NotListed != "" {
		all = append(all, "The external consumers are unknown: "+st.NotListed)
	}
	return all
}

func seconds(s float64) string { return words.Seconds(s) }
