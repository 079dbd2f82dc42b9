package deploy_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// promises compares the OpenAPI documents of two releases: the requests that a client of the
// previous release may send, and the answers on which it may rely.
type promises struct {
	before, after map[string]any
	broken        []string
	seen          map[string]bool // the pairs of schemas that were already compared
}

// direction is the message that has a value: a request or a response.
type direction string

const (
	request  direction = "request"
	response direction = "response"
)

// brokenPromises lists the changes that break a client of the previous release. New enum values,
// alternatives and members break none: a client ignores those that it does not know.
func brokenPromises(before, after map[string]any) []string {
	p := &promises{before: before, after: after, seen: map[string]bool{}}
	for path, item := range sorted(object(before["paths"])) {
		for method, op := range sorted(object(item)) {
			now, ok := object(object(after["paths"])[path])[method].(map[string]any)
			at := strings.ToUpper(method) + " " + path
			if !ok {
				p.add(at, "is gone")
				continue
			}
			p.operation(at, object(op), now)
		}
	}
	return p.broken
}

func (p *promises) add(at, format string, args ...any) {
	p.broken = append(p.broken, at+" "+fmt.Sprintf(format, args...))
}

func (p *promises) operation(at string, was, is map[string]any) {
	p.same(at, was, is, "operationId", "security")
	had, has := parameters(was), parameters(is)
	for name, parameter := range sorted(has) {
		if _, ok := had[name]; !ok && parameter["required"] == true {
			p.add(at, "requires the new parameter %s", name)
		}
	}
	for name, parameter := range sorted(had) {
		now, ok := has[name]
		if !ok {
			p.add(at, "has lost the parameter %s", name)
			continue
		}
		if now["required"] == true && parameter["required"] != true {
			p.add(at, "requires the parameter %s", name)
		}
		p.schema(at+", parameter "+name, parameter["schema"], now["schema"], request)
	}
	body, now := object(was["requestBody"]), object(is["requestBody"])
	if now["required"] == true && body["required"] != true {
		p.add(at, "requires a body")
	}
	p.content(at+", body", body, now, request)
	for code, answer := range sorted(object(was["responses"])) {
		now, ok := object(is["responses"])[code].(map[string]any)
		if !ok {
			p.add(at, "has lost the answer %s", code)
			continue
		}
		for name, header := range sorted(object(object(answer)["headers"])) {
			if other, ok := object(now["headers"])[name].(map[string]any); ok {
				p.schema(at+", answer "+code+", header "+name, object(header)["schema"], other["schema"], response)
			} else {
				p.add(at, "has lost the header %s of the answer %s", name, code)
			}
		}
		p.content(at+", answer "+code, object(answer), now, response)
	}
}

func (p *promises) content(at string, was, is map[string]any, d direction) {
	for kind, of := range sorted(object(was["content"])) {
		now, ok := object(is["content"])[kind].(map[string]any)
		if !ok {
			p.add(at, "has lost %s", kind)
			continue
		}
		p.schema(at, object(of)["schema"], now["schema"], d)
	}
}

// bounded is a pattern that also limits the length of the text.
var bounded = regexp.MustCompile(`^(\^\[[^]]+\])\{1,([0-9]+)\}\$$`)

// apart returns the schema with the length of a text beside its pattern: that says the same as a
// bounded pattern.
func apart(schema map[string]any) map[string]any {
	pattern, _ := schema["pattern"].(string)
	if in := bounded.FindStringSubmatch(pattern); in != nil {
		most, _ := strconv.ParseFloat(in[2], 64)
		schema = maps.Clone(schema)
		schema["pattern"], schema["maxLength"] = in[1]+"+$", most
	}
	return schema
}

// schema compares the schemas of a value that a client sends or reads.
func (p *promises) schema(at string, before, after any, d direction) {
	pair := fmt.Sprint(d, object(before)["$ref"], object(after)["$ref"])
	if p.seen[pair] {
		return
	}
	was, is := apart(resolve(p.before, before)), apart(resolve(p.after, after))
	if object(before)["$ref"] != nil {
		p.seen[pair] = true
		at, _ = object(before)["$ref"].(string)
		at += " of a " + string(d)
	}
	keywords := maps.Clone(was)
	maps.Copy(keywords, is)
	for keyword := range sorted(keywords) {
		switch keyword {
		case "description", "title", "example", "examples", "deprecated":
		case "properties":
			for name, member := range sorted(object(was[keyword])) {
				if now, ok := object(is[keyword])[name]; ok {
					p.schema(at+"/"+name, member, now, d)
				} else {
					p.add(at, "has lost the member %s", name)
				}
			}
		case "required":
			p.required(at, list(was[keyword]), list(is[keyword]), d)
		case "enum":
			for _, value := range list(was[keyword]) {
				if !slices.Contains(list(is[keyword]), value) {
					p.add(at, "has lost the value %v", value)
				}
			}
		case "items":
			p.schema(at+"/items", was[keyword], is[keyword], d)
		case "oneOf", "anyOf":
			had, has := list(was[keyword]), list(is[keyword])
			if len(has) < len(had) {
				p.add(at, "has lost alternatives")
			}
			for i := range min(len(had), len(has)) {
				p.schema(fmt.Sprintf("%s/%d", at, i), had[i], has[i], d)
			}
		case "minimum", "minLength", "minItems", "minProperties":
			p.bound(at, keyword, was[keyword], is[keyword], 1, d)
		case "maximum", "maxLength", "maxItems", "maxProperties":
			p.bound(at, keyword, was[keyword], is[keyword], -1, d)
		default:
			p.same(at, was, is, keyword)
		}
	}
}

