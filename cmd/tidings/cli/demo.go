package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/demo"
)

// demoFlags are the flags of `tidings demo`.
type demoFlags struct {
	demo.Config
	tenant   int64
	duration time.Duration
	trouble  bool
}

// demoResult is the output of `tidings demo --json`.
type demoResult struct {
	demo.Stats
	Seed    uint64  `json:"seed"`
	Seconds float64 `json:"seconds"`
}

const (
	demoToken  = 30 * 24 * time.Hour // the token of a demo expires after this time, even if it is never revoked
	stopWithin = 5 * time.Second     // the longest time to revoke it at the end
)

func (p Process) demoCommand() *cobra.Command {
	var f demoFlags
	c := p.command(command{
		use:   "demo",
		short: "Simulate a small site beside tidings dev",
		long: `Demo simulates the users of a small site: they follow, like, write, reply, edit and delete, and some
threads are very busy. Moderators decide on pending comments, a rule hides advertising, and
moderators lock threads. Demo only uses the API. It fills dashboards and the console with data.

It prints a line each second and a summary at Ctrl-C. It waits while the API is unavailable. Each
start adds to the existing content. For a tenant other than dev's own it creates a token, and
revokes it at the end.

With --trouble it also writes faulty rows to dev's database: events that consumers cannot apply, and
messages that no relay can publish. Alerts fire, and dead letters remain until an operator handles
them. Until then tidings verify reports differences.`,
		needs: needServers, json: oneObject + " at the end",
		check: func(s *session, _ []string) error {
			if f.tenant < 1 || f.duration < 0 {
				return &usageError{errors.New("--tenant must be a positive number, and --duration 0 or more")}
			}
			if !s.changed("seed") {
				f.Seed = mathrand.Uint64() % 1_000_000
			}
			if err := f.Validate(); err != nil {
				return &usageError{err}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			f.StopTimeout = p.demoStop
			return nil, s.demo(ctx, f)
		},
	})
	c.Flags().Float64Var(&f.Rate, "rate", 20, "requests per second")
	c.Flags().IntVar(&f.Users, "users", 200, "the number of users, with ids from 1")
	c.Flags().Int64Var(&f.tenant, "tenant", devTenant, "the tenant")
	c.Flags().Uint64Var(&f.Seed, "seed", 0, "the seed of the random numbers (default: a new one each time)")
	c.Flags().DurationVar(&f.duration, "duration", 0, "stop after this time (default: at Ctrl-C)")
	c.Flags().BoolVar(&f.trouble, "trouble", false, "also cause dead letters and alerts, in the database of dev")
	c.Flags().StringVar(&f.URL, "url", "", "address of the API (default: the running dev's)")
	c.Flags().StringVar(&f.Token, "token", "", "bearer token with the roles read, write and moderate (default: the running dev's)")
	return c
}

// demo finds the API and the token, and simulates the site until ctx ends.
func (s *session) demo(ctx context.Context, f demoFlags) error {
	elsewhere := f.URL != "" || f.Token != ""
	if elsewhere && (f.trouble || f.tenant != devTenant) {
		return &usageError{errors.New("--trouble and --tenant need the dev of --data: do not use them with --url or --token")}
	}
	explain, err := s.api(s.data, &f.URL, &f.Token)
	if err != nil {
		return err
	}
	if !f.trouble && f.tenant == devTenant {
		return explain(s.live(ctx, f, nil))
	}
	return s.withDev(ctx, func(pool *pgxpool.Pool) (err error) {
		if f.tenant != devTenant {
			spec := tokens.Spec{TenantID: f.tenant, Name: "demo-" + rand.Text()[:8],
				Roles: []string{tokens.RoleRead, tokens.RoleWrite, tokens.RoleModerate}, Expires: time.Now().Add(demoToken)}
			made, failed := tokens.Issue(ctx, pool, spec)
			if failed != nil {
				return failed
			}
			f.Token = made.Token
			defer func() {
				last, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWithin)
				defer cancel()
				_, _, revoked := tokens.Revoke(last, pool, spec.TenantID, spec.Name)
				err = errors.Join(err, revoked)
			}()
		}
		if !f.trouble {
			return s.live(ctx, f, nil)
		}
		return s.live(ctx, f, &demo.Trouble{Pool: pool, Tenant: f.tenant})
	})
}

