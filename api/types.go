package api

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// id is an object's id in a path.
type id struct{ event.ID }

// Schema describes the id.
func (id) Schema(huma.Registry) *huma.Schema { return idSchema(kinds.String) }

// userID is an id in a body.
type userID string

// Schema describes the id.
func (userID) Schema(huma.Registry) *huma.Schema { return idSchema(kinds.String) }

func idSchema(form kinds.IDForm) *huma.Schema {
	s := &huma.Schema{Type: huma.TypeString, Description: "An id that you choose: " + form.Rule() + "."}
	setForm(s, form)
	return s
}

// setForm makes the schema accept ids of the form. The length of text stands beside its pattern,
// because Go compiles a bounded repeat 30 times as slowly, and each operation compiles its own.
func setForm(s *huma.Schema, form kinds.IDForm) {
	answered := s.Extensions["pattern"] != nil
	s.Pattern, s.MaxLength = form.Pattern(), nil
	if characters, bounded := strings.CutSuffix(s.Pattern, "{1,128}$"); bounded {
		s.Pattern, s.MaxLength = characters+"+$", new(128)
	}
	if answered {
		unchecked(s)
	}
}

// narrowID gives the schema of an id the form that a file of kinds requires. example is an integer.
func narrowID(s *huma.Schema, form kinds.IDForm, example string) {
	if s.Description == idSchema(kinds.String).Description {
		s.Description = idSchema(form).Description
	}
	setForm(s, form)
	s.PatternDescription = form.Rule()
	if form == kinds.UUID {
		s.Format, s.Examples = "uuid", []any{exampleID(form, example)}
	}
	s.PrecomputeMessages()
}

// number is a number of Tidings' own in a path.
type number struct{ event.Number }

// Schema describes the number.
func (number) Schema(huma.Registry) *huma.Schema { return numberSchema() }

func numberSchema() *huma.Schema {
	return &huma.Schema{
		Type: huma.TypeString, Pattern: "^[1-9][0-9]{0,18}$",
		Description: "A decimal number from 1 to 9223372036854775807, as a string.",
	}
}

// Types of members that only answers have.
type (
	answeredID     struct{}
	answeredNumber struct{}
	answeredTime   struct{}
)

// Schema describes the id.
func (answeredID) Schema(huma.Registry) *huma.Schema { return unchecked(idSchema(kinds.String)) }

// Schema describes the number.
func (answeredNumber) Schema(huma.Registry) *huma.Schema { return unchecked(numberSchema()) }

// Schema describes the time.
func (answeredTime) Schema(huma.Registry) *huma.Schema {
	return unchecked(&huma.Schema{Type: huma.TypeString, Format: "date-time", Pattern: `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$`})
}

// unchecked keeps the schema's pattern for the document alone. The framework compiles Pattern
// several times for each member, but checks only requests with it. The patterns of answers would
// take more than a third of the time of New.
func unchecked(s *huma.Schema) *huma.Schema {
	s.Pattern, s.Extensions = "", map[string]any{"pattern": s.Pattern}
	return s
}

// patternOf returns the schema's pattern, which may be for the document alone.
func patternOf(s *huma.Schema) string {
	if pattern, ok := s.Extensions["pattern"].(string); ok {
		return pattern
	}
	return s.Pattern
}

// uuidPattern also accepts upper case. The API writes lower case.
const uuidPattern = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"

// childID is a child's id in a path or a body.
type childID string

// Schema describes the child's id.
func (childID) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeString, Pattern: uuidPattern, PatternDescription: "a UUID", Format: "uuid"}
}

func (c childID) lower() string { return strings.ToLower(string(c)) }

func etag(version int64) string { return `"` + strconv.FormatInt(version, 10) + `"` }

// versionOf reads an If-Match with one entity tag or *. A tag that the API never issued matches no
// version. ok is false if the header is not a tag.
func versionOf(ifMatch string) (version int64, ok bool) {
	if ifMatch == "*" {
		return 0, true
	}
	tag := strings.TrimPrefix(ifMatch, "W/")
	if len(tag) < 2 || tag[0] != '"' || tag[len(tag)-1] != '"' || strings.ContainsAny(tag[1:len(tag)-1], "\", ") {
		return 0, false
	}
	v, err := strconv.ParseInt(tag[1:len(tag)-1], 10, 64)
	if err != nil || v <= 0 || etag(v) != ifMatch { // a weak tag never matches (RFC 9110, 13.1.1)
		return -1, true
	}
	return v, true
}

// tagged reports whether If-None-Match names the tag.
func tagged(ifNoneMatch, is string) bool {
	for tag := range strings.SplitSeq(ifNoneMatch, ",") {
		if tag = strings.TrimSpace(tag); tag == "*" || strings.TrimPrefix(tag, "W/") == is {
			return true
		}
	}
	return false
}

// okOr304 returns the status of a GET, which is 304 if If-None-Match names this version.
func okOr304(ifNoneMatch string, version int64) int {
	if tagged(ifNoneMatch, etag(version)) {
		return http.StatusNotModified
	}
	return http.StatusOK
}

// parseID reads an id of a body. pointer is the id's place in it.
func (s *server) parseID(form kinds.IDForm, pointer, v string) (event.ID, error) {
	n, err := form.ParseID(v)
	if err != nil {
		return "", s.problems.problem(codeValidation, "", FieldError{Detail: err.Error(), Pointer: pointer})
	}
	return n, nil
}

// Page has the parameters of every list. It is exported because the framework skips embedded
// parameters that are not.
type Page struct {
	Limit  int    `query:"limit" default:"50" minimum:"1" maximum:"200" doc:"At most this many items."`
	Cursor string `query:"cursor" doc:"The value of next, or of prev if there is one, in another page of this list."`
}

// newPage cuts items to the limit and signs the place where the page ends. If a next page exists,
// items has one more than the limit.
func newPage[T any](s *server, l list, limit int, items []T, last func(T) any) ([]T, string, error) {
	if len(items) <= limit {
		return items, "", nil
	}
	items = items[:limit]
	next, err := s.cursors.encode(l, last(items[limit-1]))
	if err != nil {
		return nil, "", fmt.Errorf("end a page: %w", err)
	}
	return items, next, nil
}
