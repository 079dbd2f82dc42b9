package api

import (
	"cmp"
	"context"
	"encoding/json"
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

// target is what edges lead from and to, and what has children: an object, or a child that edges
// lead to. Its plural names it in paths.
type target struct {
	name, plural string
	ends         []counted     // the ends of edges of all kinds
	under        []kinds.Child // the children of all kinds
	to           []kinds.Edge  // the kinds whose edges lead to it
}

// counted is one count of an object: the edges of a kind at one end.
type counted struct {
	k        kinds.Edge
	list     string
	incoming bool
}

// of returns the count.
func (c counted) of(both followercounts.Counts) int64 {
	if c.incoming {
		return both.Incoming
	}
	return both.Outgoing
}

// aggregates returns the attributes that the count adds up.
func (c counted) aggregates() []string {
	if !c.incoming {
		return nil
	}
	return c.k.Aggregates()
}

func (s *server) targets() (all []target) {
	for _, name := range slices.Sorted(maps.Keys(s.kinds.Objects)) {
		all = append(all, s.target(name))
	}
	for _, k := range s.kinds.AllChildren() {
		all = append(all, s.target(k.Name))
	}
	return all
}

// target returns what there is about an object or a kind of children.
func (s *server) target(name string) target {
	t := target{name: name, plural: s.kinds.Plural(name),
		under: slices.DeleteFunc(s.kinds.AllChildren(), func(k kinds.Child) bool { return k.Parent != name })}
	for _, k := range s.kinds.AllEdges() {
		if k.To == name {
			t.ends = append(t.ends, counted{k, k.Reverse, true})
			t.to = append(t.to, k)
		}
		if k.From == name {
			t.ends = append(t.ends, counted{k, k.Forward, false})
		}
	}
	return t
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

func (s *server) parseIDs(t target, all []userID) ([]event.ID, error) {
	ids := make([]event.ID, len(all))
	for i, v := range all {
		var err error
		if ids[i], err = s.parseID(s.kinds.IDs(t.name), fmt.Sprintf("#/ids/%d", i), string(v)); err != nil {
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

// narrow gives the ids in the schema of a body the form of the target's ids.
func (s *server) narrow(t target, sc *huma.Schema) {
	if form := s.kinds.IDs(t.name); form != "" && form != kinds.String {
		ids := sc.Properties["ids"]
		narrowID(ids.Items, form, "7")
		ids.Examples = []any{[]any{exampleID(form, "7"), exampleID(form, "42")}}
	}
}

// countRoutes registers the counts of an object and of many: the edges of all kinds by end, and the
// children of all kinds.
func (s *server) countRoutes(t target) {
	schema, what := camel(t.name)+"Counts", "edges"
	members := edgeCountMembers(t.ends, true)
	for _, c := range t.ends {
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
		description: fromAProjection + " " + unknown, projected: true, answer: one, naming: s.ownerNaming(t.name),
	}, func(ctx context.Context, in *ObjectPath) (*anyOutput, error) {
		counts, asOf, err := s.counts(ctx, t, []event.ID{in.ID.ID})
		if err != nil {
			return nil, err
		}
		counts[0]["as_of"] = asOf
		return &anyOutput{Body: counts[0]}, nil
	})

	item := s.schema(camel(t.name)+"CountsItem", nil, objectCounts{}, property("counts", objectOf(members, true), true))
	many := t.route("count", "counts", s.schema(camel(t.name)+"CountsList", nil, objectList{},
		func(sc *huma.Schema) { sc.Properties["items"].Items = item }),
		fmt.Sprintf("Count the %s of up to %d %s", what, maxObjects, t.plural), unknown)
	many.body = jsonBody(s.schema(camel(t.name)+"IDs", nil, ObjectIDs{}, func(sc *huma.Schema) { s.narrow(t, sc) }), true)
	register(s, many, func(ctx context.Context, in *edgeCheckInput) (*anyOutput, error) {
		var body ObjectIDs
		if err := json.Unmarshal(*in.Body, &body); err != nil {
			return nil, err
		}
		ids, err := s.parseIDs(t, body.IDs)
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
	var from []string
	if len(t.ends) > 0 {
		from = append(from, followercounts.Name)
	}
	if len(t.under) > 0 {
		from = append(from, threadcache.Name)
	}
	read, err := s.readProjection(ctx, callerOf(ctx).TenantID, from[0], func(tx pgx.Tx) error {
		var err error
		if counts, err = edgeCounts(ctx, tx, t.ends, ids); err != nil {
			return err
		}
		return childCounts(ctx, tx, t.under, ids, counts)
	}, from[1:]...)
	return counts, read.asOf, err
}

// edgeCounts returns the counts of each object, in the order of ids, by the names of the lists.
// What edges add up to is by the same names in aggregates.
func edgeCounts(ctx context.Context, tx pgx.Tx, ends []counted, ids []event.ID) ([]map[string]any, error) {
	counts := make([]map[string]any, len(ids))
	for i := range counts {
		counts[i] = make(map[string]any)
	}
	var names, aggregated []string
	for _, c := range ends {
		names = append(names, c.k.Name)
		if len(c.aggregates()) > 0 {
			aggregated = append(aggregated, c.k.Name)
		}
	}
	names = slices.Compact(names) // both ends of a kind may be this object
	if len(names) == 0 {
		return counts, nil
	}
	all, err := followercounts.ReadCounts(ctx, tx, names, ids)
	if err != nil {
		return nil, err
	}
	var sums map[followercounts.Object][]followercounts.Aggregate
	if len(aggregated) > 0 {
		if sums, err = followercounts.ReadAggregates(ctx, tx, aggregated, ids); err != nil {
			return nil, err
		}
	}
	for i, id := range ids {
		added := make(map[string]any)
		for _, c := range ends {
			o := followercounts.Object{Kind: c.k.Name, ID: id}
			counts[i][c.list] = c.of(all[o])
			if len(c.aggregates()) > 0 {
				added[c.list] = edgeAggregates(c.k, sums[o])
			}
		}
		if len(added) > 0 {
			counts[i]["aggregates"] = added
		}
	}
	return counts, nil
}

// edgeAggregate is what edges add up to by one attribute.
type edgeAggregate struct {
	Count  int64            `json:"count"`
	Sum    *int64           `json:"sum,omitempty"`    // of an integer
	Values map[string]int64 `json:"values,omitempty"` // of an enum
}

// edgeAggregates returns the aggregates of a kind's edges to an object by the names of attributes,
// with each value of an enum.
func edgeAggregates(k kinds.Edge, sums []followercounts.Aggregate) map[string]*edgeAggregate {
	all := make(map[string]*edgeAggregate)
	for _, name := range k.Aggregates() {
		a := &edgeAggregate{}
		if k.Attributes[name].Type == kinds.Integer {
			a.Sum = new(int64)
		}
		for _, v := range k.Attributes[name].Enum {
			if a.Values == nil {
				a.Values = make(map[string]int64)
			}
			a.Values[fmt.Sprint(v)] = 0
		}
		all[name] = a
	}
	for _, s := range sums {
		a := all[s.Attribute]
		switch _, value := a.values()[s.Value]; {
		case a == nil: // an earlier version of the kind may have had other attributes
		case s.Value == "" && a.Sum != nil:
			a.Count, *a.Sum = s.Count, s.Sum.Sum
		case value:
			a.Values[s.Value] = s.Count
			if a.Sum == nil {
				a.Count += s.Count
			}
		}
	}
	return all
}

func (a *edgeAggregate) values() map[string]int64 {
	if a == nil {
		return nil
	}
	return a.Values
}

// edgeCountMembers returns the schemas of the members of edgeCounts. With all, none is missing.
func edgeCountMembers(ends []counted, all bool) map[string]*huma.Schema {
	members, added := make(map[string]*huma.Schema), make(map[string]*huma.Schema)
	for _, c := range ends {
		members[c.list] = integer("")
		if each := c.aggregates(); len(each) > 0 {
			attributes := make(map[string]*huma.Schema)
			for _, name := range each {
				attributes[name] = edgeAggregateSchema(c.k.Attributes[name])
			}
			added[c.list] = objectOf(attributes, true)
		}
	}
	if len(added) > 0 {
		members["aggregates"] = objectOf(added, all)
		members["aggregates"].Description = "What the edges of each list add up to, by attribute."
	}
	return members
}

func edgeAggregateSchema(a kinds.Attribute) *huma.Schema {
	members := map[string]*huma.Schema{"count": integer("The number of edges with the attribute.")}
	if a.Type == kinds.Integer {
		members["sum"] = integer("The sum of their values; divide by count for the average.")
	}
	if len(a.Enum) > 0 {
		members["values"] = &huma.Schema{Type: huma.TypeObject, AdditionalProperties: integer(""),
			Description: "The number of edges with each value of the enum."}
	}
	return objectOf(members, true)
}

func integer(description string) *huma.Schema {
	return &huma.Schema{Type: huma.TypeInteger, Format: "int64", Description: description}
}

// aggregateCount has the count and the sum of an attribute of an object's visible children. Sum
// divided by count is the average.
type aggregateCount struct {
	Count int64 `json:"count"`
	Sum   int64 `json:"sum"`
}

// childCountSchema returns the schema of the counts of a kind's children.
func (s *server) childCountSchema(k kinds.Child) *huma.Schema {
	members := map[string]*huma.Schema{"total": integer("The number ever written, deleted ones included."),
		"visible": integer("The number of visible ones.")}
	if names := k.Aggregates(); len(names) > 0 {
		each := make(map[string]*huma.Schema)
		for _, name := range names {
			each[name] = objectOf(map[string]*huma.Schema{"count": integer("The number of visible ones with the attribute."),
				"sum": integer("The sum of their values; divide by count for the average.")}, true)
		}
		members["aggregates"] = objectOf(each, true)
	}
	return objectOf(members, true)
}

// childCounts adds the counts of the objects' children to counts, by the plurals of their kinds.
func childCounts(ctx context.Context, tx pgx.Tx, under []kinds.Child, ids []event.ID, counts []map[string]any) error {
	if len(under) == 0 {
		return nil
	}
	var names, aggregated []string
	for _, k := range under {
		names = append(names, k.Name)
		if len(k.Aggregates()) > 0 {
			aggregated = append(aggregated, k.Name)
		}
	}
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
