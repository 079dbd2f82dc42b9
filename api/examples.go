package api

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/tidings/tidings/kinds"
)

const (
	exampleUUID = "0196b2d4-7c00-7000-8000-000000000001"
	exampleTime = "2026-11-21T09:37:11.133571Z"
)

// exampleValues has examples by the names of members and parameters, which are the same throughout
// the API. A tag overrides an example.
func exampleValues() map[string]any {
	return map[string]any{
		"id": "42", "follower_id": "7", "followee_id": "42", "other_id": "43", "user_id": "42", "author_id": "3", "post_id": "5",
		"aggregate_id": "5", "new_id": "1042",
		"parent_id": "0196b2d4-7b00-7000-8000-000000000007", "slug": "abcd2345", "body": "Well said.",
		"title": "Questions to the author", "reason": "spam",
		"actor": "user:7", "aggregate_type": "comment", "event_type": "created", "last_error": "nats: no response from stream",
		"payload": map[string]any{"version": 3},
		"lines":   1000, "cursor": "QeB8tJ0vJ8G7nTq0T3mJ1nsidCI6IjIwMjYifQ", "next": "QeB8tJ0vJ8G7nTq0T3mJ1nsidCI6IjIwMjYifQ",
		"prev":      "m1Zc0vJ8tJG7nTq0T3mJ1nsidCI6IjIwMjYifQ",
		"followers": 1200, "following": 80, "version": 3, "depth": 2, "Tidings-Actor": "user:7",
		"Tidings-Token": "5I3OuEOrOdZkiSaqc6ZsOlt7ImEiOiI5IiwiYiI6IjEwMDEiLCJ2IjoxfV0",
		"traceparent":   "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "Idempotency-Key": "form-5-1",
		"idempotency_key": "import-1", "If-Match": `"3"`, "If-None-Match": `"3"`,
	}
}

// exampleID returns the example of an id: the integer, or a UUID with its digits.
func exampleID(form kinds.IDForm, integer string) string {
	if form == kinds.UUID {
		return exampleUUID[:len(exampleUUID)-len(integer)] + integer
	}
	return integer
}

// examples composes whole examples from those of the parts.
type examples struct {
	values  map[string]any
	schemas huma.Registry
}

// addExamples gives an example to every parameter, body and answer of the document that has none.
func (s *server) addExamples() error {
	doc := s.api.OpenAPI()
	e := examples{exampleValues(), doc.Components.Schemas}
	doc.Components.Examples = make(map[string]*huma.Example)
	for _, k := range s.problems.kinds {
		doc.Components.Examples[k.Code] = &huma.Example{Value: s.problems.problem(k.Code, "")}
	}
	for path, item := range doc.Paths {
		for _, op := range operationsAt(item) {
			if err := e.add(op); err != nil {
				return fmt.Errorf("%s %s: %w", op.Method, path, err)
			}
		}
	}
	return nil
}

// operationsAt returns the operations of a path.
func operationsAt(item *huma.PathItem) []*huma.Operation {
	return slices.DeleteFunc([]*huma.Operation{item.Get, item.Put, item.Post, item.Patch, item.Delete},
		func(op *huma.Operation) bool { return op == nil })
}

func (e examples) add(op *huma.Operation) (err error) {
	for _, p := range op.Parameters {
		if p.Example, err = e.of(p.Name, p.Schema); err != nil {
			return err
		}
	}
	contents := make(map[string]map[string]*huma.MediaType)
	if op.RequestBody != nil {
		contents["body"] = op.RequestBody.Content
	}
	for status, answer := range op.Responses {
		contents[status] = answer.Content
	}
	for _, name := range slices.Sorted(maps.Keys(contents)) {
		for media, content := range contents[name] {
			switch {
			case media == problemMediaType:
				content.Examples = problemExamples(op.Responses[name].Description)
			case content.Example == nil:
				if content.Example, err = e.of(op.OperationID+" "+name, content.Schema); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// problemExamples refers to the examples of the codes that the description of an answer lists.
func problemExamples(description string) map[string]*huma.Example {
	all := make(map[string]*huma.Example)
	for line := range strings.Lines(description) {
		code := strings.Split(line, "`")[1]
		all[code] = &huma.Example{Ref: "#/components/examples/" + code}
	}
	return all
}

// of composes an example for this name. within are the schemas around it: a schema within itself
// gets no example, which ends the recursion.
func (e examples) of(name string, schema *huma.Schema, within ...string) (any, error) {
	value, named := e.values[name]
	switch {
	case schema.Ref != "":
		if slices.Contains(within, schema.Ref) {
			return nil, nil
		}
		return e.of(name, e.schemas.SchemaFromRef(schema.Ref), append(within, schema.Ref)...)
	case len(schema.Examples) > 0:
		return schema.Examples[0], nil
	case schema.Format == "uuid" && (!named || name == "id"):
		return exampleUUID, nil
	case schema.Format == "date-time":
		return exampleTime, nil
	case len(schema.Enum) > 0:
		return schema.Enum[0], nil
	case named && schema.Type != huma.TypeObject:
		return value, nil
	case schema.Default != nil:
		return schema.Default, nil
	case len(schema.OneOf) > 0:
		return e.of(name, schema.OneOf[0], within...)
	case slices.Contains([]string{idSchema(kinds.String).Pattern, numberSchema().Pattern}, patternOf(schema)):
		return "42", nil
	case schema.Type == huma.TypeInteger:
		return int(*cmp.Or(schema.Minimum, new(1.0))), nil
	case schema.Type == huma.TypeBoolean:
		return false, nil
	case schema.Type == huma.TypeArray:
		item, err := e.of(name, schema.Items, within...)
		if item == nil {
			return nil, err
		}
		return []any{item}, err
	case schema.Type == huma.TypeObject:
		object := make(map[string]any)
		for member, s := range schema.Properties {
			v, err := e.of(member, s, within...)
			if err != nil {
				return nil, err
			}
			if v != nil {
				object[member] = v
			}
		}
		return object, nil
	}
	return nil, fmt.Errorf("%s needs an example", name)
}

// describeAnswers adds facts about answers that the framework does not know. A second answer of
// success has the body and the headers of the first. A 304 has the ETag that its 200 would have
// (RFC 9110, 15.4.5).
func describeAnswers(answers map[string]*huma.Response, r route) {
	first := answers[strconv.Itoa(r.status)]
	for status := range r.extraStatuses {
		second := answers[strconv.Itoa(status)]
		if status == http.StatusNotModified {
			second.Headers = map[string]*huma.Param{"ETag": first.Headers["ETag"]}
			continue
		}
		second.Content, second.Headers = first.Content, first.Headers
	}
}
