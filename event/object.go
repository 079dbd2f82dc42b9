package event

import (
	"encoding/base64"
	"strconv"
)

// ObjectSubject returns the subject of the events of one object that are not stored: of a tenant's
// aggregate with that id. A relay publishes them under prefix (NATS_LIVE_PREFIX) if
// NATS_LIVE_OBJECTS is true. A subscriber may put * in place of the aggregate type or the event
// type. Decode reads the messages.
//
// The subject ends with the id if the id has only letters, digits, - and _, and does not begin with
// _. Otherwise it ends with _ and the base64url of the id, without padding.
func ObjectSubject(prefix string, tenant int64, aggregateType, eventType string, object ID) string {
	return prefix + ".t" + strconv.FormatInt(tenant, 10) + "." + aggregateType + "." + eventType + "." + objectToken(object)
}

// objectToken returns the id as one token of a subject. A dot would separate tokens.
func objectToken(id ID) string {
	if isPlainToken(string(id)) && id[0] != '_' {
		return string(id)
	}
	return "_" + base64.RawURLEncoding.EncodeToString([]byte(id))
}

// withoutObject returns the tokens of a subject of ObjectSubject without that of the object, and
// those of any other subject unchanged. tenant and object are from the message's headers.
func withoutObject(tokens []string, tenant string, object ID) []string {
	last := len(tokens) - 1
	if last >= 4 && tokens[last-3] == "t"+tenant && tokens[last] == objectToken(object) { // elsewhere the partition is there
		return tokens[:last]
	}
	return tokens
}
