package event

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files: only for a type or version that no release has published")

var when = time.Date(2026, 5, 1, 12, 30, 0, 123456000, time.UTC)

// payloads has one payload per event type of the catalog.
func payloads() map[string]any {
	t := Time{when}
	follow := func(status string) Follow {
		return Follow{FollowerID: "7", FolloweeID: "9007199254740993", Status: status, Version: 3, CreatedAt: t, PositionedAt: t,
			UpdatedAt: t, Actor: "user:7"}
	}
	comment := func(body, author, moderation, reason string) Comment {
		return Comment{CommentID: "0196b2d4-7c00-7000-8000-000000000001", PostID: "42",
			ParentID: "0196b2d4-7c00-7000-8000-000000000000", Slug: "abcd2345",
			Path: "0632f8a0000000abcd2344/0632f8a0000001abcd2345", AuthorID: "7", Body: body, AuthorState: author,
			ModerationState: moderation, Version: 2, CreatedAt: t, UpdatedAt: t, Actor: "user:7", Reason: reason}
	}
	return map[string]any{
		"follow.created":    follow(StatusActive),
		"follow.removed":    follow(StatusRemoved),
		"follow.updated":    follow(StatusActive),
		"comment.created":   comment("Grüße & <b>tags</b>\n", AuthorActive, ModerationNone, ""),
		"comment.edited":    comment("better", AuthorActive, ModerationApproved, ""),
		"comment.deleted":   comment("", AuthorDeleted, ModerationNone, ""),
		"comment.moderated": comment("", AuthorActive, ModerationHidden, "spam"),
		"comment.erased":    comment("", AuthorErased, ModerationNone, ""),
		"person.erased":     PersonErased{PersonID: "auth0|7", RequestedAt: t},
		"heartbeat.sent":    Heartbeat{Partition: 17, IntervalSeconds: 60},
		"thread.updated": Thread{PostID: "42", Locked: true, Premoderate: true, Title: "Rules", Version: 1,
			UpdatedAt: t, Actor: "user:7"},
	}
}

// golden is one message as it is on the stream.
type golden struct {
	Subject string              `json:"subject"`
	Headers map[string][]string `json:"headers"`
	Data    json.RawMessage     `json:"data"`
}

