package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
)

// readOptions are the flags of `tidings bench read`.
type readOptions struct {
	cases              []string
	comments, requests int
	users, edges       int
	clients            int
	duration           time.Duration
	seed               uint64
}

// The groups of cases.
const (
	readThreads = "threads"
	readTAO     = "tao"
)

// The smallest sizes with which every case has data to read.
const (
	minComments = 2000
	minUsers    = 100
)

func readCommand() *cobra.Command {
	var o readOptions
	cmd := &cobra.Command{
		Use: "read", Args: cobra.NoArgs,
		Short: "Measure reads of a very long thread, and of a follow graph in TAO's published mix",
		Long: `Read fills the projections and reads them over HTTP, on loopback, from an API in a process of its
own. It compares every answer with the written rows. Wrong answers count in errors, and the command
then fails.

The cases of threads read one post with --comments comments, 1% of them deleted. One client requests
nine things in turn, --requests times each. They are the first page of 50, a page behind 85 to 95% of
the comments, and a cursor's page at that depth. The others are the page around a comment at that
depth, the summary, the replies below a comment, and the first page of the newest comments. The last
ones are the first page of the comments with the highest scores, and the page after it. The command
also compares some of the deep pages with SQL's OFFSET. The API's page cache is off. ratio is the
median of deep-page divided by that of first-page, and of top and top-cursor divided by that of
newest.

The cases of tao read a follow graph of --users and --edges. A few users have most of the followers,
and the reads prefer these users. --clients clients send requests for --duration, each client one at
a time. The mix is 40.9% pages of followers or followings (tao-range), 28.9% one follow (tao-object)
and 15.7% checks of ten pairs (tao-point). The rest is 11.7% counts (tao-count), and 2.8% pages from
a cursor in the middle (tao-time-range). tao-total is all of them.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.comments < minComments || o.requests < 1 || o.users < minUsers || o.edges < o.users || o.edges > o.users*o.users/4 ||
				o.clients < 1 || o.duration <= 0 ||
				slices.ContainsFunc(o.cases, func(c string) bool { return c != readThreads && c != readTAO }) {
				return fmt.Errorf("want --comments of %d or more, --users of %d or more, --edges from --users to a quarter of its "+
					"square, --requests and --clients of 1 or more, a --duration above 0, and --cases of %s, %s",
					minComments, minUsers, readThreads, readTAO)
			}
			groups := map[string]readGroup{readThreads: o.threads, readTAO: o.tao}
			return onEach(cmd, syncDefault, o.cases, func(ctx context.Context, s *servers, name string) error {
				return o.run(ctx, s, groups[name])
			})
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.cases, "cases", []string{readThreads, readTAO}, "the groups of cases to run")
	f.IntVar(&o.comments, "comments", 1_000_000, "comments of the post")
	f.IntVar(&o.requests, "requests", 2000, "requests of each case of threads")
	f.IntVar(&o.users, "users", 100_000, "accounts of the follow graph")
	f.IntVar(&o.edges, "edges", 1_000_000, "follows of the follow graph")
	f.IntVar(&o.clients, "clients", 8, "parallel clients of tao")
	f.DurationVar(&o.duration, "duration", 30*time.Second, "how long the clients of tao send requests")
	f.Uint64Var(&o.seed, "seed", 1, "the seed of the random rows and requests")
	return cmd
}

// readGroup runs a group of cases and returns their results.
type readGroup func(ctx context.Context, s *servers) ([]readResult, error)

// readResult is the output line of a case. It omits members that do not apply.
type readResult struct {
	Case              string  `json:"case"`
	Requests          int     `json:"requests"`
	Seconds           float64 `json:"seconds"`
	RequestsPerSecond float64 `json:"requests_per_second"`
	quantiles
	Than     string   `json:"compared_with,omitempty"` // a case
	Ratio    *float64 `json:"ratio,omitempty"`         // of the medians
	Errors   int      `json:"errors"`
	Clients  int      `json:"clients"`
	Comments int      `json:"comments,omitempty"`
	Users    int      `json:"users,omitempty"`
	Edges    int      `json:"edges,omitempty"`
	PeakRSS  float64  `json:"peak_rss_mib"`
	settings
}

// fill sets the figures that follow from the requests, which were sent in the duration within.
func (r *readResult) fill(c *recorder, within time.Duration) {
	r.Requests, r.Seconds, r.Errors = len(c.took), round(within.Seconds(), 3), c.failed
	r.RequestsPerSecond, r.quantiles = perSecond(len(c.took), within), quantilesOf(c.took)
}

func (o readOptions) run(ctx context.Context, s *servers, group readGroup) error {
	results, err := group(ctx, s)
	if err != nil {
		return err
	}
	wrong := 0
	for _, r := range results {
		if err := s.print(&r); err != nil {
			return err
		}
		wrong += r.Errors
	}
	if wrong > 0 {
		return fmt.Errorf("%d answers were errors or wrong", wrong)
	}
	return nil
}

// asConsumersDoSQL has the settings with which a consumer's transaction begins, and switches
// synchronous_commit off, because the database is dropped after the run.
const asConsumersDoSQL = `SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_seqscan', 'off', true),
       set_config('random_page_cost', '1.1', true), set_config('synchronous_commit', 'off', true)`

// fillBatch is the number of events in one transaction.
const fillBatch = 10_000

// fill applies n events to a projection: nth returns each of them, in order.
func fill(ctx context.Context, s *servers, p projections.Projection, n int, nth func(n int) (event.Event, error)) (err error) {
	for first := 0; first < n; first += fillBatch {
		events := make([]event.Event, min(fillBatch, n-first))
		for i := range events {
			if events[i], err = nth(first + i); err != nil {
				return err
			}
		}
		if err := postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
				return err
			}
			return p.Apply(ctx, tx, events)
		}); err != nil {
			return err
		}
	}
	return nil
}

// offsetsSQL inserts the offsets that a consumer has at the end of an empty stream. The API reads
// them for every page.
const offsetsSQL = `
INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of)
SELECT name, 'p' || to_char(p, 'FM00'), 0, now() FROM unnest(@consumers::text[]) AS name, generate_series(0, 31) p`

// settle brings a database that was filled at once into the state of one that grew slowly:
// vacuumed, analyzed, with a checkpoint.
func settle(ctx context.Context, s *servers) error {
	names := []string{threadcache.Name, followercounts.Name}
	if _, err := s.pool.Exec(ctx, offsetsSQL, pgx.StrictNamedArgs{"consumers": names}); err != nil {
		return fmt.Errorf("set the consumers' offsets: %w", err)
	}
	return s.exec(ctx, `VACUUM ANALYZE child_lists, child_buckets, child_totals, edge_lists, edge_counts, edge_aggregates, child_ranks,
		edges, consumer_offsets`,
		`CHECKPOINT`)
}
