package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
)

// maxReasonBytes bounds the reason of a retry or discard.
const maxReasonBytes = 1000

// DeadMessage is a message of the outbox's DLQ without its payload. Applications also write
// messages with plain SQL, so a type may be any text.
type DeadMessage struct {
	ID            event.Number `json:"id" doc:"The id of the event in the outbox."`
	EventID       string       `json:"event_id" format:"uuid"`
	AggregateType string       `json:"aggregate_type"`
	AggregateID   string       `json:"aggregate_id" doc:"The id of the object that the event is about."`
	EventType     string       `json:"event_type"`
	EventVersion  int          `json:"event_version"`
	Attempts      int          `json:"attempts" doc:"The number of failed attempts."`
	LastError     string       `json:"last_error"`
	TraceParent   string       `json:"traceparent,omitempty"`
	OccurredAt    event.Time   `json:"occurred_at" format:"date-time"`
	InsertedAt    event.Time   `json:"inserted_at" format:"date-time" doc:"When the event was written to the outbox."`
	DeadAt        event.Time   `json:"dead_at" format:"date-time" doc:"When the event was moved to the DLQ."`
}

// DeadMessageFull is a message of the outbox's DLQ.
type DeadMessageFull struct {
	DeadMessage
	Payload json.RawMessage `json:"payload" doc:"Any JSON value."`
}

// DeadMessageList is one page.
type DeadMessageList struct {
	Items []DeadMessage `json:"items" nullable:"false"`
	Next  string        `json:"next,omitempty" doc:"The cursor of the next page; absent on the last page."`
}

// DLQAction is the record of an action on a message.
type DLQAction struct {
	At            event.Time   `json:"at" format:"date-time"`
	Actor         string       `json:"actor"`
	Action        string       `json:"action" enum:"retry,discard"`
	ID            event.Number `json:"id" doc:"The id of the message in the DLQ."`
	EventID       string       `json:"event_id" format:"uuid"`
	AggregateType string       `json:"aggregate_type"`
	AggregateID   string       `json:"aggregate_id" doc:"The id of the object that the event is about."`
	EventType     string       `json:"event_type"`
	NewID         string       `json:"new_id,omitempty" doc:"The id of the retried message in the outbox."`
	Reason        string       `json:"reason,omitempty"`
}

func deadMessageOf(m outbox.DLQMessage) DeadMessage {
	e := m.Event
	return DeadMessage{
		ID: event.Number(m.ID), EventID: e.ID, AggregateType: e.AggregateType, AggregateID: e.AggregateID.String(),
		EventType: e.Type, EventVersion: e.Version, Attempts: m.Attempts, LastError: m.Error, TraceParent: e.TraceParent,
		OccurredAt: event.Time{Time: e.OccurredAt}, InsertedAt: event.Time{Time: m.InsertedAt}, DeadAt: event.Time{Time: m.DeadAt},
	}
}

// DLQPath names a message.
type DLQPath struct {
	ID number `path:"message_id" doc:"The message's id."`
}

type dlqListInput struct {
	AggregateType string    `query:"aggregate_type" doc:"Only of this aggregate type."`
	AggregateID   id        `query:"aggregate_id" doc:"Only of the aggregates with this id."`
	EventType     string    `query:"event_type" doc:"Only of this event type."`
	DeadBefore    time.Time `query:"dead_before" doc:"Only messages moved to the DLQ before this time."`
	DeadAfter     time.Time `query:"dead_after" doc:"Only messages moved to the DLQ at or after this time."`
	Page
}

type dlqListOutput struct{ Body DeadMessageList }

type dlqGetOutput struct{ Body DeadMessageFull }

type dlqActInput struct {
	DLQPath
	Body *struct {
		Reason string `json:"reason,omitempty" doc:"The reason, recorded with the action: at most 1000 bytes without control characters."`
	}
}

type dlqActOutput struct{ Body DLQAction }

func (s *server) dlqRoutes() {
	const path, tag = "/v1/outbox/dlq", "Outbox"
	register(s, route{
		method: http.MethodGet, path: path, id: "list-dlq-messages", tag: tag, role: tokens.RoleAdmin, status: http.StatusOK,
		summary:     "List the events that could not be published",
		description: "Lists the tenant's messages of the outbox's DLQ by id, without payloads. Reads the truth.",
		codes:       []string{codeCursorInvalid},
	}, s.listDLQ)
	register(s, route{
		method: http.MethodGet, path: path + "/{message_id}", id: "get-dlq-message", tag: tag,
		role: tokens.RoleAdmin, status: http.StatusOK, summary: "Read an event that could not be published",
		description: "Includes the payload. Reads the truth.",
		codes:       []string{codeNotFound},
	}, s.getDLQ)
	register(s, route{
		method: http.MethodPost, path: path + "/{message_id}:retry", id: "retry-dlq-message", tag: tag,
		role: tokens.RoleAdmin, status: http.StatusOK, summary: "Put an event back into the outbox",
		description: "Gives the event a new id after all others and resets its attempts. 404 if the DLQ does not have the message: " +
			"of two concurrent requests one gets 200.",
		codes: writing(codeNotFound),
	}, s.actDLQ(s.dlq.Retry))
	register(s, route{
		method: http.MethodPost, path: path + "/{message_id}:discard", id: "discard-dlq-message", tag: tag,
		role: tokens.RoleAdmin, status: http.StatusOK, summary: "Delete an event that could not be published",
		description: "Deletes the event permanently with its payload; a record of the action remains. 404 if the DLQ does not have the " +
			"message: of two concurrent requests one gets 200.",
		codes: writing(codeNotFound),
	}, s.actDLQ(s.dlq.Discard))
}

