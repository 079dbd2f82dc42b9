package contracts_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/event/contracts"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/kindfile"
)

var update = flag.Bool("update", false, "write event/contracts/builtin, unless that breaks a reader of the files there. "+
	"To change a type that no release has published, remove its file first")

const builtin = "builtin"

// read parses JSON into the types of the library.
func read(t *testing.T, raw []byte) any {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatalf("%v in %.200q", err, raw)
	}
	return v
}

// compile compiles a schema that also checks formats.
func compile(t *testing.T, doc any) *jsonschema.Schema {
	t.Helper()
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("urn:test", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("urn:test")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// checkedIn returns the files of the built-in kinds as the last release has them.
func checkedIn(t *testing.T) map[string][]byte {
	t.Helper()
	files := make(map[string][]byte)
	err := filepath.WalkDir(builtin, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, _ := filepath.Rel(builtin, path)
		files[filepath.ToSlash(name)], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestTheCheckedInContractsAreThoseOfTheBuiltInKinds(t *testing.T) {
	files, err := contracts.Files(kinds.Builtin(), nil, contracts.DefaultNames())
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		unreadable(t)
		if t.Failed() {
			return
		}
		if err := os.RemoveAll(builtin); err != nil {
			t.Fatal(err)
		}
		for name, file := range files {
			path := filepath.Join(builtin, filepath.FromSlash(name))
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, file, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	have := checkedIn(t)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(files)), slices.Sorted(maps.Keys(have))); diff != "" || len(files) < 20 {
		t.Errorf("files (-made +checked in):\n%s", diff)
	}
	for name, file := range files {
		if !bytes.Equal(file, have[name]) {
			t.Errorf("%s differs from the kinds; `go test ./contracts -update` writes it", name)
		}
	}
}

// released returns the schemas of the last release by type.
func released(t *testing.T) map[string]map[string]any {
	t.Helper()
	all := make(map[string]map[string]any)
	for name, file := range checkedIn(t) {
		if name, ok := strings.CutPrefix(name, "schemas/"); ok {
			all[strings.TrimSuffix(name, ".json")] = read(t, file).(map[string]any)
		}
	}
	return all
}

func schemas(t *testing.T, set *kinds.Set) map[string]map[string]any {
	t.Helper()
	all := make(map[string]map[string]any)
	for _, typ := range contracts.Types(set, nil) {
		raw, err := contracts.Encode(typ.Schema())
		if err != nil {
			t.Fatal(err)
		}
		all[typ.Name] = read(t, raw).(map[string]any)
	}
	return all
}

// TestReadersOfTheLastReleaseReadWhatThisOneWrites requires that every type of the last release
// exists, with a schema that its readers can read.
func TestReadersOfTheLastReleaseReadWhatThisOneWrites(t *testing.T) { unreadable(t) }

func unreadable(t *testing.T) {
	t.Helper()
	now := schemas(t, kinds.Builtin())
	for name, was := range released(t) {
		if now[name] == nil {
			t.Errorf("%s is gone", name)
			continue
		}
		for _, d := range contracts.Differences(was, now[name]) {
			t.Errorf("%s: %s", name, d)
		}
	}
}

func TestASchemaThatOthersCannotReadIsRefused(t *testing.T) {
	const name = "tidings.comment.moderated.v1"
	properties := func(s map[string]any) map[string]any { return s["properties"].(map[string]any) }
	member := func(s map[string]any, name string) map[string]any { return properties(s)[name].(map[string]any) }
	for what, c := range map[string]struct {
		change func(s map[string]any)
		want   string
	}{
		"a member that is gone":       {func(s map[string]any) { delete(properties(s), "slug") }, "#/properties/slug is gone"},
		"a member that may be absent": {func(s map[string]any) { s["required"] = s["required"].([]any)[1:] }, "#/required was"},
		"a member that old messages lack": {func(s map[string]any) {
			s["required"] = append(slices.Clone(s["required"].([]any)), "reason")
		}, "#/required was"},
		"a narrowed enum": {func(s map[string]any) { m := member(s, "author_state"); m["enum"] = m["enum"].([]any)[1:] },
			"#/properties/author_state/enum was"},
		"a value that readers do not know": {func(s map[string]any) {
			m := member(s, "author_state")
			m["enum"] = append(slices.Clone(m["enum"].([]any)), "BANNED")
		}, "#/properties/author_state/enum was"},
		"another type": {func(s map[string]any) { member(s, "version")["type"] = "string" },
			`#/properties/version/type was "integer" and is "string"`},
		"another format": {func(s map[string]any) { delete(member(s, "created_at"), "format") },
			"#/properties/created_at/format is gone"},
		"a rule where there was none": {func(s map[string]any) { member(s, "body")["maxLength"] = 10 },
			"#/properties/body/maxLength is new"},
		"members that are not allowed": {func(s map[string]any) { s["additionalProperties"] = false },
			"#/additionalProperties is new"},
		"a member more, which may be absent": {func(s map[string]any) { properties(s)["mood"] = map[string]any{"type": "string"} }, ""},
		"another description": {func(s map[string]any) { s["description"], member(s, "body")["description"] = "x", "y" },
			""},
		"nothing": {func(map[string]any) {}, ""},
	} {
		was, is := schemas(t, kinds.Builtin())[name], schemas(t, kinds.Builtin())[name]
		c.change(is)
		got := contracts.Differences(was, is)
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.HasPrefix(got[0], c.want)) {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
	}
}

// golden returns the messages of releases (package event).
func golden(t *testing.T) map[string]map[string]any {
	t.Helper()
	files, err := filepath.Glob("../testdata/*.json")
	if err != nil || len(files) < 8 {
		t.Fatalf("%d golden messages, %v", len(files), err)
	}
	all := make(map[string]map[string]any)
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all["tidings."+strings.TrimSuffix(filepath.Base(file), ".json")] = read(t, raw).(map[string]any)
	}
	delete(all, "tidings.follow.updated.v1") // only an installation whose follows have attributes has this type
	return all
}

// TestGoldenMessagesFitTheSchemas checks messages of every release with the schemas of this release
// and of the last one. A changed message must not fit.
func TestGoldenMessagesFitTheSchemas(t *testing.T) {
	for _, all := range []map[string]map[string]any{schemas(t, kinds.Builtin()), released(t)} {
		for name, message := range golden(t) {
			s, data := compile(t, all[name]), message["data"].(map[string]any)
			if err := s.Validate(data); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			for member := range data {
				changed := maps.Clone(data)
				changed[member] = map[string]any{}
				if err := s.Validate(changed); err == nil {
					t.Errorf("%s fits with an object as %s", name, member)
				}
				delete(changed, member)
				optional := slices.Contains([]string{"parent_id", "reason", "title", "kind", "erased", "attributes"}, member)
				if err := s.Validate(changed); (err == nil) != optional {
					t.Errorf("%s without %s: %v", name, member, err)
				}
			}
			more := maps.Clone(data)
			more["unknown"] = json.Number("1")
			if err := s.Validate(more); err != nil {
				t.Errorf("%s with a member more: %v", name, err)
			}
		}
	}
}

// TestTheHeadersOfGoldenMessagesFitTheDocument checks headers with the schemas in the AsyncAPI
// document.
func TestTheHeadersOfGoldenMessagesFitTheDocument(t *testing.T) {
	raw, err := contracts.Encode(contracts.AsyncAPI(kinds.Builtin(), nil, contracts.DefaultNames()))
	if err != nil {
		t.Fatal(err)
	}
	doc := read(t, raw).(map[string]any)
	messages, channels := doc["components"].(map[string]any)["messages"].(map[string]any), doc["channels"].(map[string]any)
	for name, message := range golden(t) {
		headers := make(map[string]any)
		for header, values := range message["headers"].(map[string]any) {
			headers[header] = values.([]any)[0]
		}
		if err := compile(t, messages[name].(map[string]any)["headers"]).Validate(headers); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		headers["ce-type"] = "tidings.other.v1"
		if err := compile(t, messages[name].(map[string]any)["headers"]).Validate(headers); err == nil {
			t.Errorf("%s fits with another type", name)
		}
		kind := strings.TrimSuffix(strings.TrimPrefix(name, "tidings."), ".v1")
		address := channels[kind].(map[string]any)["address"].(string)
		if want := strings.NewReplacer("{partition}", "17", "{tenant}", "1").Replace(address); message["subject"] != want {
			t.Errorf("%s: the subject is %s, by the document %s", name, message["subject"], want)
		}
	}
}

// metaSchema returns AsyncAPI's schema of its own documents, from the npm package @asyncapi/specs
// 6.11.1 (schemas/3.1.0.json). The license is beside it. The repository contains the file, so the
// test needs no registry and the version cannot change.
func metaSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	packed, err := os.ReadFile("testdata/asyncapi-3.1.0.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	const at = "http://asyncapi.com/definitions/3.1.0/asyncapi.json"
	if err := c.AddResource(at, read(t, raw)); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile(at)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const ownKinds = `objects: {song: songs}
edges: {play: {plural: plays, from: user, to: song, forward: plays, reverse: players,
  attributes: {mood: {enum: [calm, loud], required: true}}}}
children: {verdict: {plural: verdicts, parent: song, threaded: true,
  attributes: {stars: {type: integer, minimum: 1, maximum: 5, default: 3}}}}
`

// TestTheDocumentHasTheSubjectsOfObjects checks them if relays publish there, and otherwise that
// there are none.
func TestTheDocumentHasTheSubjectsOfObjects(t *testing.T) {
	names := contracts.DefaultNames()
	for _, names.Objects = range []bool{false, true} {
		raw, err := contracts.Encode(contracts.AsyncAPI(kinds.Builtin(), nil, names))
		if err != nil {
			t.Fatal(err)
		}
		doc := read(t, raw).(map[string]any)
		if err := metaSchema(t).Validate(doc); err != nil {
			t.Errorf("%.3000v", err)
		}
		if broken := unresolved(doc, doc); len(broken) > 0 {
			t.Errorf("the references %q have no target", broken)
		}
		for name, channel := range doc["channels"].(map[string]any) {
			kind, of, _ := strings.Cut(strings.TrimPrefix(name, "live."), ".")
			if !strings.HasPrefix(name, "live.") || kind == event.AggregatePerson {
				continue
			}
			object, _ := doc["channels"].(map[string]any)["object."+kind+"."+of].(map[string]any)
			if want := channel.(map[string]any)["address"].(string) + ".{object}"; (object != nil) != names.Objects ||
				object != nil && object["address"] != want {
				t.Errorf("%s of one object: %v", name, object)
			}
		}
		if _, is := doc["channels"].(map[string]any)["object.person.erased"]; is {
			t.Error("an erasure has a subject of an object, which it is not about")
		}
	}
}

func TestTheDocumentIsAsyncAPI(t *testing.T) {
	meta := metaSchema(t)
	own, err := kindfile.Extend(kinds.Builtin(), []byte(ownKinds))
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range []*kinds.Set{kinds.Builtin(), own} {
		raw, err := contracts.Encode(contracts.AsyncAPI(set, nil, contracts.DefaultNames()))
		if err != nil {
			t.Fatal(err)
		}
		doc := read(t, raw).(map[string]any)
		if err := meta.Validate(doc); err != nil {
			t.Errorf("%.3000v", err)
		}
		for _, broken := range unresolved(doc, doc) {
			t.Errorf("the reference %s has no target", broken)
		}
		for _, part := range []string{"channels", "operations"} { // the meta-schema refuses invalid members
			for name := range doc[part].(map[string]any) {
				whole := maps.Clone(doc)
				whole[part] = map[string]any{name: "none"}
				if meta.Validate(whole) == nil {
					t.Fatalf("the schema accepts a text as a member of %s", part)
				}
				break
			}
		}
	}
}

// unresolved returns the references in v that have no target in the document.
func unresolved(doc, v any) (all []string) {
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			all = append(all, unresolved(doc, item)...)
		}
	case map[string]any:
		if to, ok := v["$ref"].(string); ok {
			at := doc
			for _, name := range strings.Split(to, "/")[1:] {
				m, _ := at.(map[string]any)
				at = m[name]
			}
			if at == nil {
				return []string{to}
			}
		}
		for _, item := range v {
			all = append(all, unresolved(doc, item)...)
		}
	}
	return all
}

// TestKindsOfOnesOwnHaveContracts checks the names and attributes of a deployment's own kinds. The
// contract promises no more of attributes than events do.
func TestKindsOfOnesOwnHaveContracts(t *testing.T) {
	own, err := kindfile.Extend(kinds.Builtin(), []byte(ownKinds))
	if err != nil {
		t.Fatal(err)
	}
	all := schemas(t, own)
	play := map[string]any{"user_id": "7", "song_id": "42", "status": "ACTIVE", "version": json.Number("1"),
		"created_at": "2026-05-01T12:30:00.123456Z", "positioned_at": "2026-05-01T12:30:00.123456Z",
		"updated_at": "2026-05-01T12:30:00.123456Z", "actor": "a"}
	with := func(attributes map[string]any) map[string]any {
		p := maps.Clone(play)
		p["attributes"] = attributes
		return p
	}
	s := compile(t, all["tidings.play.created.v1"])
	for _, good := range []map[string]any{play, with(map[string]any{"mood": "calm"}), with(map[string]any{"mood": "loud", "later": true}),
		with(map[string]any{})} {
		if err := s.Validate(good); err != nil {
			t.Errorf("%v: %v", good, err)
		}
	}
	if err := s.Validate(with(map[string]any{"mood": "sad"})); err == nil {
		t.Error("an unknown mood fits")
	}
	var names []string
	for name := range all {
		if strings.Contains(name, ".play.") || strings.Contains(name, ".verdict.") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	want := "[tidings.play.created.v1 tidings.play.removed.v1 tidings.play.updated.v1 tidings.verdict.created.v1 " +
		"tidings.verdict.deleted.v1 tidings.verdict.edited.v1 tidings.verdict.erased.v1]"
	if fmt.Sprint(names) != want {
		t.Errorf("%v, want %s", names, want)
	}
}
