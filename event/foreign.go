package event

import (
	"strconv"
	"strings"
)

// Ours reports whether a relay of Tidings wrote the message with these headers. Such a message has
// a source, a UUID as its event id, and an outbox id. No other message on the stream is an event,
// whatever its subject. Relay, consumers, replay and repair skip it and count it as foreign. A
// message of ours may still be damaged; Decode then returns an error.
func Ours(headers map[string][]string) bool {
	get := func(name string) string {
		if v := headers[name]; len(v) > 0 {
			return v[0]
		}
		return ""
	}
	id, err := strconv.ParseInt(get(HeaderOutboxID), 10, 64)
	return get(HeaderSource) != "" && IsUUID(get(HeaderID)) && err == nil && id > 0
}

// Closes reports whether the message ends its stream: a relay publishes it last when its partition
// closes (ClosingMessage). It is not an event.
func Closes(subject string, headers map[string][]string) bool {
	source := headers[HeaderSource]
	return strings.HasSuffix(subject, closedSuffix) && len(headers[HeaderClosed]) > 0 && len(source) > 0 && source[0] == Source
}
