package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

const (
	queueRows    = 50     // per page
	queueCounted = 10_000 // per kind; larger counts show as a minimum
	decideSlice  = 200    // children per transaction of a decision on many
	decideForm   = 500    // maximum of children in one form
)

// lists maps the names of lists in URLs to moderation states.
var lists = map[string]string{"pending": event.ModerationPending, "hidden": event.ModerationHidden, "removed": event.ModerationRemoved}

// decisions are the possible decisions in the order of the buttons, each with the state that it
// gives a child.
var decisions = []struct{ Name, Label, Key, state, done string }{
	{"approve", "Approve", "a", event.ModerationApproved, "Approved"},
	{"hide", "Hide", "x", event.ModerationHidden, "Hid"},
	{"remove", "Remove", "d", event.ModerationRemoved, "Removed"},
	{"hold", "Hold", "w", event.ModerationPending, "Held"},
}

type moderationPage struct {
	Tenant         int64 // 0: a system token without a chosen tenant
	Kind           kinds.Child
	Kinds          []moderationKind
	List           string
	Object, Author event.ID
	Rows           []moderationRow
	Stale          int // rows that somebody decided on a moment ago
	Next           string
	Settings       *threadcache.Settings // of the thread of Object
	Bodies         bool                  // the token may read bodies
	ActID          uuid.UUID
	Until          string // when the page was read: a decision on all that match excludes newer children
	Here           string
	Decisions      any
}

type moderationKind struct {
	Name, Plural, Waits string
	Here                bool
}

type moderationRow struct {
	event.Child
	Last   *history.Decision // nil: no decision, or the archiver has not recorded it yet
	Record history.Record    // of the author
	Quoted *event.Child      // what it replies to; without a body if the token may not read it
}

// ItemID returns the child's id with the version that the moderator sees.
func (r moderationRow) ItemID() string { return r.ID + "@" + strconv.FormatInt(r.Version, 10) }

// moderated returns the moderated kind of that name, or the first one if name is "".
func (c *Console) moderated(name string) (kinds.Child, error) {
	for _, k := range c.deps.Kinds.Now().AllChildren() {
		if k.Moderated && (k.Name == name || name == "") {
			return k, nil
		}
	}
	return kinds.Child{}, &inputError{fmt.Sprintf("No moderated kind has the name %.40q.", name)}
}

// moderationFilter reads the filter from a URL or a form.
func (c *Console) moderationFilter(get func(string) string) (k kinds.Child, list string, of threadcache.Moderated, err error) {
	if k, err = c.moderated(get("kind")); err != nil {
		return k, "", of, err
	}
	list = cmp.Or(get("list"), "pending")
	of.State = lists[list]
	if of.State == "" {
		return k, "", of, &inputError{"list is pending, hidden or removed."}
	}
	for name, to := range map[string]*event.ID{"object": &of.Object, "author": &of.Author} {
		if s := get(name); s != "" {
			id, err := event.ParseID(s)
			if err != nil {
				return k, "", of, &inputError{fmt.Sprintf("%s is not an id: %.40q.", name, s)}
			}
			*to = id
		}
	}
	return k, list, of, nil
}

// keyText formats a position in a list, for URLs.
func keyText(k threadcache.Key) string {
	return k.CreatedAt.UTC().Format(event.TimeFormat) + "/" + k.ChildID
}

func parseKey(s string) (*threadcache.Key, error) {
	if s == "" {
		return nil, nil
	}
	at, id, _ := strings.Cut(s, "/")
	t, err := time.Parse(event.TimeFormat, at)
	if _, bad := uuid.Parse(id); err != nil || bad != nil {
		return nil, &inputError{"The address of this page of the list is not valid. Begin at the first page."}
	}
	return &threadcache.Key{CreatedAt: t, ChildID: id}, nil
}

