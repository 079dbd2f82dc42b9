package event

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Slots is the number of hash buckets that aggregates fall into. The outbox table computes them, and a partition holds a range of them.
const Slots = 32

// Header names. NATS headers keep their case and are compared with it.
const (
	HeaderID              = "ce-id"
	HeaderType            = "ce-type"
	HeaderSource          = "ce-source"
	HeaderSubject         = "ce-subject"
	HeaderTime            = "ce-time"
	HeaderSpecVersion     = "ce-specversion"
	HeaderDataContentType = "ce-datacontenttype"
	HeaderTraceParent     = "traceparent"
	HeaderOutboxID        = "Tidings-Outbox-Id"
	HeaderClosed          = "Tidings-Closed" // on the last message of a closed stream, which is no event
)

// Source is ce-source: these events come from Tidings, whichever process relayed them.
const Source = "/tidings"

// Event is one event, on its way to the stream or from it.
type Event struct {
	ID            string // UUID
	TenantID      int64
	AggregateType string
	AggregateID   int64
	Type          string
	Version       int // of the payload's shape
	OccurredAt    time.Time
	TraceParent   string
	Payload       json.RawMessage
	Slot          int // known to the outbox alone
	OutboxID      int64

	// Known once the event is on the stream.
	Stream string // its name
	Seq    uint64
}

// CloudEventsType is the event's type as headers have it: tidings.follow.created.v1.
func (e *Event) CloudEventsType() string {
	return "tidings." + e.AggregateType + "." + e.Type + ".v" + strconv.Itoa(e.Version)
}

// Subjects is the subject filter of all that one partition's stream holds, under prefix.
func Subjects(prefix string, partition int) string { return fmt.Sprintf("%s.%d.>", prefix, partition) }

// LiveSubjects is the part of Subjects that is republished, and the subject without the partition that it then has. The closing message and the
// system's events have other numbers of tokens.
func LiveSubjects(prefix, live string, partition int) (source, destination string) {
	return fmt.Sprintf("%s.%d.*.*.*", prefix, partition), live + ".{{wildcard(1)}}.{{wildcard(2)}}.{{wildcard(3)}}"
}

const (
	closedSuffix = ".closed"
	systemToken  = "system." // in the subjects of the system's events, so that no filter of others finds them
)

// ClosingMessage is the subject and the headers of the message that ends a partition's stream, under prefix (Closes).
func ClosingMessage(prefix string, partition int) (subject string, headers map[string][]string) {
	return prefix + "." + strconv.Itoa(partition) + closedSuffix, map[string][]string{HeaderClosed: {"1"}, HeaderSource: {Source}}
}

// AggregateFilter is the subject filter of all events of one tenant's aggregate type under prefix.
func AggregateFilter(prefix string, tenant int64, aggregateType string) string {
	return fmt.Sprintf("%s.*.t%d.%s.*", prefix, tenant, aggregateType)
}

// TypeFilter is the subject filter of all events of a type under prefix, of every tenant; * is any type of the aggregate's.
func TypeFilter(prefix, aggregateType, eventType string) string {
	return prefix + ".*." + system(aggregateType) + "*." + aggregateType + "." + eventType
}

// Subject is where the event is published in a partition, under prefix.
func (e *Event) Subject(prefix string, partition int) string {
	return prefix + "." + strconv.Itoa(partition) + "." + system(e.AggregateType) + "t" + strconv.FormatInt(e.TenantID, 10) + "." + e.AggregateType + "." + e.Type
}

func system(aggregateType string) string {
	if System(aggregateType) {
		return systemToken
	}
	return ""
}

// Headers are the event's own headers. The relay adds those of the publish: Nats-*.
func (e *Event) Headers() map[string][]string {
	h := make(map[string][]string, 12)
	e.SetHeaders(h)
	return h
}

// SetHeaders sets the event's own headers in h, which may hold those of another event, and leaves the others. It writes to h's values in place, so that a
// publisher of many needs one map.
func (e *Event) SetHeaders(h map[string][]string) {
	set := func(name, value string) {
		if v := h[name]; len(v) == 1 {
			v[0] = value
		} else {
			h[name] = []string{value}
		}
	}
	set(HeaderSpecVersion, "1.0")
	set(HeaderSource, Source)
	set(HeaderDataContentType, "application/json")
	set(HeaderID, e.ID)
	set(HeaderType, e.CloudEventsType())
	set(HeaderSubject, strconv.FormatInt(e.AggregateID, 10))
	set(HeaderTime, e.OccurredAt.UTC().Format(TimeFormat))
	set(HeaderOutboxID, strconv.FormatInt(e.OutboxID, 10))
	if e.TraceParent != "" {
		set(HeaderTraceParent, e.TraceParent)
	} else {
		delete(h, HeaderTraceParent)
	}
}

