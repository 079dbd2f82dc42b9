package console

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/store"
)

// page is a page with its entry in the navigation.
type page struct {
	path   string // below /console/; empty for the first page
	title  string
	key    string // the keys g and this letter open the page; empty: no key
	group  string // of the navigation; empty: the navigation does not list the page
	role   string // the role that the page needs; empty: read
	system bool   // only system tokens may open it
	live   bool   // its template has "live", which the hub sends again within a second of a change
	// follows reports whether the view of a live page is live; nil: each is.
	follows func(*view) bool
	tenant  bool // a system token chooses whose rows it shows, in the header
	// data reads the page. With an *inputError it may return what the page shows beside it.
	data func(context.Context, *view) (any, error)
}

// name returns the page's name in templates and stream URLs.
func (p *page) name() string {
	if p.path == "" {
		return "overview"
	}
	return p.path
}

// isLive reports whether the view of the page is live.
func (p *page) isLive(v *view) bool { return p.live && (p.follows == nil || p.follows(v)) }

// view is one request of a reader who is signed in. The hub also uses one view for a live page that
// several readers share.
type view struct {
	c    *Console
	w    http.ResponseWriter // nil for a live page of the hub
	r    *http.Request
	who  tokens.Principal // without the token's name for a live page of the hub
	hash tokens.Hash
}

// query returns a parameter of the URL, without surrounding spaces.
func (v *view) query(name string) string { return strings.TrimSpace(v.r.URL.Query().Get(name)) }

// queryInt returns a parameter as a number, 0 if it is absent. Errors: *inputError.
func (v *view) queryInt(name string) (int64, error) {
	s := v.query(name)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0, &inputError{fmt.Sprintf("%s is not a number: %.40q.", name, s)}
	}
	return n, nil
}

// with returns the URL of this page with other values of the given parameters (name, value, ...).
// An empty value removes its parameter.
func (v *view) with(pairs ...any) string {
	q := v.r.URL.Query()
	for i := 0; i+1 < len(pairs); i += 2 {
		if value := fmt.Sprint(pairs[i+1]); value != "" {
			q.Set(fmt.Sprint(pairs[i]), value)
		} else {
			q.Del(fmt.Sprint(pairs[i]))
		}
	}
	u := url.URL{Path: v.r.URL.Path, RawQuery: q.Encode()}
	return u.String()
}

// tenant returns the tenant whose rows the view may show. For a system token it is the parameter
// tenant, 0 for all tenants. Errors: *inputError.
func (v *view) tenant() (int64, error) {
	if !v.who.System() {
		return v.who.TenantID, nil
	}
	t, err := v.queryInt("tenant")
	if err == nil && t < 0 {
		err = &inputError{"tenant is a positive number."}
	}
	return t, err
}

// tenantCookie keeps the tenant that an operator chose, until the browser ends.
const tenantCookie = "tidings_tenant"

// chosen returns the tenant of the URL, or the one that the operator chose last; "" means all, or
// the token's own. It decides nothing: pages read the URL alone, and links to them have it.
func (v *view) chosen() string {
	if !v.who.System() {
		return ""
	}
	if v.r.URL.Query().Has("tenant") {
		return v.query("tenant")
	}
	kept, err := v.r.Cookie(tenantCookie)
	if err != nil {
		return ""
	}
	if n, err := strconv.ParseInt(kept.Value, 10, 64); err != nil || n <= 0 {
		return ""
	}
	return kept.Value
}

// keepTenant keeps the tenant of the URL, if an operator chose one.
func (v *view) keepTenant() {
	if !v.who.System() || !v.r.URL.Query().Has("tenant") {
		return
	}
	kept := cookie(v.r, "")
	if n, err := v.tenant(); err == nil && n > 0 {
		kept.Value, kept.MaxAge = strconv.FormatInt(n, 10), 0
	}
	kept.Name = tenantCookie
	http.SetCookie(v.w, kept)
}

// mayReadPayloads reports whether the token may read the payloads of events, which may contain
// hidden or removed text.
func (v *view) mayReadPayloads() bool {
	return v.who.Has(tokens.RoleModerate) || v.who.Has(tokens.RoleAdmin)
}