func (c *Console) moderationData(ctx context.Context, v *view) (any, error) {
	tenant, err := v.tenant()
	if err != nil {
		return nil, err
	}
	k, list, of, err := c.moderationFilter(v.query)
	if err != nil {
		return nil, err
	}
	after, err := parseKey(v.query("after"))
	if err != nil {
		return nil, err
	}
	p := moderationPage{Tenant: tenant, Kind: k, List: list, Object: of.Object, Author: of.Author, Bodies: v.who.Has(tokens.RoleModerate),
		Here: v.r.URL.RequestURI(), Decisions: decisions, Until: time.Now().UTC().Format(event.TimeFormat)}
	if p.ActID, err = uuid.NewRandom(); err != nil || tenant == 0 {
		return p, err
	}
	var rows []event.Child
	var last map[string]history.Decision
	var records map[event.ID]history.Record
	err = postgres.InTenant(ctx, c.deps.Projections, tenant, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		if p.Kinds, err = c.waiting(ctx, tx, k); err != nil || v.w == nil { // the live part is the counts alone
			return err
		}
		if of.Object != "" {
			s, err := threadcache.ReadSettings(ctx, tx, k.Name, of.Object)
			if err != nil {
				return err
			}
			p.Settings = &s
		}
		if rows, err = of.Page(ctx, tx, k.Name, after, queueRows+1); err != nil {
			return err
		}
		if last, err = history.LastDecisions(ctx, tx, k, tenant, idsOf(rows)); err != nil {
			return err
		}
		records, err = history.Records(ctx, tx, k, tenant, authorsOf(rows))
		return err
	})
	if err != nil || v.w == nil {
		return p, err
	}
	if len(rows) > queueRows {
		rows = rows[:queueRows]
		p.Next = v.with("after", keyText(threadcache.KeyOf(rows[queueRows-1])))
	}
	if p.Rows, p.Stale, err = c.currentChildren(ctx, tenant, k, of.State, rows, last, p.Bodies); err != nil {
		return nil, err
	}
	for i := range p.Rows {
		p.Rows[i].Record = records[p.Rows[i].AuthorID]
	}
	return p, c.quote(ctx, tenant, k, p.Rows, p.Bodies)
}

