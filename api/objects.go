package api

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
)

// maxObjects is the most objects that one request asks about. The tags of the bodies have it too.
const maxObjects = 200

// target is what edges lead from and to, and what has children: an object, which its plural names
// in paths.
type target struct {
	name, plural string
	ends         []counted     // the ends of edges of all kinds
	under        []kinds.Child // the children of all kinds
	to           []kinds.Edge  // the kinds whose edges lead to it
}

// counted is one count of an object: the edges of a kind at one end.
type counted struct {
	k    kinds.Edge
	list string
	of   func(followercounts.Counts) int64
}

func (s *server) targets() (all []target) {
	for _, name := range slices.Sorted(maps.Keys(s.kinds.Objects)) {
		t := target{name: name, plural: s.kinds.Objects[name],
			under: slices.DeleteFunc(s.kinds.AllChildren(), func(k kinds.Child) bool { return k.Parent != name })}
		for _, k := range s.kinds.AllEdges() {
			if k.To == name {
				t.ends = append(t.ends, counted{k, k.Reverse, func(c followercounts.Counts) int64 { return c.Incoming }})
				t.to = append(t.to, k)
			}
			if k.From == name {
				t.ends = append(t.ends, counted{k, k.Forward, func(c followercounts.Counts) int64 { return c.Outgoing }})
			}
		}
		all = append(all, t)
	}
	return all
}

// objectRoutes registers the routes that answer about objects for all kinds at once.
func (s *server) objectRoutes() {
	for _, t := range s.targets() {
		if len(t.ends)+len(t.under) > 0 {
			s.countRoutes(t)
		}
		if len(t.to) > 0 {
			s.checkRoute(t)
		}
	}
}

// route returns a route about many objects.
func (t target) route(verb, path string, answer *huma.Schema, summary, description string) route {
	return route{
		method: http.MethodPost, path: "/v1/" + t.plural + ":" + path, id: verb + "-" + dashed(t.plural), tag: capital(t.plural),
		role: tokens.RoleRead, status: http.StatusOK, projected: true, answer: answer, codes: writing(),
		summary: summary, description: fromAProjection + " " + description,
	}
}

// objectOf returns the schema of an object with these members.
func objectOf(members map[string]*huma.Schema, required bool) *huma.Schema {
	o := &huma.Schema{Type: huma.TypeObject, Properties: members, AdditionalProperties: false}
	if required {
		o.Required = slices.Sorted(maps.Keys(members))
	}
	o.PrecomputeMessages()
	return o
}

// ObjectIDs are the ids of the objects that a request asks about. It is exported because the
// framework skips embedded members that are not.
type ObjectIDs struct {
	IDs []userID `json:"ids" minItems:"1" maxItems:"200" nullable:"false" doc:"1 to 200 ids. A repeated id gets a repeated answer." example:"[\"7\",\"42\"]"`
}

