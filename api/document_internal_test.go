package api

import (
	"encoding/json"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

// newIdle returns an API of the built-in kinds that connects to nothing.
func newIdle(t testing.TB) func() *Handler {
	pool, err := pgxpool.New(t.Context(), "host=127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	cfg := Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 128 << 10, MaxBatchBytes: 4 << 20, RequestTimeout: time.Second,
		AddressConnections: 1000, MaxRequests: 512, MaxWait: time.Second}
	return func() *Handler {
		h, err := New(cfg, Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool,
			Fleet: []projections.Projection{followercounts.New(kinds.Builtin), threadcache.New(kinds.Builtin)},
			Log:   slog.New(slog.DiscardHandler), Reg: prometheus.NewRegistry()})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
}

// TestTheFrameworkChecksThePatternsOfRequestsAlone reads the schemas of every operation. A pattern
// that is only in the document checks no request, and one that is compiled for an answer checks
// nothing and makes New slow.
func TestTheFrameworkChecksThePatternsOfRequestsAlone(t *testing.T) {
	t.Parallel()
	doc := newIdle(t)().Handler.(*router).now.Load().described().api.OpenAPI()
	checked, unchecked := 0, 0
	var walk func(request bool, schema *huma.Schema, within ...*huma.Schema)
	walk = func(request bool, schema *huma.Schema, within ...*huma.Schema) {
		if schema != nil && schema.Ref != "" {
			schema = doc.Components.Schemas.SchemaFromRef(schema.Ref)
		}
		if schema == nil || slices.Contains(within, schema) {
			return
		}
		switch beside := schema.Extensions["pattern"] != nil; {
		case request && beside:
			t.Errorf("no request is checked for the pattern %v", schema.Extensions["pattern"])
		case !request && schema.Pattern != "":
			t.Errorf("the framework compiles the pattern %s of an answer", schema.Pattern)
		case request && schema.Pattern != "":
			checked++
		case beside:
			unchecked++
		}
		within = append(within, schema)
		for _, s := range slices.Concat(slices.Collect(maps.Values(schema.Properties)), schema.OneOf, schema.AnyOf,
			schema.AllOf, []*huma.Schema{schema.Items}) {
			walk(request, s, within...)
		}
	}
	for _, item := range doc.Paths {
		for _, op := range operationsAt(item) {
			for _, p := range op.Parameters {
				walk(true, p.Schema)
			}
			if op.RequestBody != nil {
				for _, content := range op.RequestBody.Content {
					walk(true, content.Schema)
				}
			}
			for _, answer := range op.Responses {
				for _, content := range answer.Content {
					walk(false, content.Schema)
				}
			}
		}
	}
	if checked == 0 || unchecked == 0 {
		t.Errorf("found %d patterns of requests and %d of answers", checked, unchecked)
	}
}

// TestRoutesThatServeKeepNoAnswers looks for what the documents alone need: it would make the
// garbage collector work while writes come in. Every schema that a request refers to remains.
func TestRoutesThatServeKeepNoAnswers(t *testing.T) {
	t.Parallel()
	s := newIdle(t)().Handler.(*router).now.Load()
	doc, full := s.api.OpenAPI(), s.described().api.OpenAPI()
	for path, item := range doc.Paths {
		for _, op := range operationsAt(item) {
			if op.Responses != nil {
				t.Errorf("%s %s keeps what the documents say of its answers", op.Method, path)
			}
		}
	}
	kept, all := doc.Components.Schemas.Map(), full.Components.Schemas.Map()
	text, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range regexp.MustCompile(`"#/components/schemas/(\w+)"`).FindAllStringSubmatch(string(text), -1) {
		if kept[to[1]] == nil {
			t.Errorf("a request refers to %s, which is gone", to[1])
		}
	}
	if kept["Problem"] != nil || kept["FollowOperation"] == nil || all["Problem"] == nil || len(all) < 2*len(kept) {
		t.Errorf("kept %v of %d schemas", slices.Sorted(maps.Keys(kept)), len(all))
	}
}

func BenchmarkNew(b *testing.B) {
	b.ReportAllocs()
	for build := newIdle(b); b.Loop(); {
		build()
	}
}
