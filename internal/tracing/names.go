package tracing

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/tidings/tidings/event"
)

// All names of spans and attributes are in this file, because the conventions for messaging still
// change. They follow version 1.43.0.

// scope is the name of the instrumentation.
const scope = "github.com/tidings/tidings"

// The operations of spans, as the first word of their names and as messaging.operation.name.
const (
	Create  = "create"
	Send    = "send"
	Process = "process"
)

// tenantKey is the number of the tenant.
const tenantKey = attribute.Key("tidings.tenant")

// system is not a value of the conventions: they have none for NATS.
var system = semconv.MessagingSystemKey.String("nats")

// requestName returns the name of a request's span. route is a pattern, or empty.
func requestName(method, route string) string {
	if method = known(method); method == semconv.HTTPRequestMethodOther.Value.AsString() {
		method = "HTTP"
	}
	if route == "" {
		return method
	}
	return method + " " + route
}

// known returns the method as the conventions write it.
func known(method string) string {
	if method != strings.ToUpper(method) {
		return semconv.HTTPRequestMethodOther.Value.AsString()
	}
	return method
}

func requestAttributes(method, route string, status int, tenant int64) []attribute.KeyValue {
	all := []attribute.KeyValue{semconv.HTTPRequestMethodKey.String(known(method)), semconv.HTTPResponseStatusCode(status)}
	if route != "" {
		all = append(all, semconv.HTTPRoute(route))
	}
	if tenant != 0 {
		all = append(all, tenantKey.Int64(tenant))
	}
	if status >= 500 {
		all = append(all, semconv.ErrorTypeKey.String(strconv.Itoa(status)))
	}
	return all
}

// createName returns the name of the span of an event's creation.
func createName(e *event.Event) string { return Create + " " + e.AggregateType + "." + e.Type }

func createAttributes(e *event.Event) []attribute.KeyValue {
	return []attribute.KeyValue{system, semconv.MessagingOperationName(Create), semconv.MessagingOperationTypeCreate,
		semconv.MessagingDestinationTemplate(e.AggregateType + "." + e.Type), semconv.MessagingMessageID(e.ID),
		semconv.CloudEventsEventType(e.CloudEventsType()), tenantKey.Int64(e.TenantID)}
}

// place is the source or the target of a batch.
type place struct {
	operation string // Send or Process
	stream    string
	partition int
	consumer  string // only for Process
}

func (p place) kind() trace.SpanKind {
	if p.operation == Send {
		return trace.SpanKindClient
	}
	return trace.SpanKindConsumer
}

func (p place) name() string { return p.operation + " " + p.stream }

func (p place) attributes(count int) []attribute.KeyValue {
	all := []attribute.KeyValue{system, semconv.MessagingOperationName(p.operation), semconv.MessagingDestinationName(p.stream),
		semconv.MessagingDestinationPartitionID(strconv.Itoa(p.partition)), semconv.MessagingBatchMessageCount(count)}
	if p.operation == Send {
		return append(all, semconv.MessagingOperationTypeSend)
	}
	return append(all, semconv.MessagingOperationTypeProcess, semconv.MessagingConsumerGroupName(p.consumer))
}

func messageID(e *event.Event) attribute.KeyValue { return semconv.MessagingMessageID(e.ID) }

// errorType returns the class of an error, because its text may contain values. A PostgreSQL error
// is its SQLSTATE.
func errorType(err error) attribute.KeyValue {
	var sql interface{ SQLState() string }
	var timeout net.Error
	switch {
	case errors.As(err, &sql):
		return semconv.ErrorTypeKey.String(sql.SQLState())
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return semconv.ErrorTypeKey.String("timeout")
	case errors.Is(err, context.Canceled):
		return semconv.ErrorTypeKey.String("canceled")
	}
	return semconv.ErrorTypeOther
}
