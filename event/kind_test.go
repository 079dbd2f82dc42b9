package event

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestBothArchetypesReadAndWriteTheGoldenPayloads decodes every golden follow and comment as an
// edge or a child, and encodes its payload again. The bytes must be equal.
func TestBothArchetypesReadAndWriteTheGoldenPayloads(t *testing.T) {
	for pattern, again := range map[string]func(e *Event) ([]byte, error){
		"testdata/follow.*.json": func(e *Event) ([]byte, error) {
			n := EdgeNames{From: "follower_id", To: "followee_id"}
			e.AggregateID = IDOf(1<<53 + 1) // the followee of the golden files, whose headers name another aggregate
			edge, err := e.DecodeEdge(n)
			if err != nil {
				return nil, err
			}
			return edge.Encode(n)
		},
		"testdata/comment.*.json": func(e *Event) ([]byte, error) {
			n := ChildNames{ID: "comment_id", Parent: "post_id"}
			c, err := e.DecodeChild(n)
			if err != nil {
				return nil, err
			}
			return c.Encode(n)
		},
	} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var g golden
			if err := json.Unmarshal(b, &g); err != nil {
				t.Fatal(err)
			}
			var want bytes.Buffer
			if err := json.Compact(&want, g.Data); err != nil {
				t.Fatal(err)
			}
			e, err := Decode(g.Subject, g.Headers, want.Bytes())
			if err != nil {
				t.Fatal(err)
			}
			if got, err := again(&e); err != nil || !bytes.Equal(got, want.Bytes()) {
				t.Errorf("%s: %s, %v; want %s", file, got, err, &want)
			}
		}
	}
}

func BenchmarkDecodeEdge(b *testing.B) {
	e := Event{AggregateType: "follow", AggregateID: "42", Type: Created, Version: 1,
		Payload: []byte(`{"follower_id":"7","followee_id":"42","status":"ACTIVE",` +
			`"version":1,"created_at":"2026-05-01T12:30:00.123456Z","positioned_at":"2026-05-01T12:30:00.123456Z",` +
			`"updated_at":"2026-05-01T12:30:00.123456Z","actor":"user:7"}`)}
	b.Run("edge", func(b *testing.B) {
		for b.Loop() {
			if _, err := e.DecodeEdge(EdgeNames{From: "follower_id", To: "followee_id"}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("follow", func(b *testing.B) {
		for b.Loop() {
			var f Follow
			if err := e.DecodePayload(&f); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkArchetypes reads and writes an edge and a child with attributes and with a text that is
// not ASCII.
func BenchmarkArchetypes(b *testing.B) {
	at := Time{when}
	edge := Edge{From: "7", To: "42", Status: StatusActive, Version: 1, CreatedAt: at, PositionedAt: at, UpdatedAt: at, Actor: "user:7",
		Attributes: json.RawMessage(`{"role":"member"}`)}
	child := Child{ID: "0196b2d4-7c00-7000-8000-000000000001", Parent: "42", AuthorID: "7", Body: "Grüße und <b>mehr</b> Text", Version: 1,
		AuthorState: AuthorActive, ModerationState: ModerationNone, CreatedAt: at, UpdatedAt: at, Actor: "user:7",
		Attributes: json.RawMessage(`{"rating":5}`)}
	edges, children := EdgeNames{From: "user_id", To: "group_id"}, ChildNames{ID: "review_id", Parent: "product_id"}
	edgeText, err1 := edge.Encode(edges)
	childText, err2 := child.Encode(children)
	for name, work := range map[string]func() error{
		"edge encode":  func() error { _, err := edge.Encode(edges); return err },
		"edge parse":   func() error { _, err := edges.Parse(edgeText); return err },
		"child encode": func() error { _, err := child.Encode(children); return err },
		"child parse":  func() error { _, err := children.Parse(childText); return err },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := errors.Join(err1, err2, work()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// FuzzTheCodecReadsLikeEncodingJSON: the codec reads every payload like encoding/json.
func FuzzTheCodecReadsLikeEncodingJSON(f *testing.F) {
	for _, payload := range []string{`{"follower_id":"7","followee_id":"42","status":"ACTIVE","version":3,"actor":"a\u0062\ud800 \u00fc"}`,
		` { "FOLLOWER_ID" : "7" , "version" : -0 , "version":1e2, "other":[{"status":"}"},"\"]"], "status":null,"created_at":null}`,
		"{\"\\u0076ersion\": 3, \"ver\u017fion\":4, \"actor\":\"\xff\", \"status\":{}, \"updated_at\":\"2026-05-01T12:30:00+01:00\"}",
		`null`, `[]`, `{}`, `{"version":true}`, `{"followee_id":7}`, `{"follower_id":"07"}`, `{"a":1`,
		`{"positioned_at":"\u0032026-05-01T12:30:00Z"}`,
		"{\"actor\":\"<&>\u2028\u007f\",\"updated_at\":\"2026-05-01T12:30:00Z\"\r\n,\t\"version\":12 }"} {
		f.Add(payload)
	}
	n := EdgeNames{From: "follower_id", To: "followee_id"}
	f.Fuzz(func(t *testing.T, payload string) {
		var want Follow
		wantErr := json.Unmarshal([]byte(payload), &want)
		e, err := n.Parse([]byte(payload))
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%q: %v, want %v", payload, err, wantErr)
		}
		got := Follow{FollowerID: e.From, FolloweeID: e.To, Status: e.Status, Version: e.Version, CreatedAt: e.CreatedAt,
			PositionedAt: e.PositionedAt, UpdatedAt: e.UpdatedAt, Actor: e.Actor}
		if err == nil && got != want {
			t.Fatalf("%q: %v, want %v", payload, got, want)
		}
		if e.Attributes = nil; err != nil {
			return
		}
		text, err1 := json.Marshal(want)
		if again, err2 := e.Encode(n); err1 != nil || err2 != nil || !bytes.Equal(again, text) {
			t.Fatalf("%q: %s, %v; want %s, %v", payload, again, err2, text, err1)
		}
	})
}
