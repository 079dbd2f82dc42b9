package subscribe_test

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/upstreams"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
	"github.com/tidings/tidings/subscribe/prom"
)

const (
	handle = 1 << iota
	project
)

// options are all options with a valid value, and the functions that they change.
var options = []struct {
	name   string
	of     int
	option subscribe.Option
}{
	{"Streams", handle | project, subscribe.Streams("OTHERS", "others")},
	{"Tenant", handle, subscribe.Tenant(7)},
	{"Kinds", handle | project, subscribe.Kinds(kinds.Builtin())},
	{"Upstreams", handle | project, subscribe.Upstreams(&upstreams.Upstream{Name: "order"})},
	{"Log", handle | project, subscribe.Log(slog.Default())},
	{"Report", handle | project, subscribe.Report(&subscribe.Health{})},
	{"Timeout", handle | project, subscribe.Timeout(time.Second)},
	{"Only", project, subscribe.Only("follow")},
	{"Batch", project, subscribe.Batch(1)},
	{"Concurrency", handle, subscribe.Concurrency(1)},
	{"Attempts", handle, subscribe.Attempts(1)},
	{"Takeover", handle | project, subscribe.Takeover(time.Second)},
	{"Drain", handle, subscribe.Drain(0)},
	{"InOrder", handle, subscribe.InOrder()},
	{"Since", handle, subscribe.Since(time.Unix(1, 0))},
	{"Bootstrap", handle, subscribe.Bootstrap(new(client.Client))},
	{"BackOff", handle, subscribe.BackOff(func(int) time.Duration { return 0 })},
	{"Metrics", handle | project, prom.Metrics(prometheus.NewRegistry())},
}

// offline returns functions that take options. None of them has a server, so one that accepts its
// options would wait, but its context has ended. The last ones are of a projection.
func offline(t *testing.T) (handlers, projections map[string]func(...subscribe.Option) error) {
	t.Helper()
	nc, err := nats.Connect("nats://127.0.0.1:1", nats.RetryOnFailedConnect(true))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/none")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	apply := func(context.Context, pgx.Tx, []event.Event) error { return nil }
	quiet := subscribe.Log(slog.New(slog.DiscardHandler))
	return map[string]func(...subscribe.Option) error{
			"Handle": func(opts ...subscribe.Option) error {
				return subscribe.Handle(ended, nc, "mailer", "follow.*", func(context.Context, subscribe.Event[event.Edge]) error {
					return nil
				}, slices.Insert(opts, 0, quiet)...)
			},
			"HandlerDeadLetters": func(opts ...subscribe.Option) error {
				_, err := subscribe.HandlerDeadLetters(nc, opts...)
				return err
			},
		}, map[string]func(...subscribe.Option) error{
			"Project": func(opts ...subscribe.Option) error {
				return projector.Project(ended, nc, pool, "search", apply, slices.Insert(opts, 0, quiet)...)
			},
			"DeadLetters": func(opts ...subscribe.Option) error {
				_, err := projector.DeadLetters(pool, "search", apply, opts...)
				return err
			},
			"Lag": func(opts ...subscribe.Option) error {
				if _, err := projector.Lag(ended, nc, pool, "search", opts...); !errors.Is(err, context.Canceled) {
					return err
				}
				return nil
			},
		}
}

// TestEachFunctionTakesItsOptionsAndRefusesOthersAtOnce: an option without effect is a mistake that
// nobody would notice later.
func TestEachFunctionTakesItsOptionsAndRefusesOthersAtOnce(t *testing.T) {
	handlers, projections := offline(t)
	for _, o := range options {
		for of, functions := range map[int]map[string]func(...subscribe.Option) error{handle: handlers, project: projections} {
			for name, call := range functions {
				err := call(o.option)
				if o.of&of != 0 && err != nil {
					t.Errorf("%s refuses %s: %v", name, o.name, err)
				}
				if o.of&of == 0 && (!errors.Is(err, subscribe.ErrOption) || !strings.Contains(err.Error(), o.name)) {
					t.Errorf("%s with %s: %v, want ErrOption with its name", name, o.name, err)
				}
			}
		}
	}
}

func TestTheListOfOptionsIsComplete(t *testing.T) {
	found := 0
	for _, file := range []string{"options.go", "prom/prom.go"} {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Type.Results == nil || !fn.Name.IsExported() {
				continue
			}
			if of := types.ExprString(fn.Type.Results.List[0].Type); of != "Option" && of != "subscribe.Option" {
				continue
			}
			found++
			if options[min(found, len(options))-1].name != fn.Name.Name {
				t.Errorf("option %d is %s, and not of the list", found, fn.Name.Name)
			}
		}
	}
	if found != len(options) {
		t.Errorf("%d options, %d in the list", found, len(options))
	}
}

