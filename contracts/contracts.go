package contracts

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// Type is a type and version of events.
type Type struct {
	Name       string // ce-type: tidings.follow.created.v1
	Kind       string // the aggregate type
	Event      string // created
	Summary    string
	Aggregate  string         // the object whose id is ce-subject
	Properties map[string]any // of the payload
	Required   []string
}

// Schema is the JSON Schema of the payload, draft 2020-12.
func (t Type) Schema() map[string]any {
	s := t.body()
	s["$schema"], s["$id"] = "https://json-schema.org/draft/2020-12/schema", "urn:"+strings.ReplaceAll(t.Name, ".", ":")
	return s
}

func (t Type) body() map[string]any {
	return map[string]any{"title": t.Name, "description": t.Summary, "type": "object", "properties": t.Properties, "required": t.Required}
}

// Types returns all types of the kinds, by name.
func Types(set *kinds.Set) (all []Type) {
	add := func(kind, aggregate, event, summary string, properties map[string]any, required []string) {
		e := typeOf(kind, event)
		all = append(all, Type{Name: e.CloudEventsType(), Kind: kind, Event: event, Summary: summary, Aggregate: aggregate, Properties: properties, Required: required})
	}
	for _, k := range set.AllEdges() {
		for _, name := range event.EdgeEvents {
			if name == event.Updated && len(k.Attributes) == 0 {
				continue
			}
			properties, required := members[event.Edge](k.Ends, attributes(k.Attributes, k.Schema()))
			status := event.StatusActive
			if name == event.Removed {
				status = event.StatusRemoved
			}
			narrow(properties, "status", status)
			add(k.Name, k.To, name, edgeSummaries[name]+" The whole state of the edge after the change.", properties, required)
		}
	}
	for _, k := range set.AllChildren() {
		for _, name := range event.ChildEvents {
			if name == event.Moderated && !k.Moderated {
				continue
			}
			properties, required := members[event.Child]([2]string{k.Names().ID, k.Names().Parent}, attributes(k.Attributes, k.Schema()))
			for _, member := range []string{"parent_id", "slug", "path"} {
				if !k.Threaded {
					delete(properties, member)
				} else if member != "parent_id" {
					required = append(required, member)
				}
			}
			if name != event.Moderated {
				delete(properties, "reason")
			}
			if state := map[string]string{event.Deleted: event.AuthorDeleted, event.Erased: event.AuthorErased}[name]; state != "" {
				narrow(properties, "author_state", state)
			}
			slices.Sort(required)
			add(k.Name, k.Parent, name, childSummaries[name]+" The whole state of the "+k.Name+" after the change.", properties, required)
		}
	}
	properties, required := members[event.Thread]([2]string{"kind", "post_id"}, nil)
	for _, name := range event.ThreadEvents {
		add(event.AggregateThread, "object that has the thread", name, "The settings of a thread changed. The whole settings after the change.", properties, required)
	}
	properties, required = members[event.Heartbeat]([2]string{"partition", "interval_seconds"}, nil)
	add(event.AggregateHeartbeat, "heartbeat", event.Sent, "Tidings measures its own path; nothing has changed. Readers who do not ask for this type do not get it.", properties, required)
	slices.SortFunc(all, func(a, b Type) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func typeOf(kind, name string) *event.Event {
	return &event.Event{AggregateType: kind, Type: name, Version: 1}
}

var (
	edgeSummaries = map[string]string{event.Created: "The edge became ACTIVE, first or again.", event.Removed: "An ACTIVE edge became REMOVED.", event.Updated: "Attributes of an ACTIVE edge changed."}

	childSummaries = map[string]string{event.Created: "It was written.", event.Edited: "Its body or its attributes changed.", event.Deleted: "Its author withdrew it.",
		event.Moderated: "A moderator approved, hid or removed it.", event.Erased: "Its author was erased."}
)

const uuid = "^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"

func enum(description string, values ...any) map[string]any {
	return map[string]any{"type": "string", "enum": values, "description": description}
}

func text(description, pattern string) map[string]any {
	s := map[string]any{"type": "string", "description": description}
	if pattern != "" {
		s["pattern"] = pattern
	}
	return s
}

// known are the members that the type alone does not describe.
func known() map[string]map[string]any {
	return map[string]map[string]any{
		"status":       enum("Whether the edge is there.", event.StatusActive, event.StatusRemoved),
		"author_state": enum("What the author made of it.", event.AuthorActive, event.AuthorDeleted, event.AuthorErased),
		"moderation_state": enum("What a moderator made of it. Visible are those that are ACTIVE and NONE or APPROVED.",
			event.ModerationNone, event.ModerationPending, event.ModerationApproved, event.ModerationHidden, event.ModerationRemoved),
		"child_id":         text("UUID in lower case with hyphens.", uuid),
		"parent_id":        text("UUID of the one that it replies to; absent on the top level.", uuid),
		"slug":             text("Its address within the thread. It never changes.", "^[0-9a-hjkmnp-tv-z]{8}$"),
		"path":             text("Its place: paths sort as the thread reads. A segment per level, each 14 hexadecimal digits (microseconds since 1970) and the slug.", ""),
		"body":             text("Empty while it is gone.", ""),
		"actor":            text("Who did it.", ""),
		"reason":           text("The moderator's.", ""),
		"title":            text("Absent where there is none.", ""),
		"kind":             text("Whose thread it is; absent for comments.", ""),
		"partition":        {"type": "integer", "minimum": 0, "description": "The partition that it was written for."},
		"interval_seconds": {"type": "number", "exclusiveMinimum": 0, "description": "The least between two of a partition."},
		"erased":           {"const": true, "description": "Absent, or the content was taken out since: its author was erased."},
	}
}

// members are those of the JSON of a payload, of which the first two have the kind's names, and which of them are always there. attributes is nil of a kind
// that has none.
func members[T any](first [2]string, attributes map[string]any) (properties map[string]any, required []string) {
	properties = make(map[string]any)
	special := known()
	for i, f := range reflect.VisibleFields(reflect.TypeFor[T]()) {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		s := special[name]
		if i < len(first) {
			name = first[i]
		}
		switch f.Type {
		case reflect.TypeFor[event.ID]():
			s = text("A 64-bit number, as a string.", "^[1-9][0-9]{0,18}$")
		case reflect.TypeFor[event.Time]():
			s = map[string]any{"type": "string", "format": "date-time", "pattern": `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$`, "description": "RFC 3339 in UTC with microseconds."}
		case reflect.TypeFor[int64]():
			s = map[string]any{"type": "integer", "minimum": 1, "description": "Rises by one with each event of the entity. Drop what is not above the one that you have."}
		case reflect.TypeFor[bool]():
			if s == nil {
				s = map[string]any{"type": "boolean"}
			}
		case reflect.TypeFor[json.RawMessage]():
			if s = attributes; s == nil {
				continue
			}
		}
		if s == nil {
			panic("contracts: nothing is known of the member " + name) // a test has all of them
		}
		properties[name] = s
		if options == "" {
			required = append(required, name)
		}
	}
	slices.Sort(required)
	return properties, required
}

// attributes are those of a kind, or nil. An event of before an attribute was added does not have it, so none is promised, and later ones may come.
func attributes(of map[string]kinds.Attribute, schema map[string]any) map[string]any {
	if len(of) == 0 {
		return nil
	}
	delete(schema, "required")
	delete(schema, "additionalProperties")
	for _, p := range schema["properties"].(map[string]any) {
		delete(p.(map[string]any), "default")
	}
	schema["description"] = "Absent where there are none, and while the content is gone."
	return schema
}

func narrow(properties map[string]any, member, value string) {
	properties[member] = enum(properties[member].(map[string]any)["description"].(string), value)
}

// Files are the contracts of the kinds as files, by their names: asyncapi.json and schemas/TYPE.json. The same kinds make the same bytes.
func Files(set *kinds.Set) (map[string][]byte, error) {
	docs := map[string]any{"asyncapi.json": AsyncAPI(set)}
	for _, t := range Types(set) {
		docs["schemas/"+t.Name+".json"] = t.Schema()
	}
	files := make(map[string][]byte)
	for name, doc := range docs {
		file, err := Encode(doc)
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", name, err)
		}
		files[name] = file
	}
	return files, nil
}

// Encode writes a document as its file has it.
func Encode(doc any) ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(doc)
	return out.Bytes(), err
}

