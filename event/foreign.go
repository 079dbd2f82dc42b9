package event

import (
	"strconv"
	"strings"
)

// Ours reports whether a relay of Tidings wrote the message with these headers: it has a relay's source, a UUID as its event id, and an
// outbox id. Nothing else on the stream is an event, whatever its subject says. Relay, consumers, replay and repair skip and count it
// as Foreign. A message of ours may still be damaged: Decode says so.
func Ours(headers map[string][]string) bool {
	get := func(name string) string {
		if v := headers[name]; len(v) > 0 {
			return v[0]
		}
		return ""
	}
	id, err := strconv.ParseInt(get(HeaderOutboxID), 10, 64)
	return get(HeaderSource) == Source && isUUID(get(HeaderID)) && err == nil && id > 0
}

// Closes reports whether a message ends its stream: a relay publishes it last when its partition is closed (ClosingMessage). It is no event.
func Closes(subject string, headers map[string][]string) bool {
	source := headers[HeaderSource]
	return strings.HasSuffix(subject, closedSuffix) && len(headers[HeaderClosed]) > 0 && len(source) > 0 && source[0] == Source
}

// The kinds of message that are skipped and counted, as metrics label them.
const (
	Foreign   = "foreign"   // no relay wrote it
	Duplicate = "duplicate" // an earlier message has the same event: that one counts
)
