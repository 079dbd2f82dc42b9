package api

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
)

// verbs are the ends of paths like /v1/users/{user_id}:remove-edges, with the pattern of the paths.
// In any other path they may end an id. A verb after a plural, as in /v1/follows:batch, is plain
// text for the mux.
var verbs = map[string]*regexp.Regexp{
	":remove-edges": regexp.MustCompile(`^/v1/[^/]+/[^/]*$`),
	":retry":        regexp.MustCompile(`^/v1/outbox/dlq/[^/]*$`),
	":discard":      regexp.MustCompile(`^/v1/outbox/dlq/[^/]*$`),
}

// escapedPath is the path of a URL, percent-encoded but for colons.
func escapedPath(u *url.URL) string {
	return strings.NewReplacer("%3A", ":", "%3a", ":").Replace(u.EscapedPath())
}

// verbOf returns the verb at the end of a path, or "".
func verbOf(u *url.URL) string {
	if !strings.Contains(u.Path, ":") { // most requests
		return ""
	}
	path := escapedPath(u)
	at := strings.LastIndexByte(path, ':')
	if verbs[path[at:]] == nil || !verbs[path[at:]].MatchString(path) {
		return ""
	}
	return path[at:]
}

// verbSegment begins the segment that a verb is for the mux, which takes no text after a wildcard.
// No id has an asterisk, and checkURL refuses such a path.
const verbSegment = "/*:"

// verbMux registers such routes.
type verbMux struct{ *http.ServeMux }

func (m verbMux) HandleFunc(pattern string, handle func(http.ResponseWriter, *http.Request)) {
	m.ServeMux.HandleFunc(strings.Replace(pattern, "}:", "}"+verbSegment, 1), handle)
}

// verbPattern returns a pattern of the mux as the document shows it.
func verbPattern(pattern string) string { return strings.Replace(pattern, "}"+verbSegment, "}:", 1) }

// verbURL returns the URL as the mux expects it.
func verbURL(u *url.URL) *url.URL {
	verb := verbOf(u)
	if verb == "" {
		return u
	}
	out := *u
	segment := verbSegment + verb[1:]
	out.Path, out.RawPath = strings.TrimSuffix(u.Path, verb)+segment, strings.TrimSuffix(escapedPath(u), verb)+segment
	return &out
}
