package contracts

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/upstreams"
)

// Type is a version of an event type.
type Type struct {
	Name      string // ce-type: tidings.follow.created.v1
	Kind      string // the aggregate type: a kind, or a type of Tidings itself
	Event     string // for example created
	Summary   string
	Aggregate string         // the type of the object whose id is in ce-subject
	IDs       kinds.IDForm   // of that object
	Source    string         // ce-source; "" for that of the installation
	ID        string         // ce-dataschema
	Payload   map[string]any // JSON Schema
}

// Schema returns the JSON Schema of the payload, draft 2020-12.
func (t Type) Schema() map[string]any {
	s := t.body()
	s["$schema"], s["$id"] = "https://json-schema.org/draft/2020-12/schema", t.ID
	return s
}

func (t Type) body() map[string]any {
	s := map[string]any{"title": t.Name, "description": t.Summary}
	maps.Copy(s, t.Payload)
	delete(s, "$schema")
	delete(s, "$id")
	return s
}

// Types returns all types of the kinds and the upstreams, sorted by name.
func Types(set *kinds.Set, declared []upstreams.Upstream) (all []Type) {
	for i := range declared {
		all = append(all, typesOf(&declared[i])...)
	}
	add := func(kind, aggregate, event, summary string, properties map[string]any, required []string) {
		e := typeOf(kind, event)
		all = append(all, Type{Name: e.CloudEventsType(), Kind: kind, Event: event, Summary: summary, Aggregate: aggregate,
			IDs: set.IDs(aggregate), ID: e.DataSchema(), Payload: map[string]any{"type": "object", "properties": properties,
				"required": required}})
	}
	for _, k := range set.AllEdges() {
		for _, name := range event.EdgeEvents {
			if name == event.Updated && len(k.Attributes) == 0 {
				continue
			}
			properties, required := edgeMembers(k, name)
			add(k.Name, k.To, name, edgeSummaries[name]+" The data is the whole state of the edge after the change.", properties, required)
		}
	}
	for _, k := range set.AllChildren() {
		for _, name := range event.ChildEvents {
			if name == event.Moderated && !k.Moderated {
				continue
			}
			properties, required := childMembers(k, name)
			add(k.Name, k.Parent, name,
				fmt.Sprintf(childSummaries[name]+" The data is the whole state of the %[1]s after the change.", k.Name),
				properties, required)
		}
	}
	properties, required := members[event.Thread]([2]string{"kind", "post_id"}, nil)
	for _, name := range event.ThreadEvents {
		add(event.AggregateThread, "object that has the thread", name,
			"The settings of a thread changed. The data is all settings after the change.", properties, required)
	}
	properties, required = members[event.PersonErased]([2]string{"person_id", "requested_at"}, nil)
	properties["person_id"] = id(set.IDs(kinds.Author))
	add(event.AggregatePerson, "partition", event.Erased,
		"A person was erased: delete everything that you have of them. Each partition has this event, behind all others about the person.",
		properties, required)
	properties, required = members[event.Heartbeat]([2]string{"partition", "interval_seconds"}, nil)
	add(event.AggregateHeartbeat, "heartbeat", event.Sent,
		"Tidings measures the delay of its own path with this event. No state changed. Only readers of this type get it.",
		properties, required)
	slices.SortFunc(all, func(a, b Type) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// edgeMembers describes the members of an event of the kind.
func edgeMembers(k kinds.Edge, name string) (properties map[string]any, required []string) {
	properties, required = members[event.Edge](k.Ends, attributes(k.Attributes, k.Schema()))
	status := event.StatusActive
	if name == event.Removed {
		status = event.StatusRemoved
	}
	narrow(properties, "status", status)
	properties[k.Ends[0]], properties[k.Ends[1]] = id(k.FromIDs), id(k.ToIDs)
	if k.ToChild {
		properties[k.Ends[1]] = text(fmt.Sprintf("UUID of the %s in lower case with hyphens.", k.To), uuid)
	}
	return properties, required
}

func childMembers(k kinds.Child, name string) (properties map[string]any, required []string) {
	properties, required = members[event.Child]([2]string{k.Names().ID, k.Names().Parent}, attributes(k.Attributes, k.Schema()))
	properties[k.Names().Parent], properties["author_id"] = id(k.ParentIDs), id(k.AuthorIDs)
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
	return properties, required
}

func typesOf(u *upstreams.Upstream) (all []Type) {
	for name, of := range u.Events {
		for v, schema := range of.Versions {
			e := &event.Event{AggregateType: u.Name, Type: name}
			t := Type{Kind: u.Name, Event: name, Summary: of.Summary, Aggregate: u.Name, IDs: u.IDs, Source: u.Source}
			// Add has checked both.
			e.Version, _ = strconv.Atoi(v)
			_ = json.Unmarshal(schema, &t.Payload)
			t.Name, t.ID = u.Naming().Type(e), e.DataSchema()
			all = append(all, t)
		}
	}
	return all
}

func typeOf(kind, name string) *event.Event {
	return &event.Event{AggregateType: kind, Type: name, Version: 1}
}

var (
	edgeSummaries = map[string]string{event.Created: "The edge became ACTIVE, for the first time or again.",
		event.Removed: "An ACTIVE edge became REMOVED.", event.Updated: "The attributes of an ACTIVE edge changed."}

	childSummaries = map[string]string{event.Created: "An author wrote the %[1]s.",
		event.Edited:    "The body or the attributes of the %[1]s changed.",
		event.Deleted:   "The author deleted the %[1]s.",
		event.Moderated: "The moderation state of the %[1]s changed.", event.Erased: "The author of the %[1]s was erased."}
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

// id returns the schema of an id of an object.
func id(form kinds.IDForm) map[string]any {
	s := text("An id that the upstream service chose.", form.Pattern())
	if form == kinds.UUID {
		s["format"] = "uuid"
	}
	return s
}

// known returns the schemas of members that a Go type alone does not describe.
func known() map[string]map[string]any {
	return map[string]map[string]any{
		"status": enum("Whether the edge exists.", event.StatusActive, event.StatusRemoved),
		"author_state": enum("Whether the author has deleted it or was erased.", event.AuthorActive, event.AuthorDeleted,
			event.AuthorErased),
		"moderation_state": enum("The decision of the moderators. Readers see it only if author_state is ACTIVE and "+
			"moderation_state is NONE or APPROVED.",
			event.ModerationNone, event.ModerationPending, event.ModerationApproved, event.ModerationHidden, event.ModerationRemoved),
		"child_id":  text("UUID in lower case with hyphens.", uuid),
		"parent_id": text("UUID of the parent of a reply; absent on the top level.", uuid),
		"slug":      text("Its address within the thread. It never changes.", "^[0-9a-hjkmnp-tv-z]{8}$"),
		"path": text("Its position: paths sort in the order of the thread. Each level is one segment: 14 hexadecimal digits "+
			"(microseconds since 1970) and the slug.", ""),
		"body":      text("Empty if author_state is not ACTIVE, or moderation_state is HIDDEN or REMOVED.", ""),
		"actor":     text("Who made the change.", ""),
		"reason":    text("The moderator's reason.", ""),
		"title":     text("Absent if there is no title.", ""),
		"kind":      text("The kind of the thread's children; absent for comments.", ""),
		"partition": {"type": "integer", "minimum": 0, "description": "The partition that the heartbeat measures."},
		"interval_seconds": {"type": "number", "exclusiveMinimum": 0,
			"description": "The minimum time between two heartbeats of a partition."},
		"erased": {"const": true, "description": "Present if Tidings removed the content later, because the author was erased."},
	}
}

// members returns the schemas of the payload's members and the names of those that are always
// present. The first two members have the kind's names. attributes is nil for a kind without
// attributes.
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
			s = id(kinds.String)
		case reflect.TypeFor[event.Time]():
			s = map[string]any{"type": "string", "format": "date-time", "pattern": `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$`,
				"description": "RFC 3339 in UTC with microseconds."}
		case reflect.TypeFor[int64]():
			s = map[string]any{"type": "integer", "minimum": 1,
				"description": "Rises by one with each event of the entity. Discard an event whose version is not higher than yours; " +
					"for edges compare created_at first."}
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
			// Every payload type is in a test, so no process reaches this.
			panic("contracts: no schema for the member " + name)
		}
		properties[name] = s
		if options == "" {
			required = append(required, name)
		}
	}
	slices.Sort(required)
	return properties, required
}

