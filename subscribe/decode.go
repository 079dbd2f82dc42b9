package subscribe

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// Permanent marks an error that no retry can fix: the event becomes a dead letter at once.
func Permanent(err error) error { return event.Permanent(err) }

// Decode reads the payload of an event as a T. T is event.Edge, event.Child, event.Thread or
// event.PersonErased; event.Follow or event.Comment for these kinds; json.RawMessage for the raw
// payload; or a struct of yours, which encoding/json decodes. all are the existing kinds:
// kinds.Builtin() if you have no others. An error is permanent.
func Decode[T any](all *kinds.Set, e *event.Event) (out T, err error) {
	if e.Type == Snapshot { // its payload is that of the entity's events
		state := *e
		if state.Type = event.Created; e.AggregateType == event.AggregateThread {
			state.Type = event.Updated
		}
		e = &state
	}
	switch v := any(&out).(type) {
	case *json.RawMessage:
		*v = e.Payload
	case *event.Edge:
		k, ok := all.Edge(e.AggregateType)
		if !ok {
			return out, unfit[T](e)
		}
		*v, err = e.DecodeEdge(k.Names())
	case *event.Child:
		k, ok := all.Child(e.AggregateType)
		if !ok {
			return out, unfit[T](e)
		}
		*v, err = e.DecodeChild(k.Names())
	case *event.Thread, *event.PersonErased, *event.Follow, *event.Comment:
		if !fits[T](all, e.AggregateType) {
			return out, unfit[T](e)
		}
		err = e.DecodePayload(v)
	default:
		if err = json.Unmarshal(e.Payload, &out); err != nil {
			err = Permanent(fmt.Errorf("decode the payload of event %s (%s.%s.v%d): %w", e.ID, e.AggregateType, e.Type, e.Version, err))
		}
	}
	return out, err
}

func unfit[T any](e *event.Event) error {
	return Permanent(fmt.Errorf("event %s is of kind %s, whose payload is not of type %T", e.ID, e.AggregateType, *new(T)))
}

// fits reports whether the events of an aggregate type have payloads that Decode reads as a T.
func fits[T any](all *kinds.Set, aggregateType string) bool {
	var out T
	var ok bool
	switch any(out).(type) {
	case event.Edge:
		_, ok = all.Edge(aggregateType)
	case event.Child:
		_, ok = all.Child(aggregateType)
	case event.Thread:
		ok = aggregateType == event.AggregateThread
	case event.PersonErased:
		ok = aggregateType == event.AggregatePerson
	case event.Follow:
		ok = aggregateType == event.AggregateFollow
	case event.Comment:
		ok = aggregateType == event.AggregateComment
	default:
		ok = true
	}
	return ok
}

// checkType returns ErrType unless events of the type, KIND.EVENT or KIND.*, can exist and Decode
// can read their payloads as a T.
func checkType[T any](s *settings.Settings, eventType string) error {
	all := s.Kinds
	kind, of, _ := strings.Cut(eventType, ".")
	types := s.TypesOf(kind)
	switch {
	case types == nil:
		return fmt.Errorf("%w: %.80q: %w", ErrType, eventType, settings.ErrUndeclared(kind))
	case of != "*" && !slices.Contains(types, of):
		return fmt.Errorf("%w: %.80q: the events of %s are %s, or * for all", ErrType, eventType, kind, strings.Join(types, ", "))
	case !fits[T](all, kind):
		return fmt.Errorf("%w: %.80q: the payload of %s is not of type %T", ErrType, eventType, kind, *new(T))
	}
	return nil
}
