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
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/tokens"
)

// page is one page, and its entry in the navigation.
type page struct {
	path   string // below /console/; empty: the first page
	title  string
	key    string // g and this letter open it; empty: none
	group  string // of the navigation; empty: it is not there
	role   string // that it needs; empty: read
	system bool   // for system tokens alone
	live   bool   // its template has "live", which is sent again each second when it has changed
	data   func(context.Context, *view) (any, error)
}

// name is the page's, for templates and streams.
func (p *page) name() string {
	if p.path == "" {
		return "overview"
	}
	return p.path
}

func (p *page) template() string { return p.name() }

// view is one request by somebody who is signed in, or one reading of a live page for all who look at the same.
type view struct {
	c    *Console
	w    http.ResponseWriter // nil in a reading of a live page
	r    *http.Request
	who  tokens.Principal // without a name in a reading of a live page
	hash tokens.Hash
}

// query is a parameter of the URL.
func (v *view) query(name string) string { return strings.TrimSpace(v.r.URL.Query().Get(name)) }

// queryInt is a parameter that is a number, 0 without it, or a *inputError.
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

// with is the URL of this page with other values of the named parameters (name, value, ...); an empty value drops one.
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

// tenant is whose rows the view may show: its token's, or of a system token the one of the parameter tenant, 0 for all.
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

// mayReadPayloads reports whether the token reads events as they were written: what is hidden or removed may be in them.
func (v *view) mayReadPayloads() bool {
	return v.who.Has(tokens.RoleModerate) || v.who.Has(tokens.RoleAdmin)
}

// may reports whether the token opens the page.
func (v *view) may(p *page) bool {
	return (!p.system || v.who.System()) && v.who.Has(tokens.RoleRead) && (p.role == "" || v.who.Has(p.role))
}

// problem is an error page.
type problem struct {
	Status int
	Title  string // what happened
	Try    string // what helps
}

func (p *problem) Error() string { return p.Title }

// inputError is a problem of what was asked for: a sentence.
type inputError struct{ says string }

func (e *inputError) Error() string { return e.says }

// errNotFound reports a page, or a thing, that does not exist or that the token may not see.
var errNotFound = errors.New("console: not found")

// problemOf is what the reader is told of an error. logged says that the error itself is for the log.
func problemOf(err error) (p *problem, logged bool) {
	var input *inputError
	var big *http.MaxBytesError
	switch {
	case errors.As(err, &p):
		return p, false
	case errors.Is(err, errNotFound), errors.Is(err, store.ErrNotFound):
		return &problem{http.StatusNotFound, "This does not exist", "It may have been deleted, or it belongs to another tenant. Verify the address, or search for it."}, false
	case errors.As(err, &input):
		return &problem{http.StatusUnprocessableEntity, "The request is not valid", input.says}, false
	case errors.As(err, &big):
		return &problem{http.StatusRequestEntityTooLarge, "The form is too large", "Send less at once."}, false
	case errors.Is(err, postgres.ErrUnproven), errors.Is(err, postgres.ErrUnmigrated):
		return &problem{http.StatusServiceUnavailable, "The console's database login is not set up", err.Error() + ". The console acts as the role tidings_system: grant it to the login, and run `tidings migrate`."}, true
	case postgres.IsTransient(err), errors.Is(err, context.DeadlineExceeded):
		return &problem{http.StatusServiceUnavailable, "A database does not answer", "Retry in a few seconds. Run `tidings status` to see which servers are unavailable."}, true
	}
	return &problem{http.StatusInternalServerError, "The console failed", "Retry. If it fails again, read the log of the API around this time: it has the cause."}, true
}

// fail answers with an error page.
func (c *Console) fail(v *view, err error) {
	if v.r.Context().Err() != nil && errors.Is(err, context.Canceled) {
		return // nobody waits
	}
	p, logged := problemOf(err)
	if logged {
		c.log.WarnContext(v.r.Context(), "page failed", "path", v.r.URL.Path, "err", err)
	}
	c.render(v, p.Status, "error", p.Title, p)
}

// frame is what every template gets.
type frame struct {
	Title   string
	Page    *page
	View    *view
	Data    any
	Nav     []navGroup
	LiveURL string // of the page's stream; empty: it has none
}

type navGroup struct {
	Name  string
	Items []navItem
}

type navItem struct {
	Title, URL, Key string
	Here            bool
}

// SignedIn reports whether somebody is.
func (f *frame) SignedIn() bool { return f.View.who.Name != "" }

// Who names the token.
func (f *frame) Who() string { return f.View.who.Name }

// System reports a system token.
func (f *frame) System() bool { return f.View.who.System() }

// Tenant is the token's.
func (f *frame) Tenant() string { return strconv.FormatInt(f.View.who.TenantID, 10) }

// Roles are the token's.
func (f *frame) Roles() string { return strings.Join(f.View.who.Roles, ", ") }

// MayReadPayloads is view.mayReadPayloads, for templates.
func (f *frame) MayReadPayloads() bool { return f.View.mayReadPayloads() }

// ReadOnly reports a console that takes no act.
func (f *frame) ReadOnly() bool { return f.View.c.cfg.ReadOnly }

// Assets is where they are.
func (f *frame) Assets() string { return root + "assets/" + f.View.c.assets }

// With is view.with, for templates.
func (f *frame) With(pairs ...any) string { return f.View.with(pairs...) }

// Query is view.query, for templates.
func (f *frame) Query(name string) string { return f.View.query(name) }

func (c *Console) frame(v *view, title string, data any) *frame {
	f := &frame{Title: title, View: v, Data: data}
	if v.who.Name == "" {
		return f
	}
	for _, p := range c.pages {
		if p.group == "" || !v.may(p) {
			continue
		}
		i := slices.IndexFunc(f.Nav, func(g navGroup) bool { return g.Name == p.group })
		if i < 0 {
			f.Nav, i = append(f.Nav, navGroup{Name: p.group}), len(f.Nav)
		}
		f.Nav[i].Items = append(f.Nav[i].Items, navItem{p.title, root + p.path, p.key, v.r.URL.Path == root+p.path})
	}
	return f
}

// render answers with a page. It is made as a whole first: an error on the way does not cut it.
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
	_, _ = v.w.Write(b.Bytes()) // to somebody who has gone, perhaps
}

// showPage reads and renders a page.
func (c *Console) showPage(v *view, p *page) error {
	if !v.may(p) {
		return c.refused(v, p)
	}
	ctx, cancel := context.WithTimeout(v.r.Context(), pageTimeout)
	defer cancel()
	data, err := p.data(ctx, v)
	if err != nil {
		return err
	}
	f := c.frame(v, p.title, data)
	f.Page = p
	if p.live {
		f.LiveURL = (&url.URL{Path: root + "live/" + p.name(), RawQuery: v.r.URL.RawQuery}).String()
	}
	c.renderFrame(v, http.StatusOK, p.template(), f)
	return nil
}

func (c *Console) refused(v *view, p *page) error {
	if p.system && !v.who.System() {
		return &problem{http.StatusForbidden, "This page is for operators", "It shows the whole installation. Sign in with a system token: tidings token create --system --name NAME."}
	}
	return &problem{http.StatusForbidden, "The token lacks a role", fmt.Sprintf("The page needs the role %s. Sign in with a token that has it.", cmp.Or(p.role, tokens.RoleRead))}
}
