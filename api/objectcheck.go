package api

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
)

// objectCheck is the body of a check of many objects. It also has the id of the origin, in a member
// with the name of its type: user_id.
type objectCheck struct {
	ObjectIDs
	Edges []string `json:"edges,omitempty" minItems:"1" nullable:"false" doc:"Kinds of edges. Default: all that lead from the origin."`
}

// objectLinks says which edges lead from the origin of a check to one object.
type objectLinks struct {
	ID    event.ID       `json:"id"`
	Edges map[string]any `json:"edges"` // links
}

// link says whether an edge exists.
type link struct {
	Active       bool            `json:"active" doc:"True if the edge exists." example:"true"`
	Reversed     *bool           `json:"reversed,omitempty" doc:"True if the edge in the other direction exists." example:"false"`
	PositionedAt *event.Time     `json:"positioned_at,omitempty" format:"date-time" doc:"When active last became true; absent if it is false."`
	Attributes   json.RawMessage `json:"attributes,omitempty"`
}

func linkOf(k kinds.Edge, r followercounts.Relation) link {
	l := link{Active: r.There, Attributes: r.Attributes}
	if k.From == k.To {
		l.Reversed = &r.Back
	}
	if r.There {
		l.PositionedAt = &event.Time{Time: r.PositionedAt}
	}
	return l
}

// origins returns the objects from which edges lead to the target.
func (t target) origins() []string {
	all := make(map[string]bool)
	for _, k := range t.to {
		all[k.From] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// checkRoute registers the check of many objects: which edges of all kinds lead from one origin to
// each.
func (s *server) checkRoute(t target) {
	origins, links, names := t.origins(), make(map[string]*huma.Schema), make([]any, len(t.to))
	for i, k := range t.to {
		names[i] = k.Name
		links[k.Name] = s.schema(camel(k.Name)+"Link", nil, link{}, func(sc *huma.Schema) {
			if k.From == k.To {
				sc.Required = append(sc.Required, "reversed")
			} else {
				without("reversed")(sc)
			}
			if len(k.Attributes) > 0 {
				attributes := attributesSchema(k.Attributes, answered)
				attributes.Description = "Absent if active is false."
				property("attributes", attributes, false)(sc)
			} else {
				without("attributes")(sc)
			}
		})
	}
	body := s.schema(camel(t.name)+"CheckInput", nil, objectCheck{}, func(sc *huma.Schema) {
		s.narrow(t, sc)
		sc.Properties["edges"].Items = &huma.Schema{Type: huma.TypeString, Enum: names}
		for _, origin := range origins {
			id := idSchema(s.kinds.IDs(origin))
			id.Description = "The " + origin + " that the edges lead from."
			if form := s.kinds.IDs(origin); form == kinds.UUID {
				id.Examples = []any{exampleID(form, "7")}
			}
			property(origin+"_id", id, len(origins) == 1)(sc)
		}
	})
	edges := objectOf(links, false)
	edges.Description = "By kind. It has the kinds of the request."
	item := s.schema(camel(t.name)+"Check", nil, objectLinks{}, property("edges", edges, true))
	description := "An unknown object has no edges."
	if len(origins) > 1 {
		description = "The body has one of `" + strings.Join(origins, "_id`, `") + "_id`. " + description
	}
	r := t.route("check", "check", s.schema(camel(t.name)+"CheckList", nil, objectList{},
		func(sc *huma.Schema) { sc.Properties["items"].Items = item }),
		fmt.Sprintf("Check which edges lead from %s to each of up to %d %s", a(strings.Join(origins, " or ")), maxObjects, t.plural),
		description)
	r.body = jsonBody(body, true)
	register(s, r, func(ctx context.Context, in *edgeCheckInput) (*anyOutput, error) { return s.check(ctx, t, *in.Body) })
}

// origin reads the origin of a check, and returns the kinds to check with it.
func (s *server) origin(t target, body json.RawMessage, asked []string) (from event.ID, all []kinds.Edge, err error) {
	refuse := func(pointer, detail string) error {
		return s.problems.problem(codeValidation, "validation failed", FieldError{Detail: detail, Pointer: pointer})
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		return "", nil, err
	}
	var origin, text string
	for _, name := range t.origins() {
		raw, ok := members[name+"_id"]
		switch {
		case ok && origin != "":
			return "", nil, refuse("#", "expected either "+origin+"_id or "+name+"_id")
		case ok:
			origin, err = name, json.Unmarshal(raw, &text)
		}
	}
	if origin == "" {
		return "", nil, refuse("#", "expected "+strings.Join(t.origins(), "_id or ")+"_id")
	}
	if err == nil {
		from, err = s.parseID(s.kinds.IDs(origin), "#/"+origin+"_id", text)
	}
	if err != nil {
		return "", nil, err
	}
	all = slices.DeleteFunc(slices.Clone(t.to), func(k kinds.Edge) bool {
		return k.From != origin || len(asked) > 0 && !slices.Contains(asked, k.Name)
	})
	for i, name := range asked {
		if !slices.ContainsFunc(all, func(k kinds.Edge) bool { return k.Name == name }) {
			return "", nil, refuse(fmt.Sprintf("#/edges/%d", i), "the edges of this kind lead from another object than "+a(origin))
		}
	}
	return from, all, nil
}

func (s *server) check(ctx context.Context, t target, raw json.RawMessage) (*anyOutput, error) {
	var body objectCheck
	if err := json.Unmarshal(raw, &body); err != nil {
		return nil, err
	}
	from, all, err := s.origin(t, raw, body.Edges)
	if err != nil {
		return nil, err
	}
	ids, err := s.parseIDs(t, body.IDs)
	if err != nil {
		return nil, err
	}
	pairs, items := make([]followercounts.Pair, len(ids)), make([]any, len(ids))
	for i, id := range ids {
		pairs[i] = followercounts.Pair{From: from, To: id}
	}
	read, err := s.readProjection(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		relations, err := followercounts.Relations(ctx, tx, all, pairs)
		for i, rs := range relations {
			links := make(map[string]any, len(all))
			for n, k := range all {
				links[k.Name] = linkOf(k, rs[n])
			}
			items[i] = objectLinks{ids[i], links}
		}
		return err
	})
	return &anyOutput{Body: objectList{items, read.asOf}}, err
}