func (p *promises) required(at string, had, has []any, d direction) {
	for _, name := range had {
		if d == response && !slices.Contains(has, name) {
			p.add(at, "may lack the member %v", name)
		}
	}
	for _, name := range has {
		if d == request && !slices.Contains(had, name) {
			p.add(at, "requires the member %v", name)
		}
	}
}

// bound checks that a limit of a request is not narrower than before; sign is 1 for a lower limit
// and -1 for an upper one.
func (p *promises) bound(at, keyword string, was, is any, sign float64, d direction) {
	limit, limited := is.(float64)
	before, had := was.(float64)
	if d == request && limited && (!had || sign*limit > sign*before) {
		p.add(at, "%s was %v and is %v", keyword, was, is)
	}
}

func (p *promises) same(at string, was, is map[string]any, keywords ...string) {
	for _, k := range keywords {
		if a, b := text(was[k]), text(is[k]); a != b {
			p.add(at, "%s was %s and is %s", k, a, b)
		}
	}
}

func text(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(raw)
}

func object(v any) map[string]any { o, _ := v.(map[string]any); return o }

func list(v any) []any { l, _ := v.([]any); return l }

func sorted[V any](m map[string]V) func(yield func(string, V) bool) {
	return func(yield func(string, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}

func parameters(operation map[string]any) map[string]map[string]any {
	all := map[string]map[string]any{}
	for _, v := range list(operation["parameters"]) {
		all[fmt.Sprint(object(v)["in"], " ", object(v)["name"])] = object(v)
	}
	return all
}

// resolve follows a reference within a document, and returns a schema without one unchanged.
func resolve(doc map[string]any, schema any) map[string]any {
	s := object(schema)
	ref, ok := s["$ref"].(string)
	if !ok {
		return s
	}
	at := doc
	for part := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
		at = object(at[part])
	}
	return at
}

const smallAPI = `{"paths": {"/v1/things/{id}": {"post": {"operationId": "write", "security": [{"token": ["write"]}],
  "parameters": [{"in": "path", "name": "id", "required": true, "schema": {"type": "string"}},
    {"in": "query", "name": "limit", "schema": {"type": "integer", "maximum": 200}}],
  "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}},
  "responses": {"200": {"headers": {"ETag": {"schema": {"type": "string"}}}, "content": {"application/json": {"schema":
    {"type": "array", "items": {"$ref": "#/components/schemas/Thing"}}}}}}}}},
 "components": {"schemas": {"Thing": {"type": "object", "additionalProperties": false, "required": ["body"], "properties": {
  "body": {"type": "string", "maxLength": 100}, "slug": {"type": "string", "pattern": "^[a-z]{1,8}$"},
  "state": {"type": "string", "enum": ["on", "off"]},
  "of": {"$ref": "#/components/schemas/Thing"}}}}}}`

// TestAnAPIThatBreaksAPromiseIsFound replaces one piece of a document's text at a time.
// brokenPromises must find each change that breaks a client, and no other.
func TestAnAPIThatBreaksAPromiseIsFound(t *testing.T) {
	parse := func(text string) (doc map[string]any) {
		if err := json.Unmarshal([]byte(text), &doc); err != nil {
			t.Fatalf("%v in %s", err, text)
		}
		return doc
	}
	for what, c := range map[string]struct{ from, to, want string }{
		"nothing":                      {"", "", ""},
		"a path that is gone":          {"/v1/things/{id}", "/v2/things/{id}", "POST /v1/things/{id} is gone"},
		"an operation that is gone":    {`"post"`, `"put"`, "is gone"},
		"another name of an operation": {`"write", "sec`, `"put", "sec`, `operationId was "write"`},
		"another role":                 {`["write"]`, `["admin"]`, "security was"},
		"a parameter that is gone":     {`"name": "limit"`, `"name": "size"`, "has lost the parameter query limit"},
		"a parameter that is required": {`"name": "limit",`, `"name": "limit", "required": true,`,
			"requires the parameter query limit"},
		"a new required parameter": {`"parameters": [`, `"parameters": [{"in": "query", "name": "new", "required": true},`,
			"requires the new parameter query new"},
		"a new parameter":         {`"parameters": [`, `"parameters": [{"in": "query", "name": "new"},`, ""},
		"a lower limit":           {`"maximum": 200`, `"maximum": 100`, "maximum was 200 and is 100"},
		"a higher limit":          {`"maximum": 200`, `"maximum": 300`, ""},
		"a new limit":             {`"maxLength": 100`, `"maxLength": 100, "minLength": 2`, "minLength was <nil> and is 2"},
		"a body that is required": {`"requestBody": {`, `"requestBody": {"required": true, `, "requires a body"},
		"another media type": {`"application/json": {"schema": {"$ref"`, `"text/plain": {"schema": {"$ref"`,
			"has lost application/json"},
		"an answer that is gone": {`"200"`, `"201"`, "has lost the answer 200"},
		"a header that is gone":  {`"ETag"`, `"Etag"`, "has lost the header ETag"},
		"a member that is gone":  {`"state": {`, `"mode": {`, "has lost the member state"},
		"a member of requests is required": {`"required": ["body"]`, `"required": ["body", "state"]`,
			"of a request requires the member state"},
		"a member of answers may lack": {`"required": ["body"]`, `"required": []`, "of a response may lack the member body"},
		"a value that is gone":         {`["on", "off"]`, `["on"]`, "has lost the value off"},
		"a value more":                 {`["on", "off"]`, `["on", "off", "idle"]`, ""},
		"another type":                 {`"string", "maxLength"`, `"integer", "maxLength"`, `type was "string" and is "integer"`},
		"a pattern":                    {`"maxLength": 100`, `"maxLength": 100, "pattern": "^a"`, `pattern was null and is "^a"`},
		"a pattern and a length":       {`"^[a-z]{1,8}$"`, `"^[a-z]+$", "maxLength": 8`, ""},
		"a pattern of a lower length":  {`"^[a-z]{1,8}$"`, `"^[a-z]{1,7}$"`, "maxLength was 8 and is 7"},
		"one thing for a list of them": {`"type": "array"`, `"type": "object"`, `type was "array"`},
		"another path besides":         {`{"paths": {`, `{"paths": {"/v1/new": {"get": {}}, `, ""},
		"a member more":                {`"state": {`, `"new": {"type": "string"}, "state": {`, ""},
		"prose":                        {`"maxLength": 100`, `"maxLength": 100, "description": "x"`, ""},
	} {
		if c.from != "" && !strings.Contains(smallAPI, c.from) {
			t.Fatalf("%s: %q is not in the document", what, c.from)
		}
		got := strings.Join(brokenPromises(parse(smallAPI), parse(strings.Replace(smallAPI, c.from, c.to, 1))), "\n")
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
	}
}

// goneFrom lists the parts of an AsyncAPI document that were removed or changed. Every channel,
// operation and message must remain; lists and objects may have new parts.
func goneFrom(at string, was, is any) (gone []string) {
	switch was := was.(type) {
	case map[string]any:
		now, ok := is.(map[string]any)
		if !ok {
			break
		}
		for name, v := range sorted(was) {
			if name == "description" || name == "summary" || name == "title" || name == "examples" || name == "info" {
				continue
			}
			if other, ok := now[name]; ok {
				gone = append(gone, goneFrom(at+"/"+name, v, other)...)
			} else {
				gone = append(gone, fmt.Sprintf("%s/%s is gone", at, name))
			}
		}
		return gone
	case []any:
		now := list(is)
		for _, v := range was {
			if !slices.ContainsFunc(now, func(o any) bool { return len(goneFrom(at, v, o)) == 0 }) {
				gone = append(gone, fmt.Sprintf("%s has lost %.200s", at, text(v)))
			}
		}
		return gone
	}
	if text(was) != text(is) {
		gone = append(gone, fmt.Sprintf("%s was %.200s and is %.200s", at, text(was), text(is)))
	}
	return gone
}

func TestADocumentThatHasLostSomethingIsFound(t *testing.T) {
	const (
		doc = `{"info": {"version": "1"},
			"channels": {"follow": {"address": "events.follow", "messages": [{"$ref": "#/a"}, {"$ref": "#/b"}]}}}`
		more = `{"info": {"version": "2"}, "channels": {"like": {},
			"follow": {"address": "events.follow", "messages": [{"$ref": "#/a"}, {"$ref": "#/b"}, {"$ref": "#/c"}]}}}`
		otherAddress = `{"channels": {"follow": {"address": "events.f", "messages": [{"$ref": "#/a"}, {"$ref": "#/b"}]}}}`
		oneMessage   = `{"channels": {"follow": {"address": "events.follow", "messages": [{"$ref": "#/b"}]}}}`
	)
	for to, want := range map[string]string{
		doc:                          "",
		more:                         "",
		`{"channels": {"like": {}}}`: "#/channels/follow is gone",
		otherAddress:                 "#/channels/follow/address was",
		oneMessage:                   `messages has lost {"$ref":"#/a"}`,
	} {
		var was, is map[string]any
		if err := json.Unmarshal([]byte(doc), &was); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(to), &is); err != nil {
			t.Fatal(err)
		}
		got := strings.Join(goneFrom("#", was, is), "\n")
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", to, got, want)
		}
	}
}