func TestEveryTypeAndVersionStaysReadable(t *testing.T) {
	all := payloads()
	for _, name := range EventTypes() {
		aggregate, typ, _ := strings.Cut(name, ".")
		for version := 1; version <= catalog[aggregate][typ]; version++ {
			file := filepath.Join("testdata", fmt.Sprintf("%s.v%d.json", name, version))
			t.Run(filepath.Base(file), func(t *testing.T) {
				payload, ok := all[name]
				if !ok {
					t.Fatal("the test has no payload of this type")
				}
				data, err := json.Marshal(payload)
				if err != nil {
					t.Fatal(err)
				}
				tenant := int64(1)
				if System(aggregate) {
					tenant = SystemTenant
				}
				e := Event{ID: "5b0f6a52-7d9c-4f0a-9d39-0a3c8a1f0001", TenantID: tenant, AggregateType: aggregate, AggregateID: "42",
					Type: typ, Version: version,
					OccurredAt: when, TraceParent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Payload: data, OutboxID: 1234}
				if *update {
					b, err := json.MarshalIndent(golden{e.Subject("events", 17), e.Headers(), data}, "", "  ")
					if err != nil {
						t.Fatal(err)
					}
					if err := os.WriteFile(file, append(b, '\n'), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				b, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				var g golden
				if err := json.Unmarshal(b, &g); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(g.Subject, e.Subject("events", 17)); diff != "" {
					t.Errorf("subject (-golden +written):\n%s", diff)
				}
				if diff := cmp.Diff(g.Headers, e.Headers()); diff != "" {
					t.Errorf("headers (-golden +written):\n%s", diff)
				}
				got, err := Decode(g.Subject, g.Headers, g.Data)
				if err != nil {
					t.Fatal(err)
				}
				e.Payload = got.Payload
				if diff := cmp.Diff(e, got); diff != "" {
					t.Errorf("decoded (-written +read):\n%s", diff)
				}
				read := map[string]any{AggregateFollow: &Follow{}, AggregateComment: &Comment{}, AggregateThread: &Thread{},
					AggregatePerson: &PersonErased{}, AggregateHeartbeat: &Heartbeat{}}[aggregate]
				if err := got.DecodePayload(read); err != nil {
					t.Fatal(err)
				}
				again, err := json.Marshal(read)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(data), string(again)); diff != "" {
					t.Errorf("payload (-written +read):\n%s", diff)
				}
			})
		}
	}
}

func TestWhatCannotBePublishedIsRefused(t *testing.T) {
	good := Event{ID: "5b0f6a52-7d9c-4f0a-9d39-0a3c8a1f0001", TenantID: 1, AggregateType: "follow", AggregateID: "1", Type: "created",
		Version: 1, OccurredAt: when, Payload: []byte(`{}`)}
	if err := good.Validate(1 << 20); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		breakIt func(*Event)
		want    string
	}{
		"a type of two tokens":           {func(e *Event) { e.Type = "a.b" }, "event_type"},
		"a type with a wildcard":         {func(e *Event) { e.Type = "*" }, "event_type"},
		"an empty type":                  {func(e *Event) { e.Type = "" }, "event_type"},
		"a type of 65 letters":           {func(e *Event) { e.Type = strings.Repeat("x", 65) }, "event_type"},
		"an aggregate type with a space": {func(e *Event) { e.AggregateType = "a b" }, "aggregate_type"},
		"an aggregate type beyond ASCII": {func(e *Event) { e.AggregateType = "ä" }, "aggregate_type"},
		"a trace with a line break": {func(e *Event) { e.TraceParent = "a\r\nNats-Rollup: all" },
			"trace_id has the control character"},
		"a trace that is not UTF-8": {func(e *Event) { e.TraceParent = "\xff" }, "trace_id is not valid UTF-8"},
		"headers over the limit":    {func(e *Event) { e.TraceParent = strings.Repeat("x", 61<<10) }, "trace_id makes headers"},
		"a time beyond RFC 3339": {func(e *Event) { e.OccurredAt = time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC) },
			"occurred_at"},
		"a time before it": {func(e *Event) { e.OccurredAt = time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC) }, "occurred_at"},
		"a payload over the server's limit": {func(e *Event) { e.Payload = []byte(strings.Repeat("x", 1<<20)) },
			"payload makes a message"},
		"a payload that fits without headers": {func(e *Event) { e.Payload = []byte(strings.Repeat("x", 1<<20-100)) },
			"payload makes a message"},
	} {
		t.Run(name, func(t *testing.T) {
			e := good
			c.breakIt(&e)
			err := e.Validate(1 << 20)
			if invalid := (*InvalidError)(nil); !errors.As(err, &invalid) || !strings.HasPrefix(err.Error(), c.want) ||
				!strings.HasPrefix(c.want, invalid.Field) {
				t.Errorf("got %v, want an error about %s", err, c.want)
			}
		})
	}

	// The headers that Validate does not check are bounded and clean.
	longest := Event{
		ID: good.ID, TenantID: math.MinInt64, AggregateType: strings.Repeat("x", maxToken), AggregateID: ID(strings.Repeat("i", 128)),
		Type: strings.Repeat("y", maxToken), Version: math.MinInt16, OccurredAt: when, OutboxID: math.MinInt64, TraceParent: "t",
	}
	size := 0
	headers := make(map[string][]string)
	longest.SetHeaders(headers, Naming{TypePrefix: strings.Repeat("p", 128), Source: strings.Repeat("z", 255)})
	for name, values := range headers {
		size += len(name) + len(": \r\n") + len(values[0])
	}
	if size-1 > fixedHeaders {
		t.Errorf("the headers take %d bytes without the trace: fixedHeaders is %d", size-1, fixedHeaders)
	}
}

