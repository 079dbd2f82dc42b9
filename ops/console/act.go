package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/ops/audit"
)

const (
	actWait    = 2 * time.Second  // then the reader follows the act on its own page
	actTimeout = time.Hour        // limit for one act without a limit of its own
	actSamples = 5                // that the form of an act on many things shows
	secretKept = 10 * time.Minute // how long the token that did the act may read its secret
)

// act is an operation that a page offers to its reader.
type act struct {
	name         string        // in the audit log and the URL: "consumer.pause"
	label        string        // of the button: "Pause"
	role         string        // the role that it needs: tokens.RoleAdmin or RoleModerate
	system       bool          // only system tokens may do it
	irreversible bool          // nobody can undo it
	limit        time.Duration // 0: actTimeout
	// prepare verifies the form's input (in.Get("consumer")) and describes the effect. Errors:
	// *inputError, errNotFound.
	prepare func(ctx context.Context, v *view, in url.Values) (subject, error)
	// do performs the act and returns the outcome, a sentence. Its ctx ends when the process stops.
	// The console calls it once per act id.
	do func(ctx context.Context, d *doing) (outcome string, err error)
}

// subject is the target and the effect of an act.
type subject struct {
	Target  string   // in the audit log: "followercounts", "dead letter 12"
	Tenant  int64    // the tenant that it concerns, 0 for the whole installation
	Says    []string // sentences: the effect
	Samples []string // some of many things that it concerns
	Fields  []field  // further inputs
	Wrong   string   // why the act cannot be done with this input; empty: it can
	Plan    []string // what it would change, one line each
	Seen    string   // names the plan, which the reader must have seen before confirming; empty: there is none
	Button  string   // instead of the act's label
	Confirm string   // what the reader types to confirm an act that does much harm; empty: nothing
	Back    string   // the page to go back to
}

// failure is the outcome of an act that failed in whole or in part.
type failure string

func (f failure) Error() string { return string(f) }

// field is an input of the confirmation form.
type field struct {
	Name, Label, Hint, Value string
	Kind                     string   // text, number, area, code (which takes a file, too), checks or choice
	Options                  []string // for checks and choice
	Required                 bool
}

// doing is an act in progress.
type doing struct {
	In  url.Values // the form
	Who tokens.Principal
	Act audit.Act

	mu          sync.Mutex
	step        string
	done, total int64
	secret      string
	owner       tokens.Hash
	ended       chan struct{}
}

// progress records how far the act is, for the reader. A total of 0 is unknown.
func (d *doing) progress(done, total int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.done, d.total = done, total
}

// at records the current step of the act, for the reader.
func (d *doing) at(step string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.step = step
}

// showOnce shows a secret once to the token that does the act. The console never stores it.
func (d *doing) showOnce(s string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.secret = s
}

// actor returns the token's name, for tables that record an actor.
func (d *doing) actor() string { return d.Who.Name }

type actKey uuid.UUID

// errContinues reports that another process continues the act and will record its outcome.
var errContinues = errors.New("console: another process continues the act")

// mayAct reports whether the reader may do the act.
func (v *view) mayAct(a *act) bool {
	return a != nil && !v.c.cfg.ReadOnly && v.who.Has(a.role) && (!a.system || v.who.System())
}

// actOf returns the act of the request if the token may do it.
func (c *Console) actOf(v *view) (*act, error) {
	a := c.acts[v.r.PathValue("act")]
	switch {
	case a == nil:
		return nil, errNotFound
	case c.cfg.ReadOnly:
		return nil, &problem{http.StatusForbidden, "The console is read only",
			"It was started with CONSOLE_READ_ONLY. Use the tidings command, or a console that takes acts."}
	case a.system && !v.who.System():
		return nil, &problem{http.StatusForbidden, "This act is for operators",
			"Sign in with a system token that has the role " + a.role + "."}
	case !v.who.Has(a.role):
		return nil, &problem{http.StatusForbidden, "The token lacks the role " + a.role,
			"Sign in with a token that has it. Nothing was done."}
	}
	return a, nil
}

