package event

import (
	"strconv"
	"strings"
)

// Ours reports whether a relay of Tidings wrote the message with these headers. Such a message has
// a relay's source, a UUID as its event id, and an outbox id. No other message on the stream is an
// event, whatever its subject. Relay, consumers, replay and repair skip it and count it as Foreign.
// A message of ours may still be damaged; Decode then returns an error.
func Ours(headers map[string][]string) bool {
	get := func(name string) string {
		if v := headers[name]; len(v) > 0 {
			return v[0]
		}
		return ""
	}
	id, err := strconv.ParseInt(get(HeaderOutboxID), 10, 64)
	return isFromRelay(headers) && IsUUID(get(HeaderID)) && err == nil && id > 0
}

// Closes reports whether the message ends its stream: a relay publishes it last when its partition
// closes (ClosingMessage). It is not an event.
func Closes(subject string, headers map[string][]string) bool {
	return strings.HasSuffix(subject, closedSuffix) && len(headers[HeaderClosed]) > 0 && isFromRelay(headers)
}

// isFromRelay reports whether the message has the source of a relay, of any installation: readers
// do not know the name of theirs, which may also have changed.
func isFromRelay(headers map[string][]string) bool {
	v := headers[HeaderSource]
	if len(v) == 0 {
		return false
	}
	name, ours := strings.CutPrefix(v[0], Source)
	return ours && (name == "" || len(name) > 1 && name[0] == '/')
}

// The kinds of skipped messages, as labels of metrics.
const (
	Foreign   = "foreign"   // no relay wrote it
	Duplicate = "duplicate" // an earlier message has the same event, and that one counts
)