// quote sets what the rows reply to. It blanks bodies unless bodies is true.
func (c *Console) quote(ctx context.Context, tenant int64, k kinds.Child, rows []moderationRow, bodies bool) error {
	var ids []string
	for _, r := range rows {
		if r.ReplyTo != "" {
			ids = append(ids, r.ReplyTo)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	said, err := store.ReadChildren(ctx, c.deps.Truth, tenant, k, ids)
	if err != nil {
		return err
	}
	for i, r := range rows {
		if q, ok := said[r.ReplyTo]; ok {
			if !bodies {
				q.Body = ""
			}
			rows[i].Quoted = &q
		}
	}
	return nil
}

func authorsOf(all []event.Child) []event.ID {
	authors := make([]event.ID, len(all))
	for i, c := range all {
		authors[i] = c.AuthorID
	}
	slices.Sort(authors)
	return slices.Compact(authors)
}

func idsOf(all []event.Child) []string {
	ids := make([]string, len(all))
	for i, c := range all {
		ids[i] = c.ID
	}
	return ids
}

// waiting counts the pending children of each moderated kind.
func (c *Console) waiting(ctx context.Context, tx pgx.Tx, here kinds.Child) (all []moderationKind, err error) {
	for _, k := range c.deps.Kinds.Now().AllChildren() {
		if !k.Moderated {
			continue
		}
		n, err := threadcache.Moderated{State: event.ModerationPending}.Count(ctx, tx, k.Name, queueCounted+1)
		if err != nil {
			return nil, err
		}
		all = append(all, moderationKind{k.Name, k.Plural, capped(min(n, queueCounted), n > queueCounted), k.Name == here.Name})
	}
	return all, nil
}

// currentChildren returns the current children of the truth for rows of the projection, which is a
// moment behind. It omits and counts those that have left the state. It blanks bodies unless bodies
// is true.
func (c *Console) currentChildren(ctx context.Context, tenant int64, k kinds.Child, state string, rows []event.Child,
	last map[string]history.Decision, bodies bool) (all []moderationRow, stale int, err error) {
	now, err := store.ReadChildren(ctx, c.deps.Truth, tenant, k, idsOf(rows))
	if err != nil {
		return nil, 0, err
	}
	for _, r := range rows {
		child, ok := now[r.ID]
		if !ok || child.ModerationState != state || child.AuthorState != event.AuthorActive {
			stale++
			continue
		}
		if !bodies {
			child.Body = ""
		}
		row := moderationRow{Child: child}
		if d, ok := last[r.ID]; ok {
			row.Last = &d
		}
		all = append(all, row)
	}
	return all, stale, nil
}

// actTenant returns the tenant whose rows an act changes.
func actTenant(v *view, in url.Values) (int64, error) {
	if !v.who.System() {
		return v.who.TenantID, nil
	}
	t, err := strconv.ParseInt(in.Get("tenant"), 10, 64)
	if err != nil || t <= 0 {
		return 0, &inputError{"Choose a tenant: a positive number."}
	}
	return t, nil
}

// decision returns the index in decisions of the form's decision.
func decision(in url.Values) (int, error) {
	for i, d := range decisions {
		if in.Get("decide") == d.Name || in.Get("decide") == d.Label {
			return i, nil
		}
	}
	return 0, &inputError{"Choose a decision: approve, hide, remove or hold."}
}

// decideItems returns the children that a form names, each with the version that the moderator saw.
func decideItems(in url.Values) (all []store.ChildModeration, err error) {
	for _, item := range in["item"] {
		id, version, _ := strings.Cut(item, "@")
		n, err := strconv.ParseInt(version, 10, 64)
		if u, bad := uuid.Parse(id); bad != nil || u.String() != id || err != nil || n <= 0 {
			return nil, &inputError{"The form names an invalid item. Open the page again."}
		}
		all = append(all, store.ChildModeration{ID: id, IfVersion: n})
	}
	if len(all) == 0 || len(all) > decideForm {
		return nil, &inputError{fmt.Sprintf("Select 1 to %d items.", decideForm)}
	}
	return all, nil
}

// reasonFits reports a reason that a moderation event cannot carry.
func reasonFits(in url.Values) error {
	if !store.ValidReason(strings.TrimSpace(in.Get(fieldReason))) {
		return &inputError{"The reason goes with the event: give at most 1,000 bytes on one line."}
	}
	return nil
}

func (c *Console) prepareDecide(_ context.Context, v *view, in url.Values) (subject, error) {
	tenant, err := actTenant(v, in)
	if err != nil {
		return subject{}, err
	}
	k, err := c.moderated(in.Get("kind"))
	if err != nil {
		return subject{}, err
	}
	items, err := decideItems(in)
	if err != nil {
		return subject{}, err
	}
	s := subject{Tenant: tenant, Target: fmt.Sprintf("%s %s", k.Name, items[0].ID), Back: root + "moderation"}
	if n := len(items); n > 1 {
		s.Target = fmt.Sprintf("%d %s", n, k.Plural)
	}
	if in.Get("decide") == "" {
		s.Fields = []field{{Name: "decide", Label: "Decision", Kind: "choice",
			Options: []string{"Approve", "Hide", "Remove", "Hold"}, Value: "Approve"}}
		s.Says = []string{"Approve shows it to all readers. Hide and Remove show it to none. Hold lets it wait for a decision."}
		return s, nil
	}
	i, err := decision(in)
	if err != nil {
		return subject{}, err
	}
	s.Target = decisions[i].Name + " " + s.Target
	return s, reasonFits(in)
}

func (c *Console) doDecide(ctx context.Context, d *doing) (string, error) {
	i, err := decision(d.In)
	if err != nil {
		return "", err
	}
	items, err := decideItems(d.In)
	if err != nil {
		return "", err
	}
	k, err := c.moderated(d.In.Get("kind"))
	if err != nil {
		return "", err
	}
	t := tally{done: decisions[i].done, kind: k}
	for chunk := range slices.Chunk(items, decideSlice) {
		if err := c.moderate(ctx, d, k, i, chunk, &t); err != nil {
			return "", fmt.Errorf("%s Then: %w", t.says(), err)
		}
		d.progress(t.looked, int64(len(items)))
	}
	if t.changed == 0 && t.same == 0 {
		return "", &inputError{t.says()}
	}
	return t.says(), nil
}

// tally counts the results of a decision on many children.
type tally struct {
	done                               string
	since                              string // when a stale child changed
	kind                               kinds.Child
	looked, changed, same, stale, gone int64
}

func (t tally) says() string {
	name := func(n int64) string { return words.Of(n, t.kind.Name) }
	says := fmt.Sprintf("%s %s.", t.done, name(t.changed))
	for _, part := range []struct {
		n    int64
		says string
	}{{t.same, "had that state already"}, {t.stale, "changed since " + cmp.Or(t.since, "you opened the page: reload it")},
		{t.gone, "could not change: deleted or unknown"}} {
		if part.n > 0 {
			says += fmt.Sprintf(" %s %s.", name(part.n), part.says)
		}
	}
	return says
}

// moderate decides on some children in one transaction. It calls the function that the API uses,
// which also writes the events.
func (c *Console) moderate(ctx context.Context, d *doing, k kinds.Child, decided int, items []store.ChildModeration, t *tally) error {
	for i := range items {
		items[i].Meta, items[i].State, items[i].Reason = store.Meta{Actor: d.actor()}, decisions[decided].state, d.Act.Reason
	}
	out, err := c.store.ModerateChildren(ctx, d.Act.TenantID, k, items)
	if err != nil {
		return err
	}
	for _, o := range out {
		var stale *store.StaleError
		var state *store.StateError
		t.looked++
		switch {
		case o.Changed:
			t.changed++
		case o.Err == nil:
			t.same++
		case errors.As(o.Err, &stale):
			t.stale++
		case errors.As(o.Err, &state), errors.Is(o.Err, store.ErrNotFound):
			t.gone++
		default:
			return o.Err
		}
	}
	return nil
}

func (c *Console) prepareDecideAll(ctx context.Context, v *view, in url.Values) (subject, error) {
	tenant, err := actTenant(v, in)
	if err != nil {
		return subject{}, err
	}
	k, list, of, err := c.moderationFilter(in.Get)
	if err != nil {
		return subject{}, err
	}
	if _, err := time.Parse(event.TimeFormat, in.Get("until")); err != nil {
		return subject{}, &inputError{"The form has no time limit. Open the page again."}
	}
	var n int
	var first []event.Child
	if err := postgres.InTenant(ctx, c.deps.Projections, tenant, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		if n, err = of.Count(ctx, tx, k.Name, queueCounted+1); err == nil {
			first, err = of.Page(ctx, tx, k.Name, nil, actSamples)
		}
		return err
	}); err != nil {
		return subject{}, err
	}
	target := "all " + list + " " + k.Plural
	if of.Author != "" {
		target += fmt.Sprintf(" of author %s", of.Author)
	}
	if of.Object != "" {
		target += fmt.Sprintf(" under %s %s", k.Parent, of.Object)
	}
	count := capped(min(n, queueCounted), n > queueCounted)
	s := subject{Target: target, Tenant: tenant, Back: root + "moderation",
		Fields: []field{{Name: "decide", Label: "Decision", Kind: "choice",
			Options: []string{"Approve", "Hide", "Remove", "Hold"}, Required: true}},
		Says: []string{fmt.Sprintf("Items in the list now: %s. Items written after you opened the list remain as they are.", count),
			"The console decides on them in slices. If the process stops, the remaining items do not change. The " +
				"audit log records how many it decided on."}}
	for _, child := range first {
		s.Samples = append(s.Samples, fmt.Sprintf("%.300s", child.Body))
	}
	if in.Get("decide") == "" {
		return s, nil
	}
	i, err := decision(in)
	if err != nil {
		return subject{}, err
	}
	if decisions[i].state == of.State {
		return subject{}, &inputError{"The items are " + list + " already. Choose another decision."}
	}
	s.Target = decisions[i].Name + " " + s.Target
	return s, reasonFits(in)
}

// doDecideAll reads the list by its keys and decides in slices. It decides on the current version
// of each child in the truth, if the child is still in the list's state.
func (c *Console) doDecideAll(ctx context.Context, d *doing) (string, error) {
	decided, err := decision(d.In)
	if err != nil {
		return "", err
	}
	k, _, of, err := c.moderationFilter(d.In.Get)
	if err != nil {
		return "", err
	}
	until, err := time.Parse(event.TimeFormat, d.In.Get("until"))
	if err != nil {
		return "", &inputError{"The form has no time limit. Open the page again."}
	}
	t := tally{done: decisions[decided].done, kind: k}
	var after *threadcache.Key
	for {
		var rows []event.Child
		err := postgres.InTenant(ctx, c.deps.Projections, d.Act.TenantID, pgx.TxOptions{AccessMode: pgx.ReadOnly},
			func(tx pgx.Tx) (err error) {
				rows, err = of.Page(ctx, tx, k.Name, after, decideSlice)
				return err
			})
		if err != nil {
			return "", fmt.Errorf("%s Then: %w", t.says(), err)
		}
		more := len(rows) == decideSlice
		if more {
			key := threadcache.KeyOf(rows[len(rows)-1])
			after = &key
		}
		if i := slices.IndexFunc(rows, func(c event.Child) bool { return c.CreatedAt.After(until) }); i >= 0 {
			rows, more = rows[:i], false
		}
		now, _, err := c.currentChildren(ctx, d.Act.TenantID, k, of.State, rows, nil, false)
		if err != nil {
			return "", fmt.Errorf("%s Then: %w", t.says(), err)
		}
		items := make([]store.ChildModeration, len(now))
		for i, r := range now {
			items[i] = store.ChildModeration{ID: r.ID, IfVersion: r.Version}
		}
		if len(items) > 0 {
			if err := c.moderate(ctx, d, k, decided, items, &t); err != nil {
				return "", fmt.Errorf("%s Then: %w", t.says(), err)
			}
		}
		if d.progress(t.looked, 0); !more {
			return t.says(), nil
		}
	}
}

// thread returns the thread that a form names, with its settings.
func (c *Console) thread(ctx context.Context, v *view, in url.Values) (k kinds.Child, tenant int64, t event.Thread, err error) {
	if tenant, err = actTenant(v, in); err != nil {
		return k, 0, t, err
	}
	if k, err = c.moderated(in.Get("kind")); err != nil {
		return k, 0, t, err
	}
	object, err := event.ParseID(in.Get("object"))
	if err != nil {
		return k, 0, t, &inputError{"Name a thread by the id of its " + k.Parent + "."}
	}
	t, err = c.store.GetThread(ctx, tenant, k, object)
	return k, tenant, t, err
}

func (c *Console) prepareSettings(ctx context.Context, v *view, in url.Values) (subject, error) {
	k, tenant, t, err := c.thread(ctx, v, in)
	if err != nil {
		return subject{}, err
	}
	in.Set("version", cmp.Or(in.Get("version"), strconv.FormatInt(t.Version, 10)))
	on := make([]string, 0, 2)
	for name, is := range map[string]bool{"locked": t.Locked, "premoderated": t.Premoderate} {
		if is {
			on = append(on, name)
		}
	}
	return subject{Target: fmt.Sprintf("thread of %s under %s %s", k.Plural, k.Parent, t.PostID), Tenant: tenant, Back: root + "moderation",
		Says: []string{"A locked thread accepts no new " + k.Plural + ". In a premoderated one, new " + k.Plural +
			" wait for a moderator."},
		Fields: []field{{Name: "on", Label: "Settings", Kind: "checks", Options: []string{"locked", "premoderated"},
			Value: strings.Join(on, ",")},
			{Name: "title", Label: "Title", Hint: "Empty: none", Kind: "text", Value: t.Title}}}, nil
}

func (c *Console) doSettings(ctx context.Context, d *doing) (string, error) {
	k, err := c.moderated(d.In.Get("kind"))
	if err != nil {
		return "", err
	}
	object, err := event.ParseID(d.In.Get("object"))
	if err != nil {
		return "", &inputError{"The form names no thread."}
	}
	version, err := strconv.ParseInt(d.In.Get("version"), 10, 64)
	if err != nil {
		return "", &inputError{"The form names no version. Open it again."}
	}
	out, err := c.store.SetThreads(ctx, d.Act.TenantID, k,
		[]store.ThreadSettings{{Meta: store.Meta{Actor: d.actor()}, Object: object, IfVersion: &version,
			Locked: slices.Contains(d.In["on"], "locked"), Premoderated: slices.Contains(d.In["on"], "premoderated"),
			Title: d.In.Get("title")}})
	if err != nil {
		return "", err
	}
	var stale *store.StaleThreadError
	switch t := out[0].Thread; {
	case errors.As(out[0].Err, &stale):
		return "", &inputError{fmt.Sprintf("Somebody changed the settings meanwhile: they are at version %d. Open the form again.",
			stale.Current.Version)}
	case errors.Is(out[0].Err, store.ErrInvalid):
		return "", &inputError{"A title has at most 300 bytes without control characters."}
	case out[0].Err != nil:
		return "", out[0].Err
	case !out[0].Changed:
		return "The settings already have these values.", nil
	default:
		return fmt.Sprintf("Locked: %s. Premoderated: %s. The settings are at version %d.",
			yes(t.Locked), yes(t.Premoderate), t.Version), nil
	}
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// moderatedPage is what the pages about one moderated kind share.
type moderatedPage struct {
	Tenant int64
	Kind   kinds.Child
	Kinds  []kinds.Child
	Next   string
}

// moderatedPage reads the kind that the reader chose.
func (c *Console) moderatedPage(v *view, tenant int64) (p moderatedPage, err error) {
	p.Tenant = tenant
	for _, k := range c.deps.Kinds.Now().AllChildren() {
		if k.Moderated {
			p.Kinds = append(p.Kinds, k)
		}
	}
	p.Kind, err = c.moderated(v.query("kind"))
	return p, err
}

type threadsPage struct {
	moderatedPage
	Rows []threadcache.Waiting
}

// threadsData lists the threads with pending children.
func (c *Console) threadsData(ctx context.Context, v *view) (any, error) {
	tenant, err := v.tenant()
	if err != nil {
		return nil, err
	}
	of, err := c.moderatedPage(v, tenant)
	p := threadsPage{moderatedPage: of}
	if err != nil || p.Tenant == 0 {
		return p, err
	}
	var after event.ID
	if s := v.query("after"); s != "" {
		if after, err = event.ParseID(s); err != nil {
			return nil, &inputError{fmt.Sprintf("after: %v.", err)}
		}
	}
	err = postgres.InTenant(ctx, c.deps.Projections, p.Tenant, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		p.Rows, err = threadcache.WaitingThreads(ctx, tx, p.Kind.Name, after, queueRows+1)
		return err
	})
	if len(p.Rows) > queueRows {
		p.Rows = p.Rows[:queueRows]
		p.Next = v.with("after", p.Rows[queueRows-1].Object)
	}
	return p, err
}

type decisionsPage struct {
	moderatedPage
	Rows []history.Decision
}

// decisionsData lists the decisions of moderators, from the histories.
func (c *Console) decisionsData(ctx context.Context, v *view) (any, error) {
	tenant, err := v.tenant()
	if err != nil {
		return nil, err
	}
	of, err := c.moderatedPage(v, tenant)
	p := decisionsPage{moderatedPage: of}
	if err != nil || p.Tenant == 0 {
		return p, err
	}
	before, err := v.queryInt("before")
	if err != nil {
		return nil, err
	}
	err = postgres.InTenant(ctx, c.deps.Projections, p.Tenant, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		rows, next, err := history.Decisions(ctx, tx, p.Kind, p.Tenant, cmp.Or(before, math.MaxInt64), queueRows)
		if p.Rows = rows; next != 0 {
			p.Next = v.with("before", next)
		}
		return err
	})
	return p, err
}
