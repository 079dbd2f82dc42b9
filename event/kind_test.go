package event

import (
	"bytes"
	"encoding/json"
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
			e.AggregateID = 1<<53 + 1 // the followee of the golden files, whose headers name another aggregate
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
	e := Event{AggregateType: "follow", AggregateID: 42, Type: Created, Version: 1,
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

func TestAttributesFromTheDatabaseHaveOneForm(t *testing.T) {
	for in, want := range map[string]string{
		`{"stars": 5, "length": 9007199254740993, "a<b": "<&>"}`: `{"a<b":"<&>","length":9007199254740993,"stars":5}`,
		`{}`:  `{}`,
		``:    ``,
		`[1]`: `[1]`, // input that is not attributes from jsonb is returned unchanged
	} {
		if got := string(OneForm([]byte(in))); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}
