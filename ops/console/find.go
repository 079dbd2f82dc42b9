package console

import (
	"net/http"
	"regexp"
	"strings"
)

var (
	fingerprintForm = regexp.MustCompile(`^[0-9a-f]{12}$`)
	objectForm      = regexp.MustCompile(`^([a-z][a-z0-9_]*) (\S+)$`)
)

// find leads from the search in the header to the page that knows what the reader typed. The page
// of events takes everything else, and names what it takes.
func (c *Console) find(v *view) error {
	http.Redirect(v.w, v.r, c.place(v, v.query("q")), http.StatusSeeOther)
	return nil
}

// place returns the URL at which text is found: a page by its name, a token by its fingerprint, an
// object by its kind and id, or an event.
func (c *Console) place(v *view, text string) string {
	for _, p := range c.pages {
		if p.group != "" && v.may(p) && strings.EqualFold(p.title, text) {
			return root + p.path
		}
	}
	tenant := v.query("tenant")
	switch m := objectForm.FindStringSubmatch(text); {
	case text == "":
		return root
	case fingerprintForm.MatchString(text):
		return address("tokens", "all", "yes") + "#t-" + text
	case m != nil:
		return address("inspect", "kind", m[1], "id", m[2], "tenant", tenant)
	}
	return address("event", "q", text, "tenant", tenant)
}
