package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/load"
)

// loadResult is what `tidings load --json` prints of a graph.
type loadResult struct {
	Edges          int64   `json:"edges"` // answered
	Created        int64   `json:"created"`
	Existed        int64   `json:"existed"`
	Retried        int64   `json:"retried"`
	Seconds        float64 `json:"seconds"`
	EdgesPerSecond float64 `json:"edges_per_second"`
	Error          string  `json:"error,omitempty"`
}

// threadsResult is what `tidings load --generate-threads --json` prints.
type threadsResult struct {
	Requests          int64   `json:"requests"` // answered
	Created           int64   `json:"created"`  // comments
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
	unit    string // what is counted
	total   int64  // -1 where it is not known
	run     func(context.Context) error
	summary func(s load.Stats, seconds float64, err string) (json any, table [][]string)
}

func (p Process) loadCommand() *cobra.Command {
	var (
		data, generate, threads string
		asJSON                  bool
		cfg                     load.Config
	)
	c := &cobra.Command{
		Use:   "load (FILE | - | --generate users=N,edges=M,seed=S | --generate-threads posts=N,comments=M,seed=S)",
		Short: "Load a follow graph, or threads, through the API",
		Long: `Load sends PUT /v1/follows/FROM/TO for every edge of a graph, or writes the comments of generated threads.

FILE, or - for stdin, has one edge per line: FROM TO, two ids separated by tabs or spaces, LF or CRLF. Empty lines and lines
that begin with # are passed over. It may be compressed with gzip. A line that is no edge ends the load with exit code 2;
what stands before it is sent.

--generate makes a graph instead: degrees are skewed like those of a social network, the same seed makes the same graph.

--generate-threads writes M comments and replies on the posts 1 to N: few posts have most of them, some comments are edited, deleted
or moderated, some threads have settings. The token needs the roles write and moderate. What somebody else's changes do not allow
any more (409) is counted as refused, and so are the replies to it.

What stands already is counted apart and not changed, so a load may be run twice. Connection errors, 5xx and 429
are retried until --retry-for has passed without one success: a load goes on when the server was killed and started again.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if sources := append(slices.DeleteFunc([]string{generate, threads}, func(s string) bool { return s == "" }), args...); len(sources) != 1 {
				return &usageError{errors.New("load wants either a FILE (- for stdin), or --generate, or --generate-threads")}
			}
			if cfg.URL == "" || cfg.Token == "" {
				in, err := p.instance(data)
				if err != nil {
					return fmt.Errorf("%w, or give --url and --token", err)
				}
				if cfg.URL == "" {
					cfg.URL = in.API
				}
				if cfg.Token == "" {
					cfg.Token = in.Token
				}
			}
			l, err := load.New(cfg)
			if err != nil {
				return &usageError{err}
			}
			if threads != "" {
				spec, err := load.ParseThreadSpec(threads)
				if err != nil {
					return &usageError{fmt.Errorf("--generate-threads: %w", err)}
				}
				return p.load(c.Context(), l, threadsLoading(l, load.GenerateThreads(spec)), asJSON)
			}
			edges, total, done, err := p.edges(c.Context(), args, generate)
			if err != nil {
				return err
			}
			defer done()
			return p.load(c.Context(), l, graphLoading(l, edges, total), asJSON)
		},
	}
	c.Flags().StringVar(&generate, "generate", "", "generate a graph: `users=N,edges=M,seed=S`")
	c.Flags().StringVar(&threads, "generate-threads", "", "generate threads: `posts=N,comments=M,seed=S`")
	c.Flags().StringVar(&cfg.URL, "url", "", "address of the API (default: the running dev's)")
	c.Flags().StringVar(&cfg.Token, "token", "", "bearer token with the role write (default: the running dev's)")
	c.Flags().IntVar(&cfg.Concurrency, "concurrency", 32, "requests at a time")
	c.Flags().DurationVar(&cfg.RetryFor, "retry-for", 2*time.Minute, "give up after so long without one success")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}

// edges opens what is to be loaded. total is -1 where it is not known; done closes it.
func (p Process) edges(ctx context.Context, args []string, generate string) (edges iter.Seq2[load.Edge, error], total int64, done func(), err error) {
	if generate != "" {
		spec, err := load.ParseSpec(generate)
		if err != nil {
			return nil, 0, nil, &usageError{fmt.Errorf("--generate: %w", err)}
		}
		return func(yield func(load.Edge, error) bool) {
			for e := range load.Generate(spec) {
				if !yield(e, nil) {
					return
				}
			}
		}, spec.Edges, func() {}, nil
	}
	if args[0] == "-" {
		return load.Read(interruptible(ctx, p.Stdin)), -1, func() {}, nil
	}
	f, err := os.Open(args[0])
	if err != nil {
		return nil, 0, nil, &usageError{fmt.Errorf("open the edge list: %w", err)}
	}
	total = -1
	if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && terminal(p.Stderr) {
		total = countEdges(f) // a second read, only for the bar
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return nil, 0, nil, errors.Join(fmt.Errorf("read the edge list again: %w", err), f.Close())
		}
	}
	return load.Read(f), total, func() { _ = f.Close() }, nil // it was only read
}

// countEdges counts as far as the list can be read.
func countEdges(r io.Reader) (n int64) {
	for _, err := range load.Read(r) {
		if err != nil {
			break
		}
		n++
	}
	return n
}

// interruptible returns a reader that ends with ctx although r may be waiting for a terminal or a pipe. What reads r then
// stays behind until that wait ends, at the latest with the process.
func interruptible(ctx context.Context, r io.Reader) io.Reader {
	pr, pw := io.Pipe()
	context.AfterFunc(ctx, func() { pw.CloseWithError(context.Cause(ctx)) })
	go func() {
		_, err := io.Copy(pw, r)
		pw.CloseWithError(err)
	}()
	return pr
}

// terminal reports whether w is one.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

func graphLoading(l *load.Loader, edges iter.Seq2[load.Edge, error], total int64) loading {
	return loading{
		unit: "edges", total: total,
		run: func(ctx context.Context) error { return l.Run(ctx, edges) },
		summary: func(s load.Stats, seconds float64, err string) (any, [][]string) {
			r := loadResult{Edges: s.Done(), Created: s.Created, Existed: s.Existed, Retried: s.Retried, Seconds: seconds,
				EdgesPerSecond: float64(s.Done()) / seconds, Error: err}
			return r, [][]string{
				{"edges", count(r.Edges)}, {"created", count(r.Created)}, {"already there", count(r.Existed)}, {"retried", count(r.Retried)},
				{"seconds", fmt.Sprintf("%.1f", r.Seconds)}, {"edges/s", count(int64(r.EdgesPerSecond))},
			}
		},
	}
}

func threadsLoading(l *load.Loader, threads *load.Threads) loading {
	return loading{
		unit: "requests", total: threads.Requests(),
		run: func(ctx context.Context) error { return l.RunThreads(ctx, threads) },
		summary: func(s load.Stats, seconds float64, err string) (any, [][]string) {
			r := threadsResult{Requests: s.Done(), Created: s.Created, Changed: s.Changed, Existed: s.Existed, Refused: s.Refused, Retried: s.Retried,
				Seconds: seconds, RequestsPerSecond: float64(s.Done()) / seconds, Error: err}
			return r, [][]string{
				{"requests", count(r.Requests)}, {"comments created", count(r.Created)}, {"changes made", count(r.Changed)}, {"already there", count(r.Existed)},
				{"refused", count(r.Refused)}, {"retried", count(r.Retried)}, {"seconds", fmt.Sprintf("%.1f", r.Seconds)},
				{"requests/s", count(int64(r.RequestsPerSecond))},
			}
		},
	}
}

// load runs the loader, shows how far it is, and prints the summary whatever the outcome.
func (p Process) load(ctx context.Context, l *load.Loader, w loading, asJSON bool) error {
	start := time.Now()
	done := make(chan struct{})
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		if terminal(p.Stderr) {
			p.showBar(l, w, done)
		} else {
			p.showLines(l, w, start, done)
		}
	}()
	err := w.run(ctx)
	close(done)
	<-shown
	if ctx.Err() != nil {
		err = errors.New("stopped before the end; run the same command again to go on")
	}
	failed := ""
	if err != nil {
		failed = err.Error()
	}
	object, table := w.summary(l.Stats(), time.Since(start).Seconds(), failed)
	if asJSON {
		return errors.Join(p.writeJSON(object), err)
	}
	return errors.Join(p.table(table...), err)
}

const (
	barInterval  = 100 * time.Millisecond
	lineInterval = 5 * time.Second
)

func (p Process) showBar(l *load.Loader, w loading, done <-chan struct{}) {
	bar := progressbar.NewOptions64(w.total, progressbar.OptionSetWriter(p.Stderr), progressbar.OptionShowCount(), progressbar.OptionShowIts(),
		progressbar.OptionSetItsString(w.unit), progressbar.OptionClearOnFinish(), progressbar.OptionUseANSICodes(true), progressbar.OptionSetWidth(30))
	ticker := time.NewTicker(barInterval)
	defer ticker.Stop()
	for {
		s := l.Stats()
		if s.Waiting != "" {
			bar.Describe("waiting: " + s.Waiting)
		} else {
			bar.Describe("loading")
		}
		_ = bar.Set64(s.Done()) // a bar that cannot be drawn is no reason to stop
		select {
		case <-ticker.C:
		case <-done:
			_ = bar.Clear()
			return
		}
	}
}

func (p Process) showLines(l *load.Loader, w loading, start time.Time, done <-chan struct{}) {
	ticker := time.NewTicker(lineInterval)
	defer ticker.Stop()
	var last int64
	for {
		select {
		case <-ticker.C:
		case <-done:
			return
		}
		s := l.Stats()
		line := fmt.Sprintf("%4.0fs  %s %s  %s/s", time.Since(start).Seconds(), count(s.Done()), w.unit, count((s.Done()-last)/int64(lineInterval/time.Second)))
		if s.Waiting != "" {
			line += "  waiting: " + s.Waiting
		}
		fmt.Fprintln(p.Stderr, line)
		last = s.Done()
	}
}