func (s *server) parseIDs(all []userID) ([]event.ID, error) {
	ids := make([]event.ID, len(all))
	for i, v := range all {
		var err error
		if ids[i], err = s.parseID(fmt.Sprintf("#/ids/%d", i), string(v)); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// objectList answers about many objects.
type objectList struct {
	Items []any      `json:"items" nullable:"false" doc:"One per id, in the order of the request."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"The answer includes every write that had committed by this time, except parked and scheduled events."`
}

type countsBody struct {
	AsOf event.Time `json:"as_of" format:"date-time" doc:"The counts include every write that had committed by this time, except parked and scheduled events."`
}

// objectCounts are the counts of one object among many.
type objectCounts struct {
	ID     event.ID       `json:"id"`
	Counts map[string]any `json:"counts"`
}

type countsInput struct{ Body ObjectIDs }

// countRoutes registers the counts of an object and of many: the edges of all kinds by end, and the
// children of all kinds.
func (s *server) countRoutes(t target) {
	schema, what := camel(t.name)+"Counts", "edges"
	members := make(map[string]*huma.Schema)
	for _, c := range t.ends {
		members[c.list] = &huma.Schema{Type: huma.TypeInteger, Format: "int64"}
		schema = cmp.Or(wordsOf(c.k.Name).schemas["Counts"], schema)
	}
	for _, k := range t.under {
		members[k.Plural] = s.childCountSchema(k)
		what = "edges and children"
	}
	one := s.schema(schema, nil, countsBody{}, func(sc *huma.Schema) {
		for _, name := range slices.Sorted(maps.Keys(members)) {
			property(name, members[name], true)(sc)
		}
	})
	unknown := "An unknown " + t.name + " counts 0."
	register(s, route{
		method: http.MethodGet, path: "/v1/" + t.plural + "/{owner_id}/counts", id: "get-" + dashed(t.name) + "-counts",
		tag: capital(t.plural), role: tokens.RoleRead, status: http.StatusOK, summary: "Count the " + what + " of " + a(t.name),
		description: fromAProjection + " " + unknown, projected: true, answer: one, naming: ownerNaming(t.name),
	}, func(ctx context.Context, in *ObjectPath) (*anyOutput, error) {
		counts, asOf, err := s.counts(ctx, t, []event.ID{in.ID.ID})
		if err != nil {
			return nil, err
		}
		counts[0]["as_of"] = asOf
		return &anyOutput{Body: counts[0]}, nil
	})

	item := s.schema(camel(t.name)+"CountsItem", nil, objectCounts{}, property("counts", objectOf(members, true), true))
	register(s, t.route("count", "counts", s.schema(camel(t.name)+"CountsList", nil, objectList{},
		func(sc *huma.Schema) { sc.Properties["items"].Items = item }),
		fmt.Sprintf("Count the %s of up to %d %s", what, maxObjects, t.plural), unknown),
		func(ctx context.Context, in *countsInput) (*anyOutput, error) {
			ids, err := s.parseIDs(in.Body.IDs)
			if err != nil {
				return nil, err
			}
			counts, asOf, err := s.counts(ctx, t, ids)
			items := make([]any, len(counts))
			for i, c := range counts {
				items[i] = objectCounts{ids[i], c}
			}
			return &anyOutput{Body: objectList{items, asOf}}, err
		})
}

// counts returns the counts of each object, in the order of ids, by the names of the lists and the
// plurals of the children. as_of is the older one of the projections that they come from.
func (s *server) counts(ctx context.Context, t target, ids []event.ID) (counts []map[string]any, asOf event.Time, err error) {
	counts = make([]map[string]any, len(ids))
	for i := range counts {
		counts[i] = make(map[string]any)
	}
	if len(t.ends) > 0 {
		var names []string
		for _, c := range t.ends {
			names = append(names, c.k.Name)
		}
		names = slices.Compact(names) // both ends of a kind may be this object
		asOf, err = s.project(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
			all, err := followercounts.ReadCounts(ctx, tx, names, ids)
			for i, id := range ids {
				for _, c := range t.ends {
					counts[i][c.list] = c.of(all[followercounts.Object{Kind: c.k.Name, ID: id}])
				}
			}
			return err
		})
	}
	if err != nil || len(t.under) == 0 {
		return counts, asOf, err
	}
	children, err := s.childCounts(ctx, t.under, ids, counts)
	if len(t.ends) == 0 || children.Before(asOf.Time) {
		asOf = children
	}
	return counts, asOf, err
}

// aggregateCount has the count and the sum of an attribute of an object's visible children. Sum
// divided by count is the average.
type aggregateCount struct {
	Count int64 `json:"count"`
	Sum   int64 `json:"sum"`
}

// childCountSchema returns the schema of the counts of a kind's children.
func (s *server) childCountSchema(k kinds.Child) *huma.Schema {
	number := func(text string) *huma.Schema {
		return &huma.Schema{Type: huma.TypeInteger, Format: "int64", Description: text}
	}
	members := map[string]*huma.Schema{"total": number("The number ever written, deleted ones included."),
		"visible": number("The number of visible ones.")}
	if names := k.Aggregates(); len(names) > 0 {
		each := make(map[string]*huma.Schema)
		for _, name := range names {
			each[name] = objectOf(map[string]*huma.Schema{"count": number("The number of visible ones with the attribute."),
				"sum": number("The sum of their values; divide by count for the average.")}, true)
		}
		members["aggregates"] = objectOf(each, true)
	}
	return objectOf(members, true)
}

// childCounts adds the counts of the objects' children to counts, by the plurals of their kinds.
func (s *server) childCounts(ctx context.Context, under []kinds.Child, ids []event.ID, counts []map[string]any) (event.Time, error) {
	var names, aggregated []string
	for _, k := range under {
		names = append(names, k.Name)
		if len(k.Aggregates()) > 0 {
			aggregated = append(aggregated, k.Name)
		}
	}
	return s.project(ctx, callerOf(ctx).TenantID, threadcache.Name, func(tx pgx.Tx) error {
		sums, err := threadcache.ReadSummaries(ctx, tx, names, ids)
		var all map[threadcache.Object][]threadcache.Aggregate
		if err == nil && len(aggregated) > 0 {
			all, err = threadcache.ReadAggregates(ctx, tx, aggregated, ids)
		}
		for i, id := range ids {
			for _, k := range under {
				o := threadcache.Object{Kind: k.Name, ID: id}
				counts[i][k.Plural] = childCount(k, sums[o], all[o])
			}
		}
		return err
	})
}

// childCount returns the counts of the children of a kind under an object.
func childCount(k kinds.Child, sum threadcache.Summary, aggregates []threadcache.Aggregate) map[string]any {
	count := map[string]any{"total": sum.Total, "visible": sum.Visible}
	names := k.Aggregates()
	if len(names) == 0 {
		return count
	}
	each := make(map[string]aggregateCount)
	for _, name := range names {
		each[name] = aggregateCount{}
	}
	for _, a := range aggregates {
		if _, ok := each[a.Attribute]; ok { // an earlier version of the kind may have had other attributes
			each[a.Attribute] = aggregateCount{a.Count, a.Sum}
		}
	}
	count["aggregates"] = each
	return count
}
