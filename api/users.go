package api

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
)

// Edge is one line of a followers or following list.
type Edge struct {
	UserID       event.ID   `json:"user_id"`
	PositionedAt event.Time `json:"positioned_at" format:"date-time" doc:"When the edge last became active; the list is ordered by it, newest first."`

	attributes json.RawMessage // only of a kind with attributes
}

// EdgeList is one page.
type EdgeList struct {
	Items []Edge     `json:"items" nullable:"false"`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last page."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"The list includes every write that had committed by this time, except parked and scheduled events."`
}

// UserPath names a user.
type UserPath struct {
	ID id `path:"user_id" doc:"The user."`
}

// project reads a projection in one transaction of the tenant, on one snapshot, and returns the
// as_of of the snapshot.
func (s *server) project(ctx context.Context, tenant int64, consumer string, fn func(tx pgx.Tx) error) (event.Time, error) {
	progress, err := s.readProjection(ctx, tenant, consumer, fn)
	return event.Time{Time: progress.AsOf}, err
}

// edgeCursor is the content of a cursor of followers and following.
type edgeCursor struct {
	At   event.Time `json:"t"`
	User event.ID   `json:"u"`
}

// readList reads a page of a list, from memory if it is kept.
func (e *edgeRoutes) readList(ctx context.Context, d direction, of event.ID, in Page, filter string) (EdgeList, error) {
	tenant := callerOf(ctx).TenantID
	l := list{tenant: tenant, name: d.of + " " + d.list, of: of}
	if filter != "" {
		name, _ := e.k.Filter()
		l.name += " " + name + "=" + filter
	}
	var after *followercounts.EdgeCursor
	if in.Cursor != "" {
		var c edgeCursor
		if err := e.cursors.decode(l, in.Cursor, &c); err != nil {
			return EdgeList{}, err
		}
		after = &followercounts.EdgeCursor{PositionedAt: c.At.Time, ID: c.User}
	}
	key := pageKey{tenant, e.k.Name, d.name, of}
	keep := after == nil && filter == "" && e.k.Name == event.AggregateFollow && len(e.mustSee(ctx, followercounts.Name)) == 0
	if keep {
		if page, ok := e.pages.get(key, in.Limit); ok {
			return page, nil
		}
	}
	start := time.Now()
	var rows []followercounts.Edge
	progress, err := e.readProjection(ctx, tenant, followercounts.Name, func(tx pgx.Tx) (err error) {
		if d.name == listReverse {
			rows, err = followercounts.Incoming(ctx, tx, e.k, of, filter, after, in.Limit+1)
		} else {
			rows, err = followercounts.Outgoing(ctx, tx, e.k, of, after, in.Limit+1)
		}
		return err
	})
	if err != nil {
		return EdgeList{}, err
	}
	rows, next, err := newPage(e.server, l, in.Limit, rows, func(e followercounts.Edge) any {
		return edgeCursor{At: event.Time{Time: e.PositionedAt}, User: e.ID}
	})
	if err != nil {
		return EdgeList{}, err
	}
	page := EdgeList{Items: edgesOf(rows), Next: next, AsOf: event.Time{Time: progress.AsOf}}
	if keep {
		e.pages.put(key, in.Limit, page, progress.Offsets, start)
	}
	return page, nil
}

func edgesOf(rows []followercounts.Edge) []Edge {
	items := make([]Edge, len(rows))
	for i, e := range rows {
		items[i] = Edge{UserID: e.ID, PositionedAt: event.Time{Time: e.PositionedAt}, attributes: e.Attributes}
	}
	return items
}

// countRoutes registers the counts of each object: its edges of all kinds, by end, and its children
// of all kinds.
func (s *server) countRoutes() {
	for _, object := range slices.Sorted(maps.Keys(s.kinds.Objects)) {
		var ends []counted
		summary := "Count the edges of " + a(object)
		schema := camel(object) + "Counts"
		for _, k := range s.kinds.AllEdges() {
			if k.To == object {
				ends = append(ends, counted{k, k.Reverse, func(c followercounts.Counts) int64 { return c.Incoming }})
			}
			if k.From == object {
				ends = append(ends, counted{k, k.Forward, func(c followercounts.Counts) int64 { return c.Outgoing }})
			}
			if k.To == object || k.From == object {
				schema = cmp.Or(wordsOf(k.Name).schemas["Counts"], schema)
			}
		}
		under := slices.DeleteFunc(s.kinds.AllChildren(), func(k kinds.Child) bool { return k.Parent != object })
		if len(under) > 0 {
			summary = "Count the edges and children of " + a(object)
		}
		if len(ends)+len(under) == 0 {
			continue
		}
		plural := s.kinds.Objects[object].Plural
		answer := s.schema(schema, nil, countsBody{}, func(sc *huma.Schema) {
			for _, c := range ends {
				property(c.list, &huma.Schema{Type: huma.TypeInteger, Format: "int64"}, true)(sc)
			}
			for _, k := range under {
				property(k.Plural, s.childCountSchema(k), true)(sc)
			}
		})
		register(s, route{
			method: http.MethodGet, path: "/v1/" + plural + "/{owner_id}/counts", id: "get-" + dashed(object) + "-counts",
			tag: capital(plural), role: tokens.RoleRead, status: http.StatusOK,
			summary: summary, description: fromAProjection + " An unknown " + object + " counts 0.", projected: true, answer: answer,
			naming: s.ownerNaming(object),
		}, func(ctx context.Context, in *ObjectPath) (*anyOutput, error) {
			return s.counts(ctx, ends, under, in.ID.ID)
		})
	}
}

// counted is one count of an object: the edges of a kind at one end.
type counted struct {
	k    kinds.Edge
	list string
	of   func(followercounts.Counts) int64
}

type countsBody struct {
	AsOf event.Time `json:"as_of" format:"date-time" doc:"The counts include every write that had committed by this time, except parked and scheduled events."`
}

func (s *server) counts(ctx context.Context, ends []counted, under []kinds.Child, object event.ID) (*anyOutput, error) {
	counts := make(map[string]any)
	names := make([]string, len(ends))
	for i, c := range ends {
		names[i] = c.k.Name
	}
	asOf, err := s.project(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		all, err := followercounts.ReadCounts(ctx, tx, names, []event.ID{object})
		for _, c := range ends {
			counts[c.list] = c.of(all[followercounts.Object{Kind: c.k.Name, ID: object}])
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(under) > 0 {
		children, err := s.childCounts(ctx, under, object, counts)
		if err != nil {
			return nil, err
		}
		if len(ends) == 0 || children.Before(asOf.Time) {
			asOf = children
		}
	}
	counts["as_of"] = asOf
	return &anyOutput{Body: counts}, nil
}
