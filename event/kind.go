package event

import (
	"fmt"
	"slices"
)

// The event types of each archetype. All are at version 1.
var (
	EdgeEvents   = []string{Created, Removed, Updated}                   // of a kind of edges
	ChildEvents  = []string{Created, Edited, Deleted, Moderated, Erased} // of a kind of children
	ThreadEvents = []string{Updated}                                     // of a thread's settings
	PersonEvents = []string{Erased}                                      // of an erased person
)

// ErasedActor replaces the actor of events that an erased person caused.
const ErasedActor = "erased"

// decodeAs reads the payload of an event, which must have one of the types.
func decodeAs[T any](e *Event, types []string, parse func([]byte) (T, error)) (out T, err error) {
	if e.Version != 1 || !slices.Contains(types, e.Type) {
		return out, Permanent(fmt.Errorf("event %s is a %s.%s.v%d: this release does not know it", e.ID,
			e.AggregateType, e.Type, e.Version))
	}
	if out, err = parse(e.Payload); err != nil {
		return out, e.permanent(err)
	}
	return out, nil
}

// permanent adds the event to an error of its payload.
func (e *Event) permanent(err error) error {
	return Permanent(fmt.Errorf("decode the payload of event %s (%s.%s.v%d): %w", e.ID, e.AggregateType, e.Type, e.Version, err))
}
