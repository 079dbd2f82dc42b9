package event

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Edge is the payload of the events of an edge: its whole state after the write. Its kind
// determines the names of two JSON members (EdgeNames), so use Encode and DecodeEdge.
type Edge struct {
	From         ID              `json:"from_id"` // renamed by EdgeNames
	To           ID              `json:"to_id"`   // renamed by EdgeNames
	Status       string          `json:"status"`  // ACTIVE or REMOVED
	Version      int64           `json:"version"`
	CreatedAt    Time            `json:"created_at"`
	PositionedAt Time            `json:"positioned_at"` // when it last became ACTIVE; orders pages
	UpdatedAt    Time            `json:"updated_at"`
	Attributes   json.RawMessage `json:"attributes,omitempty"` // an object, or nil for a kind without attributes
	Actor        string          `json:"actor"`
}

var edges = newCodec(func(e *Edge) []any {
	return []any{&e.From, &e.To, &e.Status, &e.Version, &e.CreatedAt, &e.PositionedAt, &e.UpdatedAt, &e.Attributes, &e.Actor}
})

// EdgeNames are the JSON members for the ends of a kind's edges.
type EdgeNames struct{ From, To string }

// Active reports whether the edge exists now.
func (e Edge) Active() bool { return e.Status == StatusActive }

// Encode writes the edge as JSON.
func (e Edge) Encode(n EdgeNames) ([]byte, error) {
	out, err := edges.encode(e, n.From, n.To)
	if err != nil {
		return nil, fmt.Errorf("encode edge %s, %s: %w", e.From, e.To, err)
	}
	return out, nil
}

// Parse reads an edge from a history.
func (n EdgeNames) Parse(text []byte) (Edge, error) { return edges.decode(text, n.From, n.To) }

// DecodeEdge reads the payload of an edge's event. Its target must be e.AggregateID. An error is
// permanent.
func (e *Event) DecodeEdge(n EdgeNames) (Edge, error) {
	edge, err := decodeAs(e, EdgeEvents, n.Parse)
	if err != nil {
		return Edge{}, err
	}
	switch {
	case edge.From == "" || edge.To != e.AggregateID:
		err = fmt.Errorf("the edge has no %s, or its %s is not its event's aggregate", n.From, n.To)
	case edge.Version <= 0:
		err = fmt.Errorf("the edge has version %d", edge.Version)
	case edge.Status != StatusActive && edge.Status != StatusRemoved:
		err = errors.New("the edge has an unknown status")
	default:
		return edge, nil
	}
	return Edge{}, e.permanent(err)
}