// withDev calls fn with the database of a dev. It ignores DATABASE_URL in the environment.
func (s *session) withDev(ctx context.Context, fn func(pool *pgxpool.Pool) error) error {
	data, err := s.dataDir(s.data)
	if err != nil {
		return err
	}
	at, err := s.servers(ctx, data)
	if err != nil {
		return err
	}
	pool, err := postgres.Open(ctx, at.DatabaseURL, at.Postgres, postgres.RoleSystem, "demo")
	if err != nil {
		return err
	}
	defer pool.Close()
	return fn(pool)
}

// live simulates the site, shows its requests, and prints a summary at the end.
func (s *session) live(ctx context.Context, f demoFlags, trouble *demo.Trouble) error {
	site, err := demo.New(f.Config)
	if err != nil {
		return &usageError{err}
	}
	fmt.Fprintf(s.Stderr, "Simulating users at %s with seed %d. Ctrl-C stops it.\n", f.URL, f.Seed)
	start, done, shown := time.Now(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(shown)
		s.showSite(site, done)
	}()
	if f.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.duration)
		defer cancel()
	}
	g, running := errgroup.WithContext(ctx)
	g.Go(func() error { return site.Run(running) })
	if trouble != nil {
		g.Go(func() error { return trouble.Run(running) })
	}
	err = g.Wait()
	close(done)
	<-shown
	st := site.Stats()
	st.Last = ""
	rows := [][]string{{"REQUEST", "COUNT"}, {"read", count(st.Reads)}}
	for _, did := range slices.Sorted(maps.Keys(st.Did)) {
		rows = append(rows, []string{did, count(st.Did[did])})
	}
	rows = append(rows, []string{"refused", count(st.Refused)}, []string{"retried", count(st.Retried)})
	return errors.Join(s.print(reports(demoResult{st, f.Seed, time.Since(start).Seconds()}, rowsOf(rows...))), err)
}

// showSite writes a line each second. On a terminal each line replaces the one before.
func (p Process) showSite(site *demo.Site, done <-chan struct{}) {
	before, end := "", "\n"
	if terminal(p.Stderr) {
		before, end = "\r\x1b[K", ""
		defer fmt.Fprint(p.Stderr, before)
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var last demo.Stats
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		st := site.Stats()
		fmt.Fprint(p.Stderr, before+siteLine(last, st)+end)
		last = st
	}
}

// siteLine describes the requests of a site between two readings of its statistics.
func siteLine(last, now demo.Stats) string {
	var most []string
	for _, did := range slices.SortedFunc(maps.Keys(now.Did), func(a, b string) int {
		return cmp.Or(cmp.Compare(now.Did[b]-last.Did[b], now.Did[a]-last.Did[a]), strings.Compare(a, b))
	}) {
		if n := now.Did[did] - last.Did[did]; n > 0 && len(most) < 3 {
			most = append(most, fmt.Sprintf("%s %d", did, n))
		}
	}
	line := fmt.Sprintf("%s  %d writes/s, %d reads/s", words.Of(now.Requests, "request"), now.Writes()-last.Writes(), now.Reads-last.Reads)
	if len(most) > 0 {
		line += " (" + strings.Join(most, ", ") + ")"
	}
	if n := now.Refused - last.Refused; n > 0 {
		line += fmt.Sprintf(", %d refused", n)
	}
	switch {
	case now.Waiting != "":
		line += "  waiting: " + now.Waiting
	case now.Last != "":
		line += "  " + cell(now.Last)
	}
	return line
}
