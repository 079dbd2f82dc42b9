package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/ops/load"
)

// loadResult is the output of `tidings load --json` for edges.
type loadResult struct {
	Edges          int64   `json:"edges"` // with an answer
	Created        int64   `json:"created"`
	Existed        int64   `json:"existed"`
	Retried        int64   `json:"retried"`
	Seconds        float64 `json:"seconds"`
	EdgesPerSecond float64 `json:"edges_per_second"`
	Error          string  `json:"error,omitempty"`
}

// childrenResult is the output of `tidings load --json` for children.
type childrenResult struct {
	Requests          int64   `json:"requests"` // with an answer
	Created           int64   `json:"created"`  // children
	Changed           int64   `json:"changed"`  // edits, deletions, moderation, settings
	Existed           int64   `json:"existed"`
	Refused           int64   `json:"refused"`
	Retried           int64   `json:"retried"`
	Seconds           float64 `json:"seconds"`
	RequestsPerSecond float64 `json:"requests_per_second"`
	Error             string  `json:"error,omitempty"`
}

// loading is a load that is about to run.
type loading struct {
	unit    string // the noun of the counted things
	total   int64  // -1 if unknown
	run     func(context.Context) error
	summary func(s load.Stats, took float64, err string) (json any, table [][]string) // took is in seconds
}

func (p Process) loadCommand() *cobra.Command {
	var (
		kind, generate string
		cfg            load.Config
	)
	c := p.command(command{
		use:   "load (FILE | - | --generate SPEC) [--kind KIND]",
		short: "Load edges or children of a kind through the API",
		long: `Load sends the edges of a graph, a hundred per request, or writes generated children. --kind selects
the kind (tidings kinds list).

FILE, or - for stdin, has one edge per line: FROM TO, two ids separated by tabs or spaces, then the
attributes as a JSON object if there are any. Load skips empty lines and lines that begin with #.
The file may be gzipped. A malformed line ends the load with exit code 2, after the lines before it
were sent.

--generate users=N,edges=M,seed=S creates a graph with the skewed degrees of a social network. If the
kind leads from one object to another, the spec has both plurals: users=N,groups=N,edges=M.
Attributes are generated from the kind's schema.

--generate posts=N,comments=M,seed=S creates M children under the objects 1 to N: a few objects have
most of them, and some children are edited or deleted. In threads children reply to each other.
Kinds with moderation also get decisions and thread settings, so the token needs the role moderate.
If another client's change makes an operation impossible (409), the operation and the replies to it
count as refused.

A seed always creates the same edges and children. You can run a load twice: it counts existing rows
and does not write them again. It updates an edge whose attributes differ from its line. The token
needs the roles read and write. Load retries connection errors, 5xx and 429 until --retry-for passes
without a success, so it continues after you kill and restart the server.`,
		args: rangeArgs(0, 1), needs: needServers, json: oneObject,
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			return s.loadFrom(ctx, cfg, kind, generate, args)
		},
	})
	c.Flags().StringVar(&kind, "kind", event.AggregateFollow, "the `kind` of the edges or children")
	c.Flags().StringVar(&generate, "generate", "", "generate the rows: `users=N,edges=M,seed=S`, or posts=N,comments=M,seed=S, with "+
		"the plurals of the kind")
	c.Flags().StringVar(&cfg.URL, "url", "", "address of the API (default: the running dev's)")
	c.Flags().StringVar(&cfg.Token, "token", "", "bearer token with the roles read and write (default: the running dev's)")
	c.Flags().IntVar(&cfg.Concurrency, "concurrency", 32, "parallel requests")
	c.Flags().DurationVar(&cfg.RetryFor, "retry-for", 2*time.Minute, "give up after this time without a success")
	return c
}

// loadFrom loads the file of args or the generated rows through the API of cfg, or else of the
// running dev.
func (s *session) loadFrom(ctx context.Context, cfg load.Config, kind, generate string, args []string) (*report, error) {
	if (generate != "") == (len(args) == 1) {
		return nil, &usageError{errors.New("load needs either a FILE (- for stdin), or --generate")}
	}
	explain, err := s.api(s.data, &cfg.URL, &cfg.Token)
	if err != nil {
		return nil, err
	}
	l, err := load.New(cfg)
	if err != nil {
		return nil, &usageError{err}
	}
	w, done, err := s.loading(ctx, l, kind, generate, args)
	if err != nil {
		return nil, explain(err)
	}
	defer done()
	r, err := s.load(ctx, l, w)
	return r, explain(err)
}

// loading reads the kind from the API, and prepares the load of the file or of the generated rows.
// done closes the file.
func (p Process) loading(ctx context.Context, l *load.Loader, kind, generate string, args []string) (w loading, done func(), err error) {
	all, err := l.Kinds(ctx)
	if err != nil {
		return w, nil, err
	}
	if k, ok := all.Child(kind); ok {
		if generate == "" {
			return w, nil, &usageError{fmt.Errorf("load takes children only from --generate: %s is a kind of children", kind)}
		}
		spec, err := k.Spec(generate)
		if err != nil {
			return w, nil, &usageError{fmt.Errorf("--generate: %w", err)}
		}
		return childrenLoading(l, k, load.GenerateChildren(k, spec)), func() {}, nil
	}
	k, ok := all.Edge(kind)
	if !ok {
		return w, nil, &usageError{fmt.Errorf("the API has no kind %q: `tidings kinds list` lists all of them", kind)}
	}
	if generate != "" {
		spec, err := all.EdgeSpec(k, generate)
		if err != nil {
			return w, nil, &usageError{fmt.Errorf("--generate: %w", err)}
		}
		return edgesLoading(l, k, load.WithAttributes(load.Generate(spec), k.Attributes, spec.Seed), spec.Edges), func() {}, nil
	}
	edges, total, done, err := p.edges(ctx, args[0], k)
	return edgesLoading(l, k, edges, total), done, err
}