// may reports whether the token may open the page.
func (v *view) may(p *page) bool {
	return (!p.system || v.who.System()) && v.who.Has(tokens.RoleRead) && (p.role == "" || v.who.Has(p.role))
}

// problem is an error that the reader sees as a page.
type problem struct {
	Status int
	Title  string // what happened
	Try    string // what the reader can do
}

func (p *problem) Error() string { return p.Title }

// inputError reports invalid input to the reader, in a sentence.
type inputError struct{ says string }

func (e *inputError) Error() string { return e.says }

// postgresSilent is what readers see while the database does not answer.
const postgresSilent = "PostgreSQL does not answer"

// errNotFound reports a page or an object that does not exist, or that the token may not see.
var errNotFound = errors.New("console: not found")

// problemOf returns the error page for err. logged reports whether the caller must log err, too.
func problemOf(err error) (p *problem, logged bool) {
	var input *inputError
	var big *http.MaxBytesError
	switch {
	case errors.As(err, &p):
		return p, false
	case errors.Is(err, errNotFound), errors.Is(err, store.ErrNotFound):
		return &problem{http.StatusNotFound, "This does not exist",
			"It may have been deleted, or it belongs to another tenant. Verify the address, or search for it."}, false
	case errors.As(err, &input):
		return &problem{http.StatusUnprocessableEntity, "The request is not valid", input.says}, false
	case errors.As(err, &big):
		return &problem{http.StatusRequestEntityTooLarge, "The form is too large", "Send less data at once."}, false
	case errors.Is(err, postgres.ErrUnproven), errors.Is(err, postgres.ErrUnmigrated):
		return &problem{http.StatusServiceUnavailable, "The console's database login is not set up",
			err.Error() + ". The console acts as the role tidings_system: grant it to the login, and run `tidings migrate`."}, true
	case postgres.IsTransient(err), errors.Is(err, context.DeadlineExceeded):
		return &problem{http.StatusServiceUnavailable, postgresSilent,
			"Retry in a few seconds. Run `tidings status` to see which servers are unavailable."}, true
	}
	return &problem{http.StatusInternalServerError, "The console failed",
		"Retry. If it fails again, read the log of the API around this time: it has the cause."}, true
}

// fail answers with an error page.
func (c *Console) fail(v *view, err error) {
	if v.r.Context().Err() != nil && errors.Is(err, context.Canceled) {
		return // the reader has closed the connection
	}
	p, logged := problemOf(err)
	if logged {
		c.log.WarnContext(v.r.Context(), "page failed", "path", v.r.URL.Path, "err", err)
	}
	c.render(v, p.Status, "error", p.Title, p)
}

// frame is the data of every template.
type frame struct {
	Title   string
	Page    *page
	View    *view
	Data    any
	Nav     []navGroup
	LiveURL string // of the page's stream; empty: the page is not live
	Wrong   string // why the request is not valid, on a page that keeps its form
}

type navGroup struct {
	Name  string
	Items []navItem
}

type navItem struct {
	Title, URL, Key string
	Here            bool
}

// SignedIn reports whether the reader is signed in.
func (f *frame) SignedIn() bool { return f.View.who.Name != "" }

// Who returns the token's name.
func (f *frame) Who() string { return f.View.who.Name }

// System reports a system token.
func (f *frame) System() bool { return f.View.who.System() }

// Tenant returns the token's tenant.
func (f *frame) Tenant() string { return strconv.FormatInt(f.View.who.TenantID, 10) }

// Roles returns the token's roles.
func (f *frame) Roles() string { return strings.Join(f.View.who.Roles, ", ") }

// MayReadPayloads calls view.mayReadPayloads, for templates.
func (f *frame) MayReadPayloads() bool { return f.View.mayReadPayloads() }

// Session returns a name that only windows of this token share.
func (f *frame) Session() string { return f.View.hash.Fingerprint() }