func TestADamagedMessageIsPermanentAndKeepsItsAggregate(t *testing.T) {
	e := Event{ID: "id", TenantID: 3, AggregateType: "follow", AggregateID: "9", Type: "created", Version: 1, OccurredAt: when, OutboxID: 1}
	for name, damage := range map[string]func(h map[string][]string){
		"no time":            func(h map[string][]string) { delete(h, HeaderTime) },
		"no type":            func(h map[string][]string) { delete(h, HeaderType) },
		"another type":       func(h map[string][]string) { h[HeaderType] = []string{"tidings.comment.created.v1"} },
		"a version in words": func(h map[string][]string) { h[HeaderType] = []string{"tidings.follow.created.vone"} },
	} {
		t.Run(name, func(t *testing.T) {
			h := e.Headers()
			damage(h)
			got, err := Decode(e.Subject("events", 17), h, nil)
			if !IsPermanent(err) {
				t.Errorf("got %v: want a permanent error", err)
			}
			if got.TenantID != 3 || got.AggregateType != "follow" || got.AggregateID != "9" {
				t.Errorf("the aggregate is lost: %+v", got)
			}
		})
	}
	for _, subject := range []string{"events.4", "events.4.closed", "events.4.post.created", "events.4.tx.post.created"} {
		if _, err := Decode(subject, e.Headers(), nil); !IsPermanent(err) {
			t.Errorf("%s: got %v: want a permanent error", subject, err)
		}
	}
	unknown := e
	unknown.Version = 2
	if err := unknown.DecodePayload(&Follow{}); !IsPermanent(err) {
		t.Errorf("an unknown version: got %v", err)
	}
}

// TestAnEventIsTheSameOnWhicheverSubjectItCame: a resize moves aggregates to other partitions, and
// live subjects have no partition.
func TestAnEventIsTheSameOnWhicheverSubjectItCame(t *testing.T) {
	e := Event{ID: "5b0f6a52-7d9c-4f0a-9d39-0a3c8a1f0001", TenantID: 3, AggregateType: "follow", AggregateID: "9", Type: "created",
		Version: 1, OccurredAt: when, Payload: []byte(`{}`), OutboxID: 1}
	for _, subject := range []string{e.Subject("events", 0), e.Subject("my-events", 131), "live.t3.follow.created"} {
		got, err := Decode(subject, e.Headers(), e.Payload)
		if err != nil {
			t.Errorf("%s: %v", subject, err)
		}
		if diff := cmp.Diff(e, got); diff != "" {
			t.Errorf("%s (-published +read):\n%s", subject, diff)
		}
	}
}

// TestTheClosingMessageIsUnderItsPartitionsSubjects: the stream accepts it, but no filter for
// events matches it.
func TestTheClosingMessageIsUnderItsPartitionsSubjects(t *testing.T) {
	subject, headers := ClosingMessage("events", 12)
	if subject != "events.12.closed" || !Closes(subject, headers) || Closes("events.12.t1.door.open", headers) ||
		Closes(subject, map[string][]string{HeaderClosed: {"1"}}) {
		t.Errorf("the closing message is %s with %v", subject, headers)
	}
	if got, want := Subjects("events", 12), "events.12.>"; got != want {
		t.Errorf("the stream takes %s, want %s", got, want)
	}
	if got, want := TypeFilter("events", "follow", "*"), "events.*.*.follow.*"; got != want {
		t.Errorf("all follows are %s, want %s", got, want)
	}
	if got, want := TypeFilter("events", AggregateHeartbeat, Sent), "events.*.system.*.heartbeat.sent"; got != want {
		t.Errorf("the heartbeats are %s, want %s", got, want)
	}
	if got, want := AggregateFilter("events", 3, "follow"), "events.*.t3.follow.*"; got != want {
		t.Errorf("a tenant's follows are %s, want %s", got, want)
	}
}

func TestIDs(t *testing.T) {
	for _, s := range []string{"1", "0", "007", "9223372036854775808", "0196b2d4-7c00-7000-8000-00000000000a",
		"auth0|5f7c8ec7c33c6c004bbafe82",
		"7:batch", "a.b@example.com", "...", "~", "+=_-", strings.Repeat("x", 128)} {
		if id, err := ParseID(s); err != nil || id.String() != s {
			t.Errorf("%s: got %v, %v", s, id, err)
		}
	}
	for _, s := range []string{"", " 1", "1\n", "a/b", "é", "a%20b", "a,b", "*", ".", "..", "\x00", `"`, strings.Repeat("x", 129)} {
		if id, err := ParseID(s); err == nil {
			t.Errorf("%q was read as %s", s, id)
		}
	}
}

func TestVisibleIsOneRule(t *testing.T) {
	for _, author := range []string{AuthorActive, AuthorDeleted, AuthorErased} {
		for _, moderation := range []string{ModerationNone, ModerationPending, ModerationApproved, ModerationHidden, ModerationRemoved} {
			if got, want := Visible(author, moderation), State(author, moderation) == StateVisible; got != want {
				t.Errorf("%s, %s: visible is %t, state %s", author, moderation, got, State(author, moderation))
			}
		}
	}
}