type confirmData struct {
	Name, Label string
	Button      string
	Danger      bool
	Subject     subject
	In          url.Values
	ActID       string
	Reason      string
	Error       string
	Multipart   bool // the form takes a file
}

// Names of the form's own fields. No act uses them for its input.
const (
	fieldActID  = "act_id"
	fieldReason = "reason"
	fieldBack   = "back"

	fieldConfirm = "confirm"
	fieldSeen    = "seen"

	uploaded = "_upload" // behind the name of a field: the file for it
)

// confirmAct shows the effect of the act and asks for a reason.
func (c *Console) confirmAct(v *view) error {
	a, err := c.actOf(v)
	if err != nil {
		return err
	}
	id, err := uuid.NewRandom()
	if err != nil {
		return fmt.Errorf("make an act id: %w", err)
	}
	return c.askAct(v, a, http.StatusOK, confirmData{In: v.r.URL.Query(), ActID: id.String()})
}

func (c *Console) askAct(v *view, a *act, status int, d confirmData) error {
	ctx, cancel := context.WithTimeout(v.r.Context(), pageTimeout)
	defer cancel()
	s, err := a.prepare(ctx, v, d.In)
	if err != nil {
		return err
	}
	for i, f := range s.Fields { // keep the values that the reader entered
		d.Multipart = d.Multipart || f.Kind == "code"
		if v.r.Method == http.MethodPost {
			s.Fields[i].Value = strings.Join(d.In[f.Name], ",")
		}
	}
	back := openedFrom(d.In)
	s.Back = cmp.Or(back, s.Back)
	d.Name, d.Label, d.Button, d.Danger, d.Subject = a.name, a.label, cmp.Or(s.Button, a.label), a.irreversible, s
	in := url.Values{}
	for name, values := range d.In { // carry the input that has no field of its own
		asked := name == fieldActID || name == fieldReason || name == fieldConfirm || name == fieldSeen || name == fieldBack && back == ""
		for _, f := range s.Fields {
			asked = asked || f.Name == name
		}
		if !asked {
			in[name] = values
		}
	}
	d.In = in
	c.render(v, status, "act", a.label, d)
	return nil
}

// takeAct does the confirmed act, once per act id.
func (c *Console) takeAct(v *view) error {
	a, err := c.actOf(v)
	if err != nil {
		return err
	}
	if err := readForm(v.r); err != nil {
		return err
	}
	id, err := uuid.Parse(v.r.PostForm.Get(fieldActID))
	if err != nil {
		return &inputError{"The form has no act id. Open it again."}
	}
	in := v.r.PostForm
	ctx, cancel := context.WithTimeout(v.r.Context(), pageTimeout)
	defer cancel()
	// The same form again. The act may have changed what prepare reads, so do not call prepare.
	if done, err := audit.Get(ctx, c.deps.Truth, id); err == nil {
		return c.redirectToAct(v, done.ActID)
	} else if !errors.Is(err, audit.ErrNotFound) {
		return err
	}
	s, err := a.prepare(ctx, v, in)
	if err != nil {
		return err
	}
	if lacks := s.lacks(in); lacks != "" {
		return c.askAct(v, a, http.StatusUnprocessableEntity,
			confirmData{In: in, ActID: id.String(), Reason: in.Get(fieldReason), Error: lacks})
	}
	if s.Seen != in.Get(fieldSeen) { // the plan is another one than the reader saw
		return c.askAct(v, a, http.StatusOK, confirmData{In: in, ActID: id.String(), Reason: in.Get(fieldReason)})
	}
	if lacks := s.unconfirmed(in); lacks != "" {
		return c.askAct(v, a, http.StatusUnprocessableEntity,
			confirmData{In: in, ActID: id.String(), Reason: in.Get(fieldReason), Error: lacks})
	}
	record, first, err := audit.Begin(ctx, c.deps.Truth,
		audit.Act{ActID: id, TenantID: s.Tenant, TokenTenant: v.who.TenantID, TokenName: v.who.Name, Fingerprint: v.hash.Fingerprint(),
			Name: a.name, Target: s.Target, Reason: in.Get(fieldReason)})
	if errors.Is(err, audit.ErrInvalid) {
		return c.askAct(v, a, http.StatusUnprocessableEntity,
			confirmData{In: in, ActID: id.String(), Reason: in.Get(fieldReason), Error: "Give a reason: it is kept in the audit log."})
	}
	if err != nil {
		return err
	}
	if first {
		if err := c.start(v, a, &doing{In: in, Who: v.who, Act: record, owner: v.hash, ended: make(chan struct{})}); err != nil {
			return err
		}
	}
	return c.redirectToAct(v, id)
}