func TestAValueWithoutAMeaningIsRefusedAtOnce(t *testing.T) {
	handlers, projections := offline(t)
	for _, c := range []struct {
		name string
		call func(...subscribe.Option) error
		opts []subscribe.Option
		want error
	}{
		{"Timeout", handlers["Handle"], []subscribe.Option{subscribe.Timeout(0)}, subscribe.ErrOption},
		{"Timeout", projections["Project"], []subscribe.Option{subscribe.Timeout(-1)}, subscribe.ErrOption},
		{"Takeover", handlers["Handle"], []subscribe.Option{subscribe.Takeover(time.Second - 1)}, subscribe.ErrOption},
		{"Concurrency", handlers["Handle"], []subscribe.Option{subscribe.Concurrency(0)}, subscribe.ErrOption},
		{"Attempts", handlers["Handle"], []subscribe.Option{subscribe.Attempts(0)}, subscribe.ErrOption},
		{"Drain", handlers["Handle"], []subscribe.Option{subscribe.Drain(-1)}, subscribe.ErrOption},
		{"Tenant", handlers["Handle"], []subscribe.Option{subscribe.Tenant(-1)}, subscribe.ErrOption},
		{"BackOff", handlers["Handle"], []subscribe.Option{subscribe.BackOff(nil)}, subscribe.ErrOption},
		{"Log", handlers["Handle"], []subscribe.Option{subscribe.Log(nil)}, subscribe.ErrOption},
		{"Kinds", projections["Project"], []subscribe.Option{subscribe.Kinds(nil)}, subscribe.ErrOption},
		{"Upstreams", projections["Project"], []subscribe.Option{subscribe.Upstreams(nil)}, subscribe.ErrOption},
		{"Batch", projections["Project"], []subscribe.Option{subscribe.Batch(0)}, subscribe.ErrOption},
		{"Batch", projections["Project"], []subscribe.Option{subscribe.Batch(20001)}, subscribe.ErrOption},
		{"Since", handlers["Handle"], []subscribe.Option{subscribe.Since(time.Unix(1, 0)), subscribe.Tenant(7)}, subscribe.ErrOption},
		{"Bootstrap", handlers["Handle"], []subscribe.Option{subscribe.Bootstrap()}, subscribe.ErrOption},
		{"Bootstrap", handlers["Handle"], []subscribe.Option{subscribe.Bootstrap(nil)}, subscribe.ErrOption},
		{"Bootstrap", handlers["Handle"], []subscribe.Option{subscribe.Bootstrap(new(client.Client)), subscribe.Tenant(7)},
			subscribe.ErrOption},
		{"Bootstrap", handlers["Handle"], []subscribe.Option{subscribe.Bootstrap(new(client.Client)), subscribe.Since(time.Unix(1, 0))},
			subscribe.ErrOption},
		{"Only", projections["Project"], []subscribe.Option{subscribe.Only()}, subscribe.ErrType},
		{"ordr", projections["Project"], []subscribe.Option{subscribe.Only("follow", "ordr")}, subscribe.ErrType},
		{"ordr", projections["DeadLetters"], []subscribe.Option{subscribe.Only("ordr")}, subscribe.ErrType},
	} {
		if err := c.call(c.opts...); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.name) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// TestAChangedFilterIsRefusedUntilTheProjectionBeginsAgain: events that the former filter left out
// would be missing forever.
func TestAChangedFilterIsRefusedUntilTheProjectionBeginsAgain(t *testing.T) {
	r := newRig(t, 1)
	ctx := t.Context()
	pool := r.logged()
	if err := projector.Migrate(ctx, pool); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(ctx)
	project := func(name string, opts ...subscribe.Option) error {
		t.Helper()
		health := &subscribe.Health{}
		p := r.start(func(ctx context.Context) error {
			return projector.Project(ctx, r.nc, pool, name, logbook, append(opts, subscribe.Log(testkit.Logger(t)),
				subscribe.Report(health))...)
		})
		r.await("an answer", func() (bool, error) {
			select {
			case <-p.done:
				return true, nil
			default:
				return health.Ready(ctx) == nil, nil
			}
		})
		return p.stop()
	}
	for _, c := range []struct {
		name string
		only []subscribe.Option
		want error
	}{
		{"search", []subscribe.Option{subscribe.Only("follow", "like")}, nil},
		{"search", []subscribe.Option{subscribe.Only("like", "follow")}, nil},
		{"search", []subscribe.Option{subscribe.Only("like")}, subscribe.ErrFilter},
		{"search", []subscribe.Option{subscribe.Only("like", "follow", "comment")}, subscribe.ErrFilter},
		{"search", nil, subscribe.ErrFilter},
		{"other", nil, nil},
		{"other", []subscribe.Option{subscribe.Only("like")}, subscribe.ErrFilter},
		{"other", nil, nil},
	} {
		if err := project(c.name, c.only...); !errors.Is(err, c.want) {
			t.Errorf("%s with %d options: %v, want %v", c.name, len(c.only), err, c.want)
		}
	}
	if err := projector.Replay(ctx, pool, "search", func(context.Context, pgx.Tx) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := project("search", subscribe.Only("like")); err != nil {
		t.Errorf("another filter after Replay: %v", err)
	}
	cancel()
	if err := projector.Project(ended, r.nc, pool, "search", logbook); err != nil {
		t.Errorf("a context that has ended: %v, want nil", err)
	}
}
