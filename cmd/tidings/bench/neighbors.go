package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

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
			return o.run(cmd.Context(), cmd.OutOrStdout(), progress(cmd))
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
	Requests int      `json:"requests"` // answered with 2xx
	Refused  int      `json:"refused"`  // 503
	Errors   int      `json:"errors"`   // any other answer, or no answer
	P50      *float64 `json:"p50_ms,omitempty"`
	P99      *float64 `json:"p99_ms,omitempty"`
	Ratio    *float64 `json:"p99_ratio,omitempty"` // to the p99 of case quiet
	Others   int      `json:"attackers,omitempty"`
	Answered int      `json:"attackers_answered,omitempty"` // with 2xx
	Turned   int      `json:"attackers_refused,omitempty"`  // any other answer, or no answer
	settings
}

// neighbor is a connection with the results of its requests.
type neighbor struct {
	wire            wire
	took            []time.Duration
	refused, errors int
}

// run sends the requests that make returns until ctx ends: one per interval every, or without a
// pause if every is 0.
func (n *neighbor) run(ctx context.Context, every time.Duration, make func(i int) (method, path, headers string, body []byte)) {
	defer n.wire.close()
	start := time.Now()
	for i := 0; ctx.Err() == nil; i++ {
		if every > 0 && pause(ctx, time.Until(start.Add(time.Duration(i)*every))) != nil {
			return
		}
		method, path, headers, body := make(i)
		began := time.Now()
		a, err := n.wire.send(method, path, headers, body)
		switch {
		case err == nil && a.status/100 == 2:
			n.took = append(n.took, time.Since(began))
		case err == nil && a.status == 503:
			n.refused++
		default:
			n.errors++
		}
	}
}

// good and bad are the indexes of the measured and the attacking tenant in the tokens of the API
// under test.
const good, bad = 0, 1

// attack is a case: the load of the attacking caller.
type attack struct {
	name    string
	clients int
	request func(client, i int) (method, path, headers string, body []byte)
}

// attacks returns the cases. comment is the path of a comment of the tenant bad. fresh is a
// Tidings-Token header that no consumer reaches.
func attacks(comment, fresh string) []attack {
	guess := func(int, int) (string, string, string, []byte) { return "GET", "/v1/follows/1/42", "", nil }
	return []attack{
		{"quiet", 0, nil},
		{"tokens-400", 400, guess},
		{"tokens-1000", 1000, guess},
		{"readers-100", 100, func(client, _ int) (string, string, string, []byte) {
			return "GET", "/v1/users/42/followers?limit=" + strconv.Itoa(1+client/2), fresh, nil
		}},
		{"patch-100", 100, func(client, i int) (string, string, string, []byte) {
			return "PATCH", comment, "Content-Type: application/json\r\nIf-Match: *\r\n", fmt.Appendf(nil, `{"body":"%d %d"}`, client, i)
		}},
	}
}

// attack runs one case for o.duration.
func (o neighborsOptions) attack(ctx context.Context, a *apiUnderTest, c attack) neighborsResult {
	ctx, cancel := context.WithTimeout(ctx, o.duration)
	defer cancel()
	var wg sync.WaitGroup
	others, own := make([]neighbor, c.clients), make([]neighbor, o.clients)
	for i := range others {
		others[i].wire = wire{addr: a.addr, token: a.tokens[bad], timeout: time.Minute}
		wg.Go(func() {
			others[i].run(ctx, 0, func(n int) (string, string, string, []byte) {
				if strings.HasPrefix(c.name, "tokens") {
					others[i].wire.token = tokens.New()
				}
				return c.request(i, n)
			})
		})
	}
	for i := range own {
		own[i].wire = wire{addr: a.addr, token: a.tokens[good], timeout: time.Minute}
		wg.Go(func() {
			own[i].run(ctx, 20*time.Millisecond, func(n int) (string, string, string, []byte) {
				if n%2 == 0 {
					return "GET", "/v1/users/42/counts", "", nil
				}
				return "PUT", "/v1/follows/" + strconv.FormatInt(1+rand.Int64N(1_000_000_000_000), 10) + "/42", "", nil
			})
		})
	}
	wg.Wait()
	r := neighborsResult{Case: c.name, Clients: o.clients, Others: c.clients}
	var took []time.Duration
	for i := range own {
		took = append(took, own[i].took...)
		r.Refused += own[i].refused
		r.Errors += own[i].errors
	}
	for i := range others {
		r.Answered += len(others[i].took)
		r.Turned += others[i].refused + others[i].errors
	}
	r.Requests = len(took)
	r.P50, _, r.P99 = quantiles(took)
	return r
}

func (o neighborsOptions) run(ctx context.Context, out io.Writer, say func(string, ...any)) (err error) {
	say("starting servers")
	s, err := startServers(ctx, syncDefault, slog.Default())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	set, err := s.settings(ctx)
	if err != nil {
		return err
	}
	if err := declareStream(ctx, s); err != nil {
		return err
	}
	a, err := startAPI(ctx, s, 2, logTo(say))
	if err != nil {
		return err
	}
	defer a.child.kill()
	setUp := wire{addr: a.addr, token: a.tokens[bad], timeout: time.Minute}
	defer setUp.close()
	made, err := setUp.send("POST", "/v1/posts/1/comments", "Content-Type: application/json\r\n", []byte(`{"author_id":"1","body":"x"}`))
	if err != nil || made.status != 201 {
		return fmt.Errorf("write a comment: %d, %w", made.status, err)
	}
	comment, fresh := string(made.location), ""
	if made, err = setUp.send("PUT", "/v1/follows/7/42", "", nil); err != nil || made.status != 201 {
		return fmt.Errorf("write a follow: %d, %w", made.status, err)
	}
	fresh = "Tidings-Token: " + string(made.writeToken) + "\r\n"

	var quiet float64
	wrong := 0
	for _, c := range attacks(comment, fresh) {
		if !slices.Contains(o.cases, c.name) {
			continue
		}
		say("%s: %d clients for %s", c.name, c.clients, o.duration)
		r := o.attack(ctx, a, c)
		r.settings = set
		if err := ctx.Err(); err != nil {
			return err
		}
		if r.P99 != nil && c.name == "quiet" {
			quiet = *r.P99
		} else if r.P99 != nil && quiet > 0 {
			r.Ratio = ptr(round(*r.P99/quiet, 2))
		}
		if err := writeLine(out, r); err != nil {
			return err
		}
		if r.Refused+r.Errors > 0 || r.P99 == nil || r.Ratio != nil && *r.Ratio > neighborsP99 {
			wrong++
		}
	}
	if _, err := a.child.stop(); err != nil {
		return err
	}
	if wrong > 0 {
		return fmt.Errorf("in %d cases a request of the tenant was refused or failed, or its p99 was more than %g times as high",
			wrong, neighborsP99)
	}
	return nil
}
