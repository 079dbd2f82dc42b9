package api_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"reflect"
	"slices"
	"testing"

	"github.com/tidings/tidings/event/contracts"
	"github.com/tidings/tidings/kinds"
)

var update = flag.Bool("update", false, "write the golden files")

const goldenDocument = "testdata/openapi.json.gz"

// TestTheDocumentKeepsWhatItHad compares the OpenAPI document with the checked-in one. Every
// operation, schema and code still exists. Other kinds add to it, and descriptions and examples may
// change.
func TestTheDocumentKeepsWhatItHad(t *testing.T) {
	t.Parallel()
	f := open(t)
	now := f.document(t)
	if *update {
		raw, err := json.Marshal(now)
		if err != nil {
			t.Fatal(err)
		}
		var packed bytes.Buffer
		w := gzip.NewWriter(&packed)
		if _, err := w.Write(raw); err != nil || w.Close() != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(goldenDocument, packed.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	packed, err := os.ReadFile(goldenDocument)
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
	was := decode(t, string(raw)).(map[string]any)
	delete(was, "info") // only descriptions
	for _, lost := range missing("#", was, map[string]any(now)) {
		t.Error(lost)
	}
}

// missing returns the parts of was that is no longer has. Additional members of objects,
// alternatives of a oneOf, values of an enum, and required members of an answer are no difference.
func missing(at string, was, now any) (lost []string) {
	switch was := was.(type) {
	case map[string]any:
		object, ok := now.(map[string]any)
		if !ok {
			break
		}
		for name, v := range was {
			if _, text := v.(string); text && (name == "description" || name == "summary") || name == "example" || name == "examples" {
				continue
			}
			more, ok := object[name]
			if !ok {
				lost = append(lost, fmt.Sprintf("%s/%s is gone", at, name))
				continue
			}
			before, isList := v.([]any)
			after, _ := more.([]any)
			if (name == "oneOf" || name == "enum") && isList { // in any order
				for _, one := range before {
					if !slices.ContainsFunc(after, func(other any) bool { return len(missing(at, one, other)) == 0 }) {
						lost = append(lost, fmt.Sprintf("%s/%s: %v is gone", at, name, one))
					}
				}
				continue
			}
			if (name == "required" || name == "enum") && isList {
				for _, member := range before {
					if !slices.Contains(after, member) {
						lost = append(lost, fmt.Sprintf("%s/%s: %v is gone", at, name, member))
					}
				}
				continue
			}
			lost = append(lost, missing(at+"/"+name, v, more)...)
		}
		return lost
	case []any:
		list, ok := now.([]any)
		if !ok || len(list) != len(was) {
			break
		}
		for i := range was {
			lost = append(lost, missing(fmt.Sprintf("%s/%d", at, i), was[i], list[i])...)
		}
		return lost
	}
	if !reflect.DeepEqual(was, now) {
		lost = append(lost, fmt.Sprintf("%s: was %v, is %v", at, was, now))
	}
	return lost
}

// TestTheContractsAreServed reads the contracts of the kinds in force without a token, and of a
// kind that is applied later.
func TestTheContractsAreServed(t *testing.T) {
	t.Parallel()
	f, set, _ := openKinds(t, false)
	served := func(path, mediaType string, doc any) {
		t.Helper()
		want, err := contracts.Encode(doc)
		if err != nil {
			t.Fatal(err)
		}
		a := f.want(t, 200, "GET", path, "", "Authorization")
		if ct := a.Header.Get("Content-Type"); ct != mediaType || a.body != string(want) {
			t.Errorf("%s: %s %.200s", path, ct, a.body)
		}
	}
	const asyncAPI, schema = "application/vnd.aai.asyncapi+json;version=3.1.0", "application/schema+json"
	served("/v1/asyncapi.json", asyncAPI, contracts.AsyncAPI(kinds.Builtin(), nil, contracts.DefaultNames()))
	for _, typ := range contracts.Types(set, nil) { // the first type of an unknown kind makes the API read the kinds again
		served("/v1/schemas/"+typ.Name, schema, typ.Schema())
	}
	served("/v1/asyncapi.json", asyncAPI, contracts.AsyncAPI(set, nil, contracts.DefaultNames()))
	for _, name := range []string{"tidings.follow.created.v2", "tidings.follow.updated.v1", "x", "..%2f"} {
		if a := f.want(t, 404, "GET", "/v1/schemas/"+name, "", "Authorization"); a.text("code") != "not-found" {
			t.Errorf("%s: %s", name, a.body)
		}
	}
	f.want(t, 405, "POST", "/v1/asyncapi.json", "")
}

// Each answer that needs no token is compressed for a client that takes gzip, has a length and an
// ETag, and is not sent to a client that has it.
func TestDocumentsAreSentPackedAndOnlyWhenTheyChanged(t *testing.T) {
	t.Parallel()
	f := open(t)
	get := func(path, codings, have string) *httptest.ResponseRecorder {
		r, w := httptest.NewRequestWithContext(t.Context(), "GET", path, nil), httptest.NewRecorder()
		r.Header.Set("Accept-Encoding", codings)
		if have != "" {
			r.Header.Set("If-None-Match", have)
		}
		f.ServeHTTP(w, r)
		return w
	}
	for _, path := range []string{"/v1/openapi.json", "/v1/openapi.yaml", "/v1/asyncapi.json", "/docs",
		"/v1/schemas/tidings.follow.created.v1"} {
		plain, packed := get(path, "br, gzip;q=0", ""), get(path, "br;q=1, GZIP; q=0.5", "")
		if plain.Code != 200 || packed.Code != 200 || packed.Header().Get("Content-Encoding") != "gzip" {
			t.Errorf("%s: %d %v, %d %v", path, plain.Code, plain.Header(), packed.Code, packed.Header())
			continue
		}
		r, err := gzip.NewReader(bytes.NewReader(packed.Body.Bytes()))
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if raw, err := io.ReadAll(r); err != nil || string(raw) != plain.Body.String() || len(raw) < 2*packed.Body.Len() {
			t.Errorf("%s: %d bytes packed into %d, %v", path, plain.Body.Len(), packed.Body.Len(), err)
		}
		for codings, a := range map[string]*httptest.ResponseRecorder{"identity": plain, "gzip": packed} {
			tag := a.Header().Get("ETag")
			if got := get(path, codings, `"old", W/`+tag); got.Code != 304 || got.Body.Len() != 0 || got.Header().Get("ETag") != tag {
				t.Errorf("%s has not changed: %d %v", path, got.Code, got.Header())
			}
			if a.Header().Get("Content-Length") != fmt.Sprint(a.Body.Len()) ||
				!slices.Contains(a.Header().Values("Vary"), "Accept-Encoding") {
				t.Errorf("%s: %v", path, a.Header())
			}
		}
		if plain.Header().Get("ETag") == packed.Header().Get("ETag") || plain.Header().Get("Content-Encoding") != "" {
			t.Errorf("%s: %v, %v", path, plain.Header(), packed.Header())
		}
	}
}