const (
	maxToken       = 64
	maxHeaderBytes = 60 << 10 // the server refuses 64 KiB; the rest is for the headers of the publish
	fixedHeaders   = 700      // the most bytes that an event's headers take but for traceparent: names, tokens, numbers, a time and a UUID
	publishHeaders = 1 << 10  // Nats-Batch-*, Nats-Expected-*
)

func token(s string) bool {
	if s == "" || len(s) > maxToken {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			return false
		}
	}
	return true
}

// InvalidError says why an event can never be published.
type InvalidError struct {
	Field  string // the column of outbox_messages that is at fault
	Reason string
}

func (e *InvalidError) Error() string { return e.Field + " " + e.Reason }

// Validate reports as an *InvalidError why the event can never be published: a type that is not one subject token, a trace with
// control characters, a time that no header can have, headers or a message beyond the limits. maxMessage is the stream's and the
// server's limit in bytes. The answer is the same before the event has its ids as afterwards.
func (e *Event) Validate(maxMessage int) error {
	invalid := func(field, format string, args ...any) error {
		return &InvalidError{Field: field, Reason: fmt.Sprintf(format, args...)}
	}
	if !token(e.AggregateType) {
		return invalid("aggregate_type", "%.80q is not a token of 1 to %d letters, digits, _ and -", e.AggregateType, maxToken)
	}
	if !token(e.Type) {
		return invalid("event_type", "%.80q is not a token of 1 to %d letters, digits, _ and -", e.Type, maxToken)
	}
	if year := e.OccurredAt.UTC().Year(); year < 1 || year > 9999 {
		return invalid("occurred_at", "is in the year %d: want 1 to 9999", year)
	}
	if !utf8.ValidString(e.TraceParent) {
		return invalid("trace_id", "is not valid UTF-8")
	}
	for _, c := range e.TraceParent {
		if c < ' ' || c == 0x7f {
			return invalid("trace_id", "has the control character %U", c)
		}
	}
	size := fixedHeaders + len(e.TraceParent)
	if size > maxHeaderBytes {
		return invalid("trace_id", "makes headers of %d bytes: the limit is %d", size, maxHeaderBytes)
	}
	if total := size + len(e.Payload) + publishHeaders; total > maxMessage {
		return invalid("payload", "makes a message of %d bytes: the limit is %d", total, maxMessage)
	}
	return nil
}

// Decode reads an event from its message. An error is permanent: the message is not one of ours, or is damaged. The fields
// that could be read are set even then, so that the message can be parked under its aggregate.
func Decode(subject string, headers map[string][]string, data []byte) (Event, error) {
	get := func(name string) string {
		if v := headers[name]; len(v) > 0 {
			return v[0]
		}
		return ""
	}
	e := Event{ID: get(HeaderID), TraceParent: get(HeaderTraceParent), Payload: data}
	var errs []string
	number := func(what, s string) int64 {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			errs = append(errs, fmt.Sprintf("%s is %.80q", what, s))
		}
		return n
	}
	tokens := strings.Split(subject, ".")
	if n := len(tokens); n < 4 || !strings.HasPrefix(tokens[n-3], "t") { // after the prefix, or the prefix and the partition
		errs = append(errs, fmt.Sprintf("subject is %.200q", subject))
	} else {
		e.TenantID = number("tenant", tokens[n-3][1:])
		e.AggregateType, e.Type = tokens[n-2], tokens[n-1]
	}
	e.AggregateID = number(HeaderSubject, get(HeaderSubject))
	e.OutboxID = number(HeaderOutboxID, get(HeaderOutboxID))
	version, found := strings.CutPrefix(get(HeaderType), "tidings."+e.AggregateType+"."+e.Type+".v")
	if !found {
		errs = append(errs, fmt.Sprintf("%s is %.200q", HeaderType, get(HeaderType)))
	} else {
		e.Version = int(number(HeaderType, version))
	}
	var err error
	if e.OccurredAt, err = time.Parse(time.RFC3339Nano, get(HeaderTime)); err != nil {
		errs = append(errs, fmt.Sprintf("%s is %.80q", HeaderTime, get(HeaderTime)))
	}
	if len(errs) > 0 {
		return e, Permanent(fmt.Errorf("decode event %.80q: %s", e.ID, strings.Join(errs, "; ")))
	}
	return e, nil
}

// DecodePayload reads the event's payload into v. An error is permanent. A *Comment whose ids are not in their one form, or whose post is not the
// event's aggregate, is refused.
func (e *Event) DecodePayload(v any) error {
	if _, exact := Known(e.AggregateType, e.Type, e.Version); !exact {
		return Permanent(fmt.Errorf("event %s is a %s.%s.v%d: this release does not know it", e.ID, e.AggregateType, e.Type, e.Version))
	}
	err := json.Unmarshal(e.Payload, v)
	if c, is := v.(*Comment); is && err == nil {
		err = c.valid(e.AggregateID)
	}
	if err != nil {
		return Permanent(fmt.Errorf("decode the payload of event %s (%s.%s.v%d): %w", e.ID, e.AggregateType, e.Type, e.Version, err))
	}
	return nil
}