// edges opens an edge list. total is -1 if the number of edges is unknown. done closes the list.
func (p Process) edges(ctx context.Context, file string, k load.EdgeKind,
) (edges iter.Seq2[load.Edge, error], total int64, done func(), err error) {
	if file == "-" {
		return load.Read(interruptible(ctx, p.Stdin), k.NoSelf()), -1, func() {}, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, 0, nil, &usageError{fmt.Errorf("open the edge list: %w", err)}
	}
	total = -1
	if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && terminal(p.Stderr) {
		total = countEdges(f) // an extra read, only for the progress bar
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return nil, 0, nil, errors.Join(fmt.Errorf("read the edge list again: %w", err), f.Close())
		}
	}
	return load.Read(f, k.NoSelf()), total, func() { _ = f.Close() }, nil // the file was only read
}

// countEdges counts the edges before the end, or before the first malformed line.
func countEdges(r io.Reader) (n int64) {
	for _, err := range load.Read(r, false) {
		if err != nil {
			break
		}
		n++
	}
	return n
}

// interruptible returns a reader that ends with ctx, even while r waits for a terminal or a pipe.
// The goroutine that reads r then remains until that wait ends, at the latest until the process
// ends.
func interruptible(ctx context.Context, r io.Reader) io.Reader {
	pr, pw := io.Pipe()
	context.AfterFunc(ctx, func() { pw.CloseWithError(context.Cause(ctx)) })
	go func() {
		_, err := io.Copy(pw, r)
		pw.CloseWithError(err)
	}()
	return pr
}

func edgesLoading(l *load.Loader, k load.EdgeKind, edges iter.Seq2[load.Edge, error], total int64) loading {
	return loading{
		unit: "edges", total: total,
		run: func(ctx context.Context) error { return l.Run(ctx, k, edges) },
		summary: func(s load.Stats, took float64, err string) (any, [][]string) {
			r := loadResult{Edges: s.Done(), Created: s.Created, Existed: s.Existed, Retried: s.Retried, Seconds: took,
				EdgesPerSecond: float64(s.Done()) / took, Error: err}
			return r, [][]string{
				{"edges", count(r.Edges)}, {"created", count(r.Created)}, {"already there", count(r.Existed)},
				{"retried", count(r.Retried)}, {"time", seconds(r.Seconds)}, {"edges/s", count(int64(r.EdgesPerSecond))},
			}
		},
	}
}

func childrenLoading(l *load.Loader, k load.ChildKind, plan *load.Children) loading {
	return loading{
		unit: "requests", total: plan.Requests(),
		run: func(ctx context.Context) error { return l.RunChildren(ctx, plan) },
		summary: func(s load.Stats, took float64, err string) (any, [][]string) {
			r := childrenResult{Requests: s.Done(), Created: s.Created, Changed: s.Changed, Existed: s.Existed,
				Refused: s.Refused, Retried: s.Retried, Seconds: took, RequestsPerSecond: float64(s.Done()) / took, Error: err}
			return r, [][]string{
				{"requests", count(r.Requests)}, {k.Plural + " created", count(r.Created)}, {"changes made", count(r.Changed)},
				{"already there", count(r.Existed)}, {"refused", count(r.Refused)}, {"retried", count(r.Retried)},
				{"time", seconds(r.Seconds)}, {"requests/s", count(int64(r.RequestsPerSecond))},
			}
		},
	}
}

// load runs the loader, shows its progress, and returns the summary in any case.
func (p Process) load(ctx context.Context, l *load.Loader, w loading) (*report, error) {
	start, last := time.Now(), int64(0)
	stop := p.showing(w.total, w.unit, func(bar *progressbar.ProgressBar) {
		st := l.Stats()
		if st.Waiting != "" {
			bar.Describe("waiting: " + st.Waiting)
		} else {
			bar.Describe("loading")
		}
		_ = bar.Set64(st.Done()) // a failure to draw the bar must not stop the load
	}, func() string {
		st := l.Stats()
		line := fmt.Sprintf("%s  %s %s  %s/s", elapsed(start), count(st.Done()), w.unit,
			count((st.Done()-last)/int64(lineInterval/time.Second)))
		if st.Waiting != "" {
			line += "  waiting: " + st.Waiting
		}
		last = st.Done()
		return line
	})
	err := w.run(ctx)
	stop()
	if ctx.Err() != nil {
		err = errors.New("stopped before the end: run the same command again to continue")
	}
	failed := ""
	if err != nil {
		failed = err.Error()
	}
	object, rows := w.summary(l.Stats(), time.Since(start).Seconds(), failed)
	return reports(object, rowsOf(rows...)), err
}