// Differences names what of a schema keeps a reader of the one before from reading all messages of the present one, or readers of the present one from reading
// those of before. A version of a type may gain members that are not required, in the payload or in its attributes, and other descriptions. Anything
// else is another version.
func Differences(before, now map[string]any) []string { return differences("#", before, now) }

func differences(at string, before, now map[string]any) (all []string) {
	keys := maps.Clone(before)
	maps.Copy(keys, now)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		was, had := before[key]
		is, has := now[key]
		inside := at + "/" + key
		switch {
		case key == "description" || key == "title" || key == "examples":
		case key == "properties" && had && has:
			all = append(all, ofProperties(inside, was.(map[string]any), is.(map[string]any))...)
		case !had:
			all = append(all, fmt.Sprintf("%s is new: %s", inside, short(is)))
		case !has:
			all = append(all, fmt.Sprintf("%s is gone: %s", inside, short(was)))
		case short(was) != short(is):
			all = append(all, fmt.Sprintf("%s was %s and is %s", inside, short(was), short(is)))
		}
	}
	return all
}

func ofProperties(at string, before, now map[string]any) (all []string) {
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if is, ok := now[name]; ok {
			all = append(all, differences(at+"/"+name, before[name].(map[string]any), is.(map[string]any))...)
		} else {
			all = append(all, fmt.Sprintf("%s/%s is gone", at, name))
		}
	}
	return all
}

// short is a value as it is compared: numbers and lists have different types in a schema that was made and in one that was read.
func short(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(text)
}
