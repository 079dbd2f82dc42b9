package api

import (
	"net/http"
	"net/url"
	"path"
	"strings"
)

// verbs are the ends of paths like /v1/users/{user_id}:remove-edges, with the number of slashes in
// such a path. A verb after a plural, as in /v1/follows:batch, is plain text for the mux.
var verbs = map[string]int{":remove-edges": 3, ":retry": 4, ":discard": 4}

// verbOf returns the verb at the end of a path, or "".
func verbOf(path string) string {
	at := strings.LastIndexByte(path, ':')
	if at < 0 || verbs[path[at:]] == 0 {
		return ""
	}
	return path[at:]
}

// verbMux registers such routes. The mux takes no text after a wildcard, so it gets the verb as a
// segment of its own (verbURL).
type verbMux struct{ *http.ServeMux }

func (m verbMux) HandleFunc(pattern string, handle func(http.ResponseWriter, *http.Request)) {
	m.ServeMux.HandleFunc(strings.Replace(pattern, "}:", "}/:", 1), handle)
}

// verbPattern returns a pattern of the mux as the document shows it.
func verbPattern(pattern string) string { return strings.Replace(pattern, "}/:", "}:", 1) }

// verbURL returns the URL as the mux expects it.
func verbURL(u *url.URL) *url.URL {
	verb := verbOf(u.Path)
	if verb == "" || strings.Count(u.Path, "/") < verbs[verb] {
		return u
	}
	out := *u
	out.RawPath = strings.NewReplacer("%3A", ":", "%3a", ":").Replace(u.EscapedPath())
	object, ok := strings.CutSuffix(out.RawPath, verb)
	if !ok || strings.HasSuffix(object, "/") {
		return u
	}
	end := "/" + verb
	// Not an id. The mux would resolve it as a relative path; the colon prevents that.
	if last := path.Base(strings.TrimSuffix(u.Path, verb)); last == "." || last == ".." {
		end = ":/" + verb
	}
	out.Path, out.RawPath = strings.TrimSuffix(u.Path, verb)+end, object+end
	return &out
}
