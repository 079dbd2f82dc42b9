package api

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// edgeRemovalOptions select the edges to remove.
type edgeRemovalOptions struct {
	Kinds     []string `json:"kinds,omitempty" nullable:"false" minItems:"1" doc:"Only these kinds. Default: every kind with such edges."`
	Direction string   `json:"direction,omitempty" enum:"from,to,both" default:"both" example:"both" doc:"Edges from the object, edges to it, or both."`
}

// EdgeRemoval is the removal of all edges of an object, and its progress.
type EdgeRemoval struct {
	ID          string           `json:"id" format:"uuid" example:"0196b2d4-7c00-4000-8000-000000000001"`
	State       string           `json:"state" enum:"PENDING,RUNNING,DONE" doc:"PENDING until the first edges are removed." example:"RUNNING"`
	Object      string           `json:"object" example:"user"`
	ObjectID    event.ID         `json:"object_id" example:"42"`
	Kinds       []string         `json:"kinds" nullable:"false" doc:"Ordered by name." example:"[\"follow\"]"`
	Direction   string           `json:"direction" enum:"from,to,both" example:"both"`
	Actor       string           `json:"actor" doc:"Who requested the removal first."`
	RequestedAt event.Time       `json:"requested_at" format:"date-time"`
	WorkedAt    *event.Time      `json:"worked_at,omitempty" format:"date-time" doc:"When the last slice finished."`
	FinishedAt  *event.Time      `json:"finished_at,omitempty" format:"date-time" doc:"Absent until the removal is done."`
	Removed     map[string]int64 `json:"removed" doc:"The number of edges removed so far, by kind." example:"{\"follow\":1200}"`
}

// The states of a removal.
const (
	removalPending = "PENDING"
	removalRunning = "RUNNING"
	removalDone    = "DONE"
)

func removalOf(r store.Removal) EdgeRemoval {
	out := EdgeRemoval{ID: r.ID, State: removalPending, Object: r.Object, ObjectID: r.ObjectID, Kinds: r.Kinds,
		Direction: string(r.Direction), Actor: r.Actor,
		RequestedAt: event.Time{Time: r.RequestedAt.UTC()}, WorkedAt: wireTime(r.WorkedAt),
		FinishedAt: wireTime(r.FinishedAt), Removed: r.Removed}
	switch {
	case r.FinishedAt != nil:
		out.State = removalDone
	case r.WorkedAt != nil:
		out.State = removalRunning
	}
	return out
}

func wireTime(t *time.Time) *event.Time {
	if t == nil {
		return nil
	}
	return &event.Time{Time: t.UTC()}
}

type removeEdgesInput struct {
	ObjectPath
	Body *json.RawMessage // edgeRemovalOptions, with the kinds of the object
}

type removeEdgesOutput struct {
	Location string `header:"Location" doc:"The address of the removal's progress." example:"/v1/edge-removals/0196b2d4-7c00-4000-8000-000000000001"`
	Body     EdgeRemoval
}

type removalInput struct {
	ID removalID `path:"removal_id" example:"0196b2d4-7c00-4000-8000-000000000001" doc:"The removal."`
}

// removalID is a removal's id in a path.
type removalID string

// Schema describes the id.
func (removalID) Schema(r huma.Registry) *huma.Schema { return childID("").Schema(r) }

type removalOutput struct{ Body EdgeRemoval }

const removalPath = "/v1/edge-removals/"

// removalRoutes registers the routes that remove all edges of an object, for each object and each
// kind of children at an end of a kind of edges.
func (s *server) removalRoutes() {
	for _, object := range s.kinds.Ends() {
		ended := slices.DeleteFunc(s.kinds.AllEdges(), func(k kinds.Edge) bool { return len(k.EndsAt(object)) == 0 })
		var names []any
		for _, k := range ended {
			names = append(names, k.Name)
		}
		plural := s.kinds.Plural(object)
		register(s, route{
			method: http.MethodPost, path: "/v1/" + plural + "/{owner_id}:remove-edges",
			id:  "remove-" + dashed(object) + "-edges",
			tag: capital(plural), role: tokens.RoleWrite, status: http.StatusAccepted,
			summary: "Remove all edges of " + a(object),
			description: "Removes every edge that exists at the time of the answer, each with its own version and event. Location is the " +
				"address of the progress. An edge created meanwhile may be removed or remain. A second request during the removal " +
				"returns the same removal, which then also removes the edges that exist at that time.",
			codes:  writing(),
			naming: s.ownerNaming(object),
			body: jsonBody(s.schema(camel(object)+"EdgeRemovalOptions", nil, edgeRemovalOptions{}, func(sc *huma.Schema) {
				sc.Properties["kinds"].Items.Enum, sc.Properties["kinds"].Examples = names, []any{names[:1]}
			}), false),
		}, func(ctx context.Context, in *removeEdgesInput) (*removeEdgesOutput, error) {
			return s.removeEdges(ctx, object, in)
		})
	}
	register(s, route{
		method: http.MethodGet, path: removalPath + "{removal_id}", id: "get-edge-removal", tag: "Kinds",
		role: tokens.RoleRead, status: http.StatusOK,
		summary: "Read the progress of a removal of all edges of an object", description: "Reads the truth.", codes: []string{codeNotFound},
	}, func(ctx context.Context, in *removalInput) (*removalOutput, error) {
		r, err := s.store.GetRemoval(ctx, callerOf(ctx).TenantID, string(in.ID))
		return &removalOutput{removalOf(r)}, err
	})
}

func (s *server) removeEdges(ctx context.Context, object string, in *removeEdgesInput) (*removeEdgesOutput, error) {
	var options edgeRemovalOptions
	if in.Body != nil {
		if err := json.Unmarshal(*in.Body, &options); err != nil {
			return nil, err
		}
	}
	direction := cmp.Or(store.Direction(options.Direction), store.DirectionBoth)
	chosen, ok := store.RemovalKinds(s.kinds, object, direction, options.Kinds)
	if !ok {
		p := s.problems.problem(codeValidation, "validation failed")
		p.Errors = []FieldError{{Pointer: "#/direction",
			Detail: fmt.Sprintf("some of these kinds have no edges of %s in the direction %s", a(object), direction)}}
		return nil, p
	}
	r := store.RemovalRequest{Meta: callerOf(ctx).meta, Object: object, ID: in.ID.ID,
		IDs: s.kinds.Objects[object].ID, Kinds: chosen, Direction: direction}
	out, err := s.store.RequestRemoval(ctx, callerOf(ctx).TenantID, r)
	return &removeEdgesOutput{Location: removalPath + out.ID, Body: removalOf(out)}, err
}