// attributes returns the schema of a kind's attributes, or nil. Events from before an attribute was
// added lack it, so no attribute is required. Later releases may add attributes.
func attributes(of map[string]kinds.Attribute, schema map[string]any) map[string]any {
	if len(of) == 0 {
		return nil
	}
	delete(schema, "required")
	delete(schema, "additionalProperties")
	for _, p := range schema["properties"].(map[string]any) {
		delete(p.(map[string]any), "default")
	}
	schema["description"] = "{} and an absent member both mean that no attribute has a value. Absent from events of a child whose " +
		"content was deleted, erased, hidden or removed."
	return schema
}

func narrow(properties map[string]any, member, value string) {
	properties[member] = enum(properties[member].(map[string]any)["description"].(string), value)
}

// Files returns the contracts of the kinds and upstreams as files, by name: asyncapi.json and
// schemas/TYPE.json. The same kinds and names give the same bytes.
func Files(set *kinds.Set, declared []upstreams.Upstream, in Names) (map[string][]byte, error) {
	docs := map[string]any{"asyncapi.json": AsyncAPI(set, declared, in)}
	for _, t := range Types(set, declared) {
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

// Encode encodes a document as its file has it.
func Encode(doc any) ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(doc)
	return out.Bytes(), err
}

// Differences names the differences that break a reader: a reader of the old schema cannot read all
// new messages, or a reader of the new schema cannot read all old ones. Within a version of a type,
// the payload and its attributes may gain members that are not required, and descriptions may
// change. Any other change needs a new version.
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

// short encodes a value for the comparison: a schema in memory and a parsed one have different Go
// types for numbers and lists.
func short(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(text)
}