// readForm reads the form. A file that the reader chose replaces what the field of its name has:
// the browser names the file's part like the field, with uploaded behind it.
func readForm(r *http.Request) error {
	var big *http.MaxBytesError
	err := r.ParseForm()
	if err == nil {
		err = r.ParseMultipartForm(maxFile)
	}
	switch {
	case errors.Is(err, http.ErrNotMultipart):
		return nil
	case errors.As(err, &big):
		return big
	case err != nil:
		return &inputError{"The form cannot be read."}
	}
	for name, files := range r.MultipartForm.File {
		f, err := files[0].Open()
		if err != nil {
			return fmt.Errorf("open the file of the form: %w", err)
		}
		text, err := io.ReadAll(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("read the file of the form: %w", err)
		}
		if len(text) > 0 {
			r.PostForm.Set(strings.TrimSuffix(name, uploaded), string(text))
		}
	}
	maps.DeleteFunc(r.PostForm, func(name string, _ []string) bool { return strings.HasSuffix(name, uploaded) }) // no file was chosen
	return nil
}

// lacks says what the form lacks before the reader may confirm. It is empty if nothing is missing.
func (s subject) lacks(in url.Values) string {
	for _, f := range s.Fields {
		if f.Required && strings.TrimSpace(in.Get(f.Name)) == "" {
			return f.Label + ": a value is required."
		}
	}
	return s.Wrong
}

// unconfirmed says what the reader has to type. It is empty if that is done.
func (s subject) unconfirmed(in url.Values) string {
	if typed := strings.ReplaceAll(strings.TrimSpace(in.Get(fieldConfirm)), ",", ""); s.Confirm != "" && typed != s.Confirm {
		return "To confirm, type " + s.Confirm + "."
	}
	return ""
}

// openedFrom returns the page from which the reader opened the act, or "" if it is unknown.
func openedFrom(in url.Values) string {
	if back := in.Get(fieldBack); ours(back) {
		return back
	}
	return ""
}

// redirectToAct redirects to the act's page.
func (c *Console) redirectToAct(v *view, id uuid.UUID) error {
	to := root + "acts/" + id.String()
	if back := openedFrom(v.r.PostForm); back != "" {
		to += "?back=" + url.QueryEscape(back)
	}
	http.Redirect(v.w, v.r, to, http.StatusSeeOther)
	return nil
}

// start gives the act to Run, which continues it after the request ends. It waits up to actWait for
// the end.
func (c *Console) start(v *view, a *act, d *doing) error {
	key := actKey(d.Act.ActID)
	c.mu.Lock()
	c.running[key] = d
	c.mu.Unlock()
	select {
	case c.jobs <- func(ctx context.Context) { c.work(ctx, a, d) }:
	case <-v.r.Context().Done():
		return c.recordNotDone(v, key, v.r.Context().Err())
	case <-c.live.over: // Run has ended
		return c.recordNotDone(v, key, &problem{http.StatusServiceUnavailable, "This process is stopping",
			"Nothing was done. Do it again: another process takes it."})
	}
	wait := time.NewTimer(actWait)
	defer wait.Stop()
	select {
	case <-d.ended:
	case <-wait.C:
	case <-v.r.Context().Done():
	}
	return nil
}

// recordNotDone records that the console did not do the act.
func (c *Console) recordNotDone(v *view, key actKey, why error) error {
	c.forget(key)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(v.r.Context()), pageTimeout)
	defer cancel()
	return errors.Join(why, audit.Finish(ctx, c.deps.Truth, uuid.UUID(key), "Nothing was done: the process was stopping.", true))
}

func (c *Console) forget(key actKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.running, key)
}

