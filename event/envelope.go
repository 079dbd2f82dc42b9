package event

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Slots is the number of hash buckets of aggregates. The outbox table computes the bucket, and a
// partition holds a range of them.
const Slots = 32

// Header names. NATS keeps the case of header names and compares them case-sensitively.
const (
	HeaderID              = "ce-id"              // the event's UUID
	HeaderType            = "ce-type"            // as of Event.CloudEventsType
	HeaderSource          = "ce-source"          // /tidings, or the source of the installation or the upstream
	HeaderSubject         = "ce-subject"         // the aggregate's id
	HeaderTime            = "ce-time"            // when it occurred: RFC 3339, UTC, microseconds
	HeaderSpecVersion     = "ce-specversion"     // 1.0
	HeaderDataContentType = "ce-datacontenttype" // application/json
	HeaderDataSchema      = "ce-dataschema"      // the $id of the payload's JSON Schema
	HeaderTenant          = "ce-tenant"          // an extension attribute
	HeaderTraceParent     = "traceparent"        // the W3C trace context of the event's creation
	HeaderOutboxID        = "Tidings-Outbox-Id"  // the row in the outbox
	HeaderClosed          = "Tidings-Closed"     // on the last message of a closed stream, which is not an event
)

// Source is the ce-source of the events of an installation without a name. That of another one
// begins with Source and a slash.
const Source = "/tidings"

// Event is one event, on its way to the stream or from it.
type Event struct {
	ID            string // UUID
	TenantID      int64
	AggregateType string
	AggregateID   ID
	Type          string
	Version       int // of the payload's shape
	OccurredAt    time.Time
	TraceParent   string
	Payload       json.RawMessage
	Slot          int // set only by the outbox
	OutboxID      int64

	// Set once the event is on the stream.
	Stream string // its name
	Seq    uint64
}

// Naming has the names of an aggregate type's events that its owner chooses. The zero value is that
// of kinds.
type Naming struct {
	TypePrefix string // of ce-type; "" means tidings
	Source     string // ce-source; "" means that of the installation
}

// Type returns the event's type as in its headers: com.example.order.placed.v1.
func (n Naming) Type(e *Event) string {
	return cmp.Or(n.TypePrefix, "tidings") + "." + e.AggregateType + "." + e.Type + ".v" + strconv.Itoa(e.Version)
}

// CloudEventsType returns the type of a kind's event as in its headers: tidings.follow.created.v1.
func (e *Event) CloudEventsType() string { return Naming{}.Type(e) }

// DataSchema returns the $id of the JSON Schema of the payload: urn:tidings:follow:created:v1.
func (e *Event) DataSchema() string {
	return "urn:tidings:" + e.AggregateType + ":" + e.Type + ":v" + strconv.Itoa(e.Version)
}

// Subjects returns the subject filter of everything in one partition's stream, under prefix.
func Subjects(prefix string, partition int) string { return fmt.Sprintf("%s.%d.>", prefix, partition) }

const (
	closedSuffix = ".closed"
	systemToken  = "system." // in the subjects of the system's events, so that no filter for others matches them
)

// ClosingMessage returns the subject and headers of the message that ends a partition's stream,
// under prefix (Closes).
func ClosingMessage(prefix string, partition int) (subject string, headers map[string][]string) {
	return prefix + "." + strconv.Itoa(partition) + closedSuffix, map[string][]string{HeaderClosed: {"1"}, HeaderSource: {Source}}
}

// AggregateFilter returns the subject filter of all events of one tenant's aggregate type, under
// prefix.
func AggregateFilter(prefix string, tenant int64, aggregateType string) string {
	return fmt.Sprintf("%s.*.t%d.%s.*", prefix, tenant, aggregateType)
}

// TypeFilter returns the subject filter of all events of a type, of every tenant, under prefix. The
// event type * selects all of the aggregate type.
func TypeFilter(prefix, aggregateType, eventType string) string {
	return prefix + ".*." + system(aggregateType) + "*." + aggregateType + "." + eventType
}

// Subject returns the subject of the event in a partition, under prefix.
func (e *Event) Subject(prefix string, partition int) string {
	return prefix + "." + strconv.Itoa(partition) + "." + system(e.AggregateType) + "t" + strconv.FormatInt(e.TenantID, 10) + "." +
		e.AggregateType + "." + e.Type
}

