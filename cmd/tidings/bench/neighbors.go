package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/tokens"
)

// neighborsOptions are the flags of `tidings bench neighbors`.
type neighborsOptions struct {
	duration time.Duration
	clients  int
	cases    []string
}

// neighborsP99 is the highest accepted ratio of the tenant's 99th percentile during an attack to
// that without one.
const neighborsP99 = 2.0

func neighborsCommand() *cobra.Command {
	var (
		o   neighborsOptions
		all []string
	)
	for _, c := range attacks("", "") {
		all = append(all, c.name)
	}
	cmd := &cobra.Command{
		Use: "neighbors", Args: cobra.NoArgs,
		Short: "Measure the effect of one caller's load on the requests of another tenant",
		Long: `--clients connections of one tenant send reads and writes, 50 a second each. In the case quiet there
is no other load. In the other cases another caller attacks meanwhile. In the cases tokens-400 and
tokens-1000, 400 and 1000 connections send random tokens. In the case readers-100, 100 connections
of another tenant read with a Tidings-Token which no consumer reaches. In the case patch-100, 100
connections change one comment with If-Match: *.

The command fails if the API refuses a request of the measured tenant or a request fails. It also
fails if the tenant's 99th percentile is more than twice that of the case quiet.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.duration <= 0 || o.clients < 1 || slices.ContainsFunc(o.cases, func(c string) bool { return !slices.Contains(all, c) }) {
				return fmt.Errorf("want a --duration above 0, --clients of 1 or more, and --cases of %s", strings.Join(all, ", "))
			}
			return onServers(cmd, "", syncDefault, o.run)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&o.duration, "duration", 20*time.Second, "how long each case takes")
	f.IntVar(&o.clients, "clients", 4, "connections of the measured tenant")
	f.StringSliceVar(&o.cases, "cases", all, "the cases to run; without quiet, no 99th percentile is compared")
	return cmd
}

// neighborsResult is the output line of a case.
type neighborsResult struct {
	Case     string   `json:"case"`
	Clients  int      `json:"clients"`
	Requests int      `json:"requests"` // answered with 200, writes with 201
	Refused  int      `json:"refused"`  // 503
	Errors   int      `json:"errors"`   // any other answer, or no answer
	P50      *float64 `json:"p50_ms,omitempty"`
	P99      *float64 `json:"p99_ms,omitempty"`
	Ratio    *float64 `json:"p99_ratio,omitempty"` // to the p99 of case quiet
	Others   int      `json:"attackers,omitempty"`
	Answered int      `json:"attackers_answered,omitempty"` // likewise
	Turned   int      `json:"attackers_refused,omitempty"`  // any other answer, or no answer
	settings
}

// good and bad are the indexes of the measured and the attacking tenant in the tokens of the API
// under test.
const good, bad = 0, 1

// attack is a case: the load of the attacking caller.
type attack struct {
	name    string
	clients int
	next    func(client, n int) request
}

// attacks returns the cases. comment is the path of a comment of the tenant bad. fresh is a
// Tidings-Token header that no consumer reaches.
func attacks(comment, fresh string) []attack {
	guess := func(int, int) request { return request{method: "GET", path: "/v1/follows/1/42", token: tokens.New()} }
	return []attack{
		{"quiet", 0, nil},
		{"tokens-400", 400, guess},
		{"tokens-1000", 1000, guess},
		{"readers-100", 100, func(client, _ int) request {
			return request{method: "GET", path: "/v1/users/42/followers?limit=" + strconv.Itoa(1+client/2), headers: fresh}
		}},
		{"patch-100", 100, func(client, n int) request {
			return request{method: "PATCH", path: comment, headers: "Content-Type: application/json\r\nIf-Match: *\r\n",
				body: fmt.Appendf(nil, `{"body":"%d %d"}`, client, n)}
		}},
	}
}

// goodRequest returns the requests of the measured tenant, reads and writes in turn.
func goodRequest(_, n int) request {
	if n%2 == 0 {
		return request{method: "GET", path: "/v1/users/42/counts"}
	}
	return request{method: "PUT", path: "/v1/follows/" + strconv.FormatInt(1+rand.Int64N(1_000_000_000_000), 10) + "/42"}
}

// attack runs one case for o.duration. The latency counts from when a request was sent, because the
// limit of the ratio is about the API's answers. The tenant has few connections, and a wait for one
// would multiply the time of a slow answer.
func (o neighborsOptions) attack(ctx context.Context, a *apiUnderTest, c attack) (r neighborsResult, err error) {
	only := func(tenant int) *apiUnderTest {
		return &apiUnderTest{addr: a.addr, tokens: a.tokens[tenant : tenant+1]}
	}
	own, others := newCallers(only(good), o.clients, goodRequest), newCallers(only(bad), c.clients, c.next)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		_, err := own.run(ctx, workload{rate: 50 * float64(o.clients), duration: o.duration})
		return err
	})
	g.Go(func() error {
		_, err := others.run(ctx, workload{duration: o.duration})
		return err
	})
	if err := g.Wait(); err != nil {
		return r, err
	}
	q := quantilesOf(own.took)
	return neighborsResult{Case: c.name, Clients: o.clients, Requests: len(own.took), Refused: own.refused, Errors: own.failed,
		P50: q.P50, P99: q.P99, Others: c.clients, Answered: len(others.took), Turned: others.refused + others.failed}, nil
}

func (o neighborsOptions) run(ctx context.Context, s *servers) error {
	a, err := s.startAPI(ctx, 2)
	if err != nil {
		return err
	}
	setUp := wire{addr: a.addr, token: a.tokens[bad], timeout: time.Minute}
	defer setUp.close()
	made, err := setUp.send("POST", "/v1/posts/1/comments", "Content-Type: application/json\r\n", []byte(`{"author_id":"1","body":"x"}`))
	if err != nil || made.status != 201 {
		return fmt.Errorf("write a comment: %d, %w", made.status, err)
	}
	comment := string(made.location)
	if made, err = setUp.send("PUT", "/v1/follows/7/42", "", nil); err != nil || made.status != 201 {
		return fmt.Errorf("write a follow: %d, %w", made.status, err)
	}

	var quiet float64
	wrong := 0
	for _, c := range attacks(comment, "Tidings-Token: "+string(made.writeToken)+"\r\n") {
		if !slices.Contains(o.cases, c.name) {
			continue
		}
		s.say("%s: %d clients for %s", c.name, c.clients, o.duration)
		r, err := o.attack(ctx, a, c)
		if err != nil {
			return err
		}
		if r.P99 != nil && c.name == "quiet" {
			quiet = *r.P99
		} else if r.P99 != nil && quiet > 0 {
			r.Ratio = ptr(round(*r.P99/quiet, 2))
		}
		if err := s.print(&r); err != nil {
			return err
		}
		if r.Refused+r.Errors > 0 || r.P99 == nil || r.Ratio != nil && *r.Ratio > neighborsP99 {
			wrong++
		}
	}
	if _, _, err := stop(a.child); err != nil {
		return err
	}
	if wrong > 0 {
		return fmt.Errorf("in %d cases a request of the tenant was refused or failed, or its p99 was more than %g times as high",
			wrong, neighborsP99)
	}
	return nil
}