// work does the act and records its outcome, even if the process stops meanwhile.
func (c *Console) work(ctx context.Context, a *act, d *doing) {
	defer close(d.ended)
	wctx, cancel := context.WithTimeout(ctx, cmp.Or(a.limit, actTimeout))
	defer cancel()
	outcome, err := c.doRecovered(wctx, a, d)
	if errors.Is(err, errContinues) {
		c.forget(actKey(d.Act.ActID))
		return
	}
	var failed failure
	if errors.As(err, &failed) {
		outcome = string(failed)
	} else if err != nil {
		p, _ := problemOf(err)
		outcome = p.Title + ": " + p.Try
		c.log.WarnContext(ctx, "act failed", "act", a.name, "act_id", d.Act.ActID, "target", d.Act.Target, "err", err)
		var input *inputError
		if !errors.As(err, &input) && p.Status >= http.StatusInternalServerError {
			outcome += " The act may be done in part: verify its target. The cause: " + err.Error()
		}
	}
	fctx, stop := context.WithTimeout(context.WithoutCancel(ctx), pageTimeout)
	defer stop()
	if ferr := audit.Finish(fctx, c.deps.Truth, d.Act.ActID, outcome, err != nil); ferr != nil {
		c.log.ErrorContext(ctx, "outcome of an act not recorded", "act", a.name, "act_id", d.Act.ActID, "outcome", outcome, "err", ferr,
			"runbook", "ConsoleFails")
	}
	d.mu.Lock()
	secret := d.secret != ""
	d.mu.Unlock()
	if !secret {
		c.forget(actKey(d.Act.ActID))
		return
	}
	time.AfterFunc(secretKept, func() { c.forget(actKey(d.Act.ActID)) })
}

// doRecovered calls do and turns a panic into an error.
func (c *Console) doRecovered(ctx context.Context, a *act, d *doing) (outcome string, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("the act %s panicked: %v", a.name, cause)
		}
	}()
	return a.do(ctx, d)
}

type outcomeData struct {
	Act         audit.Act
	Step        string // empty: the act reports no steps
	Done, Total int64
	Here        bool   // this process does the act
	Secret      string // the page shows it once
	Back        string
}

// showAct shows the state or outcome of an act. It shows a secret once, to the token that did the
// act.
func (c *Console) showAct(v *view) error {
	id, err := uuid.Parse(v.r.PathValue("id"))
	if err != nil {
		return errNotFound
	}
	ctx, cancel := context.WithTimeout(v.r.Context(), pageTimeout)
	defer cancel()
	// Read c.running first: an act leaves c.running only after its record has the outcome. In the
	// other order, an act that ends between the two reads seems to be another process's.
	c.mu.Lock()
	d := c.running[actKey(id)]
	c.mu.Unlock()
	record, err := audit.Get(ctx, c.deps.Truth, id)
	if errors.Is(err, audit.ErrNotFound) || err == nil && !v.who.System() && record.TenantID != v.who.TenantID {
		return errNotFound
	}
	if err != nil {
		return err
	}
	data := outcomeData{Act: record, Back: cmp.Or(openedFrom(v.r.URL.Query()), root)}
	if d != nil {
		d.mu.Lock()
		data.Here, data.Step, data.Done, data.Total = true, d.step, d.done, d.total
		if d.owner == v.hash && record.Finished != nil {
			data.Secret, d.secret = d.secret, ""
		}
		d.mu.Unlock()
	}
	if record.Finished == nil {
		v.w.Header().Set("Refresh", "2") // works without JavaScript
	}
	c.render(v, http.StatusOK, "outcome", "Act", data)
	return nil
}

// inPart matches the outcome of an act on dead letters of which some succeeded.
var inPart = regexp.MustCompile(`^(Retried|Discarded) [1-9]`)

// stateOf returns the class and the word of the badge of an act.
func stateOf(a audit.Act) (b struct{ Level, Text string }) {
	switch {
	case a.Finished == nil:
		b.Level, b.Text = "warn", "not finished"
	case !a.Failed:
		b.Level, b.Text = "ok", "done"
	case inPart.MatchString(a.Outcome):
		b.Level, b.Text = "warn", "done in part"
	default:
		b.Level, b.Text = "bad", "failed"
	}
	return b
}
