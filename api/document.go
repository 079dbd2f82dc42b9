package api

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/yaml"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/event/contracts"
	"github.com/tidings/tidings/kinds/upstreams"
)

// Paths of the documents. The documents have no data of any tenant, so they need no token.
const (
	openAPIPath  = "/v1/openapi"
	asyncAPIPath = "/v1/asyncapi.json"
	schemasPath  = "/v1/schemas/{type}"
	docsPath     = "/docs"
)

func newOpenAPI() *huma.OpenAPI {
	schemas := huma.NewMapRegistry("#/components/schemas/", huma.DefaultSchemaNamer)
	schemas.RegisterTypeAlias(reflect.TypeFor[event.Number](), reflect.TypeFor[answeredNumber]())
	schemas.RegisterTypeAlias(reflect.TypeFor[event.ID](), reflect.TypeFor[answeredID]())
	schemas.RegisterTypeAlias(reflect.TypeFor[event.Time](), reflect.TypeFor[answeredTime]())
	return &huma.OpenAPI{
		OpenAPI: "3.1.0",
		Info: &huma.Info{
			Title: "Tidings", Version: "1",
			Description: "Write and read edges (follows, likes, ...) and children (comments, reviews, ...). Some routes read the truth: " +
				"their answers include every committed write. Others read a projection, which follows the writes with a delay. Its " +
				"as_of is the time up to which the answer includes every write. With the Tidings-Token of a write the answer also " +
				"includes that write. Every answer of the API outside 2xx and 304 is an RFC 9457 problem with a stable code. The HTTP " +
				"server refuses malformed requests in plain text. " +
				"Answers to a token with a rate limit have RateLimit-Policy and RateLimit (draft-ietf-httpapi-ratelimit-headers-11).",
			License: &huma.License{Name: "Apache License 2.0", Identifier: "Apache-2.0"},
		},
		Servers: []*huma.Server{{URL: "/", Description: "The host that serves this document."}},
		Components: &huma.Components{
			Schemas: schemas,
			SecuritySchemes: map[string]*huma.SecurityScheme{
				"token": {Type: "http", Scheme: "bearer", Description: "A service token of a tenant. Tidings-Actor names the actor. The " +
					"security requirement names the role that the token needs."},
			},
		},
		Security: []map[string][]string{{"token": {}}},
	}
}

func (s *server) problemSchema() *huma.Schema {
	return s.api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[Problem](), true, "Problem")
}

// documentRoutes serves the OpenAPI document and a page made of it. It comes after all other
// routes, because both describe them. The first request for a document builds it: that takes longer
// than all routes together, and few processes get such a request.
func (s *server) documentRoutes() {
	spec := sync.OnceValues(s.document)
	serve := func(path, contentType string, write func() ([]byte, error)) {
		made := s.publicDocument(path, contentType, write)
		s.metrics.begin(path, http.MethodGet, http.StatusOK)
		s.mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) { s.serveDocument(w, r, made()) })
	}
	serve(openAPIPath+".json", "application/openapi+json", spec)
	serve(openAPIPath+".yaml", "application/openapi+yaml", func() ([]byte, error) {
		from, err := spec()
		var inYAML bytes.Buffer
		if err == nil {
			err = yaml.Convert(&inYAML, bytes.NewReader(from))
		}
		return inYAML.Bytes(), err
	})
	serve(docsPath, "text/html; charset=utf-8", s.docsPage)
	s.eventRoutes()
}

// eventRoutes serves the document of all events, and the schema of each type.
func (s *server) eventRoutes() {
	var document perDeclared[func() publicDocument]
	s.metrics.begin(asyncAPIPath, http.MethodGet, http.StatusOK)
	s.mux.HandleFunc("GET "+asyncAPIPath, func(w http.ResponseWriter, r *http.Request) {
		made := document.get(r.Context(), s.declared, func(all []upstreams.Upstream) func() publicDocument {
			return s.publicDocument(asyncAPIPath, "application/vnd.aai.asyncapi+json;version=3.1.0",
				func() ([]byte, error) { return contracts.Encode(contracts.AsyncAPI(s.kinds, all, s.published)) })
		})
		s.serveDocument(w, r, made())
	})
	var schemas perDeclared[map[string]func() publicDocument]
	byName := func(all []upstreams.Upstream) map[string]func() publicDocument {
		byName := make(map[string]func() publicDocument)
		for _, t := range contracts.Types(s.kinds, all) {
			byName[t.Name] = s.publicDocument("the schema of "+t.Name, "application/schema+json",
				func() ([]byte, error) { return contracts.Encode(t.Schema()) })
		}
		return byName
	}
	s.metrics.begin(schemasPath, http.MethodGet, http.StatusOK)
	s.mux.HandleFunc("GET "+schemasPath, func(w http.ResponseWriter, r *http.Request) {
		made, ok := schemas.get(r.Context(), s.declared, byName)[r.PathValue("type")]
		if !ok {
			if next := s.router.refresh(r.Context(), s); next != nil { // the type may be of a new kind
				next.mux.ServeHTTP(w, r)
				return
			}
			s.refuse(w, r, s.problems.problem(codeNotFound, "there is no event of this type"))
			return
		}
		s.serveDocument(w, r, made())
	})
}

