package contracts

import (
	"cmp"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/upstreams"
)

// Names are the names that an installation configures for what it publishes.
type Names struct {
	Stream string // NATS_STREAM
	Prefix string // NATS_SUBJECT_PREFIX
	Live   string // NATS_LIVE_PREFIX
	Source string // EVENT_SOURCE

	Objects bool // NATS_LIVE_OBJECTS
}

// DefaultNames returns the names of an installation that configures none.
func DefaultNames() Names {
	return Names{Stream: "EVENTS", Prefix: "events", Live: "live", Source: event.Source}
}

// AsyncAPI returns the AsyncAPI 3.1 document of all subjects of the kinds and upstreams: the
// messages that Tidings sends. Facts without a member in the NATS binding are in members that begin
// with x-tidings-.
func AsyncAPI(set *kinds.Set, declared []upstreams.Upstream, in Names) map[string]any {
	subject, stream := in.Prefix+".{partition}.", in.Stream+"-{partition}"
	channels, operations, messages, schemas := map[string]any{}, map[string]any{}, map[string]any{}, map[string]any{}
	send := func(name, channel, summary string) {
		operations[name] = map[string]any{"action": "send", "channel": ref("channels", channel), "summary": summary,
			"messages": []any{ref("channels", channel, "messages", "event")}}
	}
	for _, t := range Types(set, declared) {
		name, only := t.Kind+"."+t.Event, map[string]any{"event": ref("components", "messages", t.Name)}
		messages[t.Name] = map[string]any{"name": t.Name, "title": name, "summary": t.Summary, "contentType": "application/json",
			"headers": headersOf(t, in.Source), "payload": ref("components", "schemas", t.Name),
			"x-tidings-schema": "/v1/schemas/" + t.Name}
		schemas[t.Name] = t.body()
		if event.System(t.Kind) { // no live subject has it
			channels[name] = map[string]any{"address": subject + "system.t0." + name, "title": name, "description": t.Summary,
				"parameters": parameters("partition"), "messages": only, "x-tidings-stream": stream, "x-tidings-internal": true}
			send("send."+name, name, t.Summary)
			continue
		}
		channels[name] = map[string]any{"address": subject + "t{tenant}." + name, "title": name,
			"description": t.Summary + " Tidings publishes it exactly once, on the partition's JetStream stream.",
			"parameters":  parameters("partition", "tenant"), "messages": only, "x-tidings-stream": stream}
		channels["live."+name] = map[string]any{"address": in.Live + ".t{tenant}." + name, "title": name + ", live",
			"description": t.Summary + " NATS delivers it to plain subscribers, at most once.",
			"parameters":  parameters("tenant"), "messages": only}
		send("send."+name, name, t.Summary)
		send("send.live."+name, "live."+name, t.Summary)
		if in.Objects && t.Kind != event.AggregatePerson { // the aggregate of an erasure is no object
			channels["object."+name] = map[string]any{"address": in.Live + ".t{tenant}." + name + ".{object}",
				"title": name + ", of one object", "description": t.Summary + " A relay sends it to plain subscribers, at most once.",
				"parameters": parameters("tenant", "object"), "messages": only}
			send("send.object."+name, "object."+name, t.Summary)
		}
	}
	messages["closed"] = map[string]any{"name": "closed", "title": "closing message", "contentType": "application/json",
		"summary": "The last message of a stream that a resize or a repair has replaced. It is not an event and has no data.",
		"headers": map[string]any{"type": "object", "required": []string{event.HeaderSource, event.HeaderClosed},
			"properties": map[string]any{
				event.HeaderSource: map[string]any{"const": event.Source}, event.HeaderClosed: map[string]any{"const": "1"}}}}
	channels["closed"] = map[string]any{"address": subject + "closed", "title": "closing message",
		"description": "The events continue on the streams whose metadata names this partition in after.",
		"parameters":  parameters("partition"), "messages": map[string]any{"event": ref("components", "messages", "closed")},
		"x-tidings-stream": stream}
	send("send.closed", "closed", "The last message of a stream.")
	return map[string]any{
		"asyncapi": "3.1.0",
		"info": map[string]any{"title": "Tidings", "version": "1",
			"license": map[string]any{"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
			"description": "Every change of state is one event: a CloudEvent in binary mode on a JetStream stream, with the whole state " +
				"of one entity after the change. " +
				"Store the version with your effect, and discard an event whose version is not higher. For edges compare " +
				"created_at first, then version. Ignore members and headers that you do not know."},
		"defaultContentType": "application/json",
		"channels":           channels,
		"operations":         operations,
		"components":         map[string]any{"messages": messages, "schemas": schemas},
	}
}

func ref(path ...string) map[string]any {
	return map[string]any{"$ref": "#/" + strings.Join(path, "/")}
}

func parameters(names ...string) map[string]any {
	described := map[string]string{
		"partition": "The number of the stream. Put * in its place: an event's partition may change in a resize.",
		"tenant":    "The tenant's number.",
		"object": "The " + event.HeaderSubject + ", if it has only letters, digits, - and _ and does not begin with _. Otherwise _ " +
			"and its base64url without padding."}
	all := make(map[string]any)
	for _, name := range names {
		all[name] = map[string]any{"description": described[name]}
	}
	return all
}

// headersOf returns the CloudEvents attributes of the type as headers (binary mode). NATS headers
// are case-sensitive.
func headersOf(t Type, source string) map[string]any {
	fixed := func(value string) map[string]any { return map[string]any{"const": value} }
	return map[string]any{
		"type": "object",
		"required": []string{event.HeaderSpecVersion, event.HeaderID, event.HeaderType, event.HeaderSource, event.HeaderSubject,
			event.HeaderTime, event.HeaderDataContentType, event.HeaderOutboxID},
		"properties": map[string]any{
			event.HeaderSpecVersion: fixed("1.0"), event.HeaderType: fixed(t.Name), event.HeaderSource: fixed(cmp.Or(t.Source, source,
				event.Source)),
			event.HeaderDataContentType: fixed("application/json"), event.HeaderDataSchema: fixed(t.ID),
			event.HeaderTenant: text("The tenant's number.", "^[0-9]+$"), event.HeaderID: text("The event's UUID.", uuid),
			event.HeaderSubject:     text("The id of the "+t.Aggregate+", the aggregate.", t.IDs.Pattern()),
			event.HeaderTime:        map[string]any{"type": "string", "format": "date-time", "description": "The time of the change."},
			event.HeaderTraceParent: text("W3C trace context of the event's creation; may be absent.", ""),
			event.HeaderOutboxID:    text("The row's id in outbox_messages.", "^[0-9]+$"),
		},
	}
}