func system(aggregateType string) string {
	if System(aggregateType) {
		return systemToken
	}
	return ""
}

// Headers returns the event's own headers. The relay adds the Nats-* headers of the publish.
func (e *Event) Headers() map[string][]string {
	h := make(map[string][]string, 12)
	e.SetHeaders(h, Naming{Source: Source})
	return h
}

// SetHeaders sets the event's own headers in h, which may hold those of another event, and leaves
// all others. It writes to h's values in place, so a publisher of many events needs only one map.
// Without a source it sets Source.
func (e *Event) SetHeaders(h map[string][]string, n Naming) {
	set := func(name, value string) {
		if v := h[name]; len(v) == 1 {
			v[0] = value
		} else {
			h[name] = []string{value}
		}
	}
	set(HeaderSpecVersion, "1.0")
	set(HeaderSource, cmp.Or(n.Source, Source))
	set(HeaderDataContentType, "application/json")
	set(HeaderID, e.ID)
	set(HeaderType, n.Type(e))
	set(HeaderDataSchema, e.DataSchema())
	set(HeaderTenant, strconv.FormatInt(e.TenantID, 10))
	set(HeaderSubject, e.AggregateID.String())
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
	fixedHeaders   = 1400     // the most bytes of an event's headers without traceparent: names, tokens, numbers, a time and a UUID
	publishHeaders = 1 << 10  // Nats-Batch-*, Nats-Expected-*
)

func token(s string) bool { return len(s) <= maxToken && isPlainToken(s) }

func isPlainToken(s string) bool {
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			return false
		}
	}
	return s != ""
}

// IsType reports whether s is AGGREGATE.EVENT of tokens that a subject can have.
func IsType(s string) bool {
	aggregate, name, ok := strings.Cut(s, ".")
	return ok && token(aggregate) && token(name)
}

// InvalidError explains why an event can never be published.
type InvalidError struct {
	Field  string // the column of outbox_messages with the fault
	Reason string
}

func (e *InvalidError) Error() string { return e.Field + " " + e.Reason }

// Validate returns an *InvalidError if the event can never be published: a type that is not one
// subject token, a trace with control characters, a time that no header can hold, headers or a
// message beyond the limits. maxMessage is the limit of the stream and the server in bytes. The
// result does not depend on whether the event has its ids yet.
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
		return invalid("occurred_at", "has the year %d, not one from 1 to 9999", year)
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
		return invalid("trace_id", "makes headers of %d bytes, above the limit of %d", size, maxHeaderBytes)
	}
	if total := size + len(e.Payload) + publishHeaders; total > maxMessage {
		return invalid("payload", "makes a message of %d bytes, above the limit of %d", total, maxMessage)
	}
	return nil
}

// Decode reads an event from its message. An error is permanent: Tidings did not write the message,
// or it is damaged. Even then Decode sets the fields that it could read, so that a consumer can
// park the message under its aggregate.
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
	tokens := withoutObject(strings.Split(subject, "."), get(HeaderTenant), ID(get(HeaderSubject)))
	if n := len(tokens); n < 4 || !strings.HasPrefix(tokens[n-3], "t") { // after the prefix, or the prefix and the partition
		errs = append(errs, fmt.Sprintf("subject is %.200q", subject))
	} else {
		e.TenantID = number("tenant", tokens[n-3][1:])
		e.AggregateType, e.Type = tokens[n-2], tokens[n-1]
	}
	if e.AggregateID = ID(get(HeaderSubject)); !isID(e.AggregateID) {
		errs = append(errs, fmt.Sprintf("%s is %.80q", HeaderSubject, e.AggregateID))
		e.AggregateID = "" // any text could be too long for an index, or none that PostgreSQL takes
	}
	e.OutboxID = number(HeaderOutboxID, get(HeaderOutboxID))
	of := get(HeaderType)
	if i := strings.LastIndex(of, ".v"); i < 0 || !strings.HasSuffix(of[:i], "."+e.AggregateType+"."+e.Type) {
		errs = append(errs, fmt.Sprintf("%s is %.200q", HeaderType, of))
	} else {
		e.Version = int(number(HeaderType, of[i+len(".v"):]))
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

// DecodePayload reads the event's payload into v. An error is permanent. It refuses a *Comment
// whose ids are not in canonical form, or whose post is not the event's aggregate.
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