// publicDocument is an answer that needs no token. It is made and compressed once, so an answer
// costs no work and no memory of its own.
type publicDocument struct {
	contentType  string
	body, packed []byte // packed with gzip
	tag          string // the hash of body
}

// publicDocument returns a function that makes the document at its first call.
func (s *server) publicDocument(name, contentType string, write func() ([]byte, error)) func() publicDocument {
	return sync.OnceValue(func() publicDocument {
		body, err := write()
		if err != nil {
			panic(fmt.Errorf("write %s: %w", name, err)) // only a bug in this program causes it
		}
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		_, _ = z.Write(body) // a buffer takes everything
		_ = z.Close()
		return publicDocument{contentType, body, packed.Bytes(), fmt.Sprintf("%x", sha256.Sum256(body))[:16]}
	})
}

// serveDocument answers with the document, if fewer such answers are being sent than may be
// (bounds.Documents).
func (s *server) serveDocument(w http.ResponseWriter, r *http.Request, d publicDocument) {
	place := s.gate.documents.Hold(0, clientOf(r).String())
	if !place.Take(1) {
		s.gate.refused(shedDocuments)
		s.gate.hold(r.Context(), refusalTakes)
		s.refuse(w, r, s.problems.problem(codeOverloaded, ""))
		return
	}
	defer place.Release()
	h, body, tag := w.Header(), d.body, `"`+d.tag+`"`
	h.Add("Vary", "Accept-Encoding")
	if takesGzip(r) {
		body, tag = d.packed, `"`+d.tag+`-gzip"`
		h.Set("Content-Encoding", "gzip")
	}
	h.Set("ETag", tag)
	if slices.ContainsFunc(listed(r.Header.Values("If-None-Match")), func(have string) bool {
		return have == "*" || strings.TrimPrefix(have, "W/") == tag
	}) {
		h.Del("Content-Encoding")
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", d.contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body) // on an error the client has gone
}

// takesGzip reports whether the client takes an answer with gzip. It has to name gzip, as every
// common client does.
func takesGzip(r *http.Request) bool {
	for _, coding := range listed(r.Header.Values("Accept-Encoding")) {
		name, weight, _ := strings.Cut(coding, ";")
		weight = strings.TrimSpace(weight)
		if q, err := strconv.ParseFloat(strings.TrimPrefix(weight, "q="), 64); strings.EqualFold(strings.TrimSpace(name), "gzip") {
			return weight == "" || err == nil && q > 0
		}
	}
	return false
}

// listed returns the members of a header that is a list.
func listed(values []string) (all []string) {
	for _, v := range values {
		for member := range strings.SplitSeq(v, ",") {
			all = append(all, strings.TrimSpace(member))
		}
	}
	return all
}

// forgetAnswers drops what the documents say of answers, half of what the routes take: the garbage
// collector would mark it many times a second while writes come in. described has it again.
func (s *server) forgetAnswers() {
	doc := s.api.OpenAPI()
	schemas, asked := doc.Components.Schemas, make(map[*huma.Schema]bool)
	var keep func(*huma.Schema)
	keep = func(schema *huma.Schema) {
		if schema == nil || asked[schema] {
			return
		}
		asked[schema] = true
		if schema.Ref != "" {
			keep(schemas.SchemaFromRef(schema.Ref))
		}
		if values, ok := schema.AdditionalProperties.(*huma.Schema); ok {
			keep(values)
		}
		keep(schema.Items)
		for _, part := range slices.Concat(slices.Collect(maps.Values(schema.Properties)), schema.OneOf, schema.AnyOf, schema.AllOf) {
			keep(part)
		}
	}
	for _, item := range doc.Paths {
		for _, op := range operationsAt(item) {
			op.Responses = nil
			if op.RequestBody != nil {
				for _, content := range op.RequestBody.Content {
					keep(content.Schema)
				}
			}
		}
	}
	maps.DeleteFunc(schemas.Map(), func(_ string, schema *huma.Schema) bool { return !asked[schema] })
}

// described returns the routes of the same kinds with all that the documents say.
func (s *server) described() *server {
	full := *s
	full.routes()
	return &full
}

// document returns the OpenAPI document without the framework's own error model, which no answer
// has.
func (s *server) document() ([]byte, error) {
	s = s.described()
	if err := s.addExamples(); err != nil {
		return nil, fmt.Errorf("add examples: %w", err)
	}
	raw, err := json.Marshal(s.api.OpenAPI())
	if err != nil {
		return nil, err
	}
	var doc map[string]any
	if err := json.Unmarshal(raw, &doc); err != nil {
		return nil, err
	}
	if components, ok := doc["components"].(map[string]any); ok {
		if schemas, ok := components["schemas"].(map[string]any); ok {
			delete(schemas, "ErrorModel")
			delete(schemas, "ErrorDetail")
		}
	}
	return json.MarshalIndent(doc, "", " ")
}

//go:embed docs.html.tmpl
var docsTemplate string

type docsOperation struct {
	Method, Path string
	Op           *huma.Operation
	Description  string
	Responses    []docsResponse
}

type docsResponse struct {
	Status string
	Lines  []string
}

// docsPage writes plain HTML. A page that loads a renderer from elsewhere does not work without the
// internet.
func (s *server) docsPage() ([]byte, error) {
	doc := s.described().api.OpenAPI()
	var ops []docsOperation
	for _, path := range slices.Sorted(maps.Keys(doc.Paths)) {
		for _, o := range operationsAt(doc.Paths[path]) {
			d := docsOperation{Method: o.Method, Path: path, Op: o, Description: strings.ReplaceAll(o.Description, "`", "")}
			for _, status := range slices.Sorted(maps.Keys(o.Responses)) {
				d.Responses = append(d.Responses, docsResponse{status,
					strings.Split(strings.ReplaceAll(o.Responses[status].Description, "`", ""), "\n")})
			}
			ops = append(ops, d)
		}
	}
	t, err := template.New("docs").Parse(docsTemplate)
	if err != nil {
		return nil, err
	}
	var page bytes.Buffer
	err = t.Execute(&page, map[string]any{"Info": doc.Info, "Operations": ops, "Problems": s.problems.kinds, "Spec": openAPIPath})
	return page.Bytes(), err
}

// declaredEvery is the least time between two reads of the upstreams, as for kinds.
const (
	declaredEvery   = 3 * time.Second
	declaredTimeout = time.Second // of a read
)

// declared has the upstreams for the documents. It is safe for concurrent use.
type declared struct {
	list func(context.Context) ([]upstreams.Upstream, error)
	log  *slog.Logger

	mu   sync.Mutex
	read time.Time
	all  []upstreams.Upstream
	tag  uint64 // of all: it rises with each change
}

// now returns the upstreams as they were at most declaredEvery ago, and their tag. While the
// database is unavailable, it returns those that were read last.
func (d *declared) now(ctx context.Context) ([]upstreams.Upstream, uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.list == nil || time.Since(d.read) < declaredEvery {
		return d.all, d.tag
	}
	ctx, cancel := context.WithTimeout(ctx, declaredTimeout)
	defer cancel()
	all, err := d.list(ctx)
	d.read = time.Now() // a failed read too: callers wait for this lock
	if err != nil {
		d.log.WarnContext(ctx, "cannot read the upstreams: the documents show those of the last read", "err", err)
		return d.all, d.tag
	}
	if !reflect.DeepEqual(all, d.all) {
		d.all, d.tag = all, d.tag+1
	}
	return d.all, d.tag
}

// perDeclared keeps what is made of the upstreams until they change. The zero value is empty.
type perDeclared[T any] struct {
	mu    sync.Mutex
	made  bool
	tag   uint64
	value T
}

func (p *perDeclared[T]) get(ctx context.Context, d *declared, make func([]upstreams.Upstream) T) T {
	all, tag := d.now(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.made || p.tag != tag {
		p.made, p.tag, p.value = true, tag, make(all)
	}
	return p.value
}