// TakesTenant reports whether the header has a field for the tenant.
func (f *frame) TakesTenant() bool { return f.Page != nil && f.Page.tenant && f.System() }

// Kept returns the parameters of the page that another tenant keeps.
func (f *frame) Kept() url.Values {
	q := f.View.r.URL.Query()
	for _, name := range []string{"tenant", "after", "before"} {
		q.Del(name)
	}
	return q
}

// ReadOnly reports whether the console refuses all acts.
func (f *frame) ReadOnly() bool { return f.View.c.cfg.ReadOnly }

// Assets returns the URL of the assets.
func (f *frame) Assets() string { return root + "assets/" + f.View.c.assets }

// Health returns the health of the installation, for operators. It is nil if it is unknown.
func (f *frame) Health() *health {
	if !f.System() {
		return nil
	}
	return f.View.c.observer.health()
}

// With calls view.with, for templates.
func (f *frame) With(pairs ...any) string { return f.View.with(pairs...) }

// Query calls view.query, for templates.
func (f *frame) Query(name string) string { return f.View.query(name) }

func (c *Console) frame(v *view, title string, data any) *frame {
	f := &frame{Title: title, View: v, Data: data}
	if v.who.Name == "" {
		return f
	}
	chosen := v.chosen()
	for _, p := range c.pages {
		if p.group == "" || !v.may(p) {
			continue
		}
		to := root + p.path
		if p.tenant {
			to = address(p.path, "tenant", chosen)
		}
		i := slices.IndexFunc(f.Nav, func(g navGroup) bool { return g.Name == p.group })
		if i < 0 {
			f.Nav, i = append(f.Nav, navGroup{Name: p.group}), len(f.Nav)
		}
		f.Nav[i].Items = append(f.Nav[i].Items, navItem{p.title, to, p.key, v.r.URL.Path == root+p.path})
	}
	return f
}

// render answers with a page. It renders the whole page before it writes, so an error never cuts a
// page short.
func (c *Console) render(v *view, status int, name, title string, data any) {
	c.renderFrame(v, status, name, c.frame(v, title, data))
}

func (c *Console) renderFrame(v *view, status int, name string, f *frame) {
	var b bytes.Buffer
	if err := c.templates[name].ExecuteTemplate(&b, "layout", f); err != nil {
		c.log.ErrorContext(v.r.Context(), "page not rendered", "page", name, "err", err, "runbook", "ConsoleFails")
		http.Error(v.w, "The console failed. The log of the API has the cause.", http.StatusInternalServerError)
		return
	}
	v.w.Header().Set("Content-Type", "text/html; charset=utf-8")
	v.w.WriteHeader(status)
	_, _ = v.w.Write(b.Bytes()) // an error means that the reader has closed the connection
}

// showPage reads and renders a page.
func (c *Console) showPage(v *view, p *page) error {
	if !v.may(p) {
		return c.refused(v, p)
	}
	ctx, cancel := context.WithTimeout(v.r.Context(), pageTimeout)
	defer cancel()
	data, err := p.data(ctx, v)
	var wrong *inputError
	if err != nil && (!errors.As(err, &wrong) || data == nil) {
		return err
	}
	f, status := c.frame(v, p.title, data), http.StatusOK
	if wrong != nil { // the page keeps its form
		f.Wrong, status = wrong.says, http.StatusUnprocessableEntity
	}
	v.keepTenant()
	f.Page = p
	if p.isLive(v) {
		f.LiveURL = (&url.URL{Path: root + "live/" + p.name(), RawQuery: v.r.URL.RawQuery}).String()
	}
	c.renderFrame(v, status, p.name(), f)
	return nil
}

func (c *Console) refused(v *view, p *page) error {
	if p.system && !v.who.System() {
		return &problem{http.StatusForbidden, "This page is for operators",
			"It shows the whole installation. Sign in with a system token: tidings token create --system --name NAME."}
	}
	return &problem{http.StatusForbidden, "The token lacks a role",
		fmt.Sprintf("The page needs the role %s. Sign in with a token that has it.", cmp.Or(p.role, tokens.RoleRead))}
}