// dlqCursor is the content of a cursor of the DLQ.
type dlqCursor struct {
	ID event.Number `json:"i"`
}

func (s *server) listDLQ(ctx context.Context, in *dlqListInput) (*dlqListOutput, error) {
	tenant := callerOf(ctx).TenantID
	f := outbox.DLQFilter{
		TenantID: tenant, AggregateType: in.AggregateType, AggregateID: in.AggregateID.ID, EventType: in.EventType,
		DeadBefore: in.DeadBefore, DeadAfter: in.DeadAfter,
	}
	for parameter, v := range map[string]string{"aggregate_type": in.AggregateType, "event_type": in.EventType} {
		if !utf8.ValidString(v) || strings.ContainsRune(v, 0) { // no column can hold it
			return nil, s.problems.problem(codeValidation, "", FieldError{Detail: "expected UTF-8 without NUL", Parameter: parameter})
		}
	}
	l := list{tenant: tenant, name: "dlq"}
	if in.Cursor != "" {
		var c dlqCursor
		if err := s.cursors.decode(l, in.Cursor, &c); err != nil {
			return nil, err
		}
		f.After = int64(c.ID)
	}
	rows, err := postgres.Collect(s.dlq.List(ctx, f, in.Limit+1))
	if err != nil {
		return nil, err
	}
	rows, next, err := newPage(s, l, in.Limit, rows, func(m outbox.DLQMessage) any { return dlqCursor{event.Number(m.ID)} })
	if err != nil {
		return nil, err
	}
	items := make([]DeadMessage, len(rows))
	for i, m := range rows {
		items[i] = deadMessageOf(m)
	}
	return &dlqListOutput{Body: DeadMessageList{Items: items, Next: next}}, nil
}

func (s *server) getDLQ(ctx context.Context, in *DLQPath) (*dlqGetOutput, error) {
	m, err := s.dlq.Get(ctx, callerOf(ctx).TenantID, int64(in.ID.Number))
	if errors.Is(err, outbox.ErrNotInDLQ) {
		return nil, s.notInDLQ()
	}
	if err != nil {
		return nil, err
	}
	return &dlqGetOutput{Body: DeadMessageFull{DeadMessage: deadMessageOf(m), Payload: m.Event.Payload}}, nil
}

func (s *server) notInDLQ() error {
	return s.problems.problem(codeNotFound, "the DLQ does not have this message")
}

// actDLQ returns the handler that retries or discards one message.
func (s *server) actDLQ(
	do func(context.Context, outbox.DLQRequest) ([]outbox.DLQAction, error),
) func(context.Context, *dlqActInput) (*dlqActOutput, error) {
	return func(ctx context.Context, in *dlqActInput) (*dlqActOutput, error) {
		c := callerOf(ctx)
		r := outbox.DLQRequest{DLQFilter: outbox.DLQFilter{TenantID: c.TenantID, IDs: []int64{int64(in.ID.Number)}},
			Limit: 1, Actor: c.meta.Actor, Token: c.token}
		if in.Body != nil {
			r.Reason = in.Body.Reason
		}
		if len(r.Reason) > maxReasonBytes || strings.IndexFunc(r.Reason, func(c rune) bool { return c < ' ' || c == 0x7f }) >= 0 {
			return nil, s.problems.problem(codeValidation, "",
				FieldError{Detail: "expected at most 1000 bytes without control characters", Pointer: "#/reason"})
		}
		did, err := do(ctx, r)
		if err != nil {
			return nil, err
		}
		if len(did) == 0 {
			return nil, s.notInDLQ()
		}
		a := did[0]
		answer := DLQAction{
			At: event.Time{Time: a.At}, Actor: a.Actor, Action: a.Action, ID: event.Number(a.ID), EventID: a.EventID,
			AggregateType: a.AggregateType, AggregateID: a.AggregateID.String(), EventType: a.EventType, Reason: a.Reason,
		}
		if a.NewID != 0 {
			answer.NewID = strconv.FormatInt(a.NewID, 10)
		}
		return &dlqActOutput{Body: answer}, nil
	}
}

// TransformSchema declares the payload as any JSON value. The framework would declare its bytes as
// text.
func (DeadMessageFull) TransformSchema(_ huma.Registry, s *huma.Schema) *huma.Schema {
	s.Properties["payload"] = &huma.Schema{Description: "Any JSON value."}
	return s
}
