package console

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

const (
	inspectRows     = 50 // of a page of a thread or of edges
	inspectVersions = 50
)

type inspectPage struct {
	Tenant   int64
	Options  []string // names that can be inspected
	What     string   // one of Options; empty: the reader has not searched
	Title    string
	Sides    []projections.Diff
	Inexact  bool // omits large numbers
	Rows     []projections.Diff
	Next     string
	Versions []timelineStep
	More     bool // older versions exist
	Links    []inspectLink
	Absent   bool // neither side has it

	Child   *event.Child // from the truth; without a body if the token may not read it
	Item    string       // for a decision on it
	Payload bool         // the token may read what people wrote
	Thread  *inspectThread
	Kind    string
}

type inspectThread struct {
	Kind   kinds.Child
	Object event.ID
}

type inspectLink struct{ Text, URL string }

// inspectOptions returns the names of the kinds and of the types of objects.
func inspectOptions(set *kinds.Set) (all []string) {
	seen := make(map[string]bool)
	add := func(name string) {
		if !seen[name] {
			seen[name], all = true, append(all, name)
		}
	}
	add(kinds.Author)
	for _, k := range set.AllEdges() {
		add(k.Name)
	}
	for _, k := range set.AllChildren() {
		add(k.Name)
	}
	for _, k := range set.AllEdges() {
		add(k.From)
		add(k.To)
	}
	for _, k := range set.AllChildren() {
		add(k.Parent)
	}
	return all
}

func (c *Console) inspectData(ctx context.Context, v *view) (any, error) {
	set := c.deps.Kinds.Now()
	p := inspectPage{Options: inspectOptions(set), What: v.query("kind"), Payload: v.who.Has(tokens.RoleModerate)}
	var err error
	if p.Tenant, err = v.tenant(); err != nil {
		return nil, err
	}
	id, to := v.query("id"), v.query("to")
	if p.Tenant == 0 || p.What == "" || id == "" {
		return p, nil
	}
	from, err := event.ParseID(id)
	if err != nil {
		return nil, &inputError{err.Error() + "."}
	}
	if k, ok := set.Child(p.What); ok {
		return c.inspectChildOrThread(ctx, v, p, k, from)
	}
	if k, ok := set.Edge(p.What); ok {
		if to == "" {
			return p, c.inspectEdges(ctx, v, &p, k, from)
		}
		target, err := event.ParseID(to)
		if err != nil {
			return nil, &inputError{"The other end: " + err.Error() + "."}
		}
		return p, c.inspectEdge(ctx, &p, k, from, target)
	}
	return p, c.inspectObject(ctx, &p, set, from)
}

func (p *inspectPage) link(text string, pairs ...any) {
	p.Links = append(p.Links, inspectLink{text, address("inspect", append([]any{"tenant", p.Tenant}, pairs...)...)})
}

// inspectObject shows an object (such as a user) in each kind.
func (c *Console) inspectObject(ctx context.Context, p *inspectPage, set *kinds.Set, id event.ID) error {
	p.Title = fmt.Sprintf("%s %s", p.What, id)
	known := false
	for _, k := range set.AllEdges() {
		if k.From != p.What && k.To != p.What {
			continue
		}
		known = true
		if err := c.countSides(ctx, p, k, p.What, id); err != nil {
			return err
		}
		if k.From == p.What {
			p.link("every "+k.Name+" from it", "kind", k.Name, "id", id)
		}
	}
	for _, k := range set.AllChildren() {
		if k.Parent == p.What {
			known = true
			if err := c.threadSides(ctx, p, k, id); err != nil {
				return err
			}
			p.link(k.Plural, "kind", k.Name, "id", id)
		}
		if k.Moderated && p.What == kinds.Author {
			for _, list := range []string{"pending", "hidden", "removed"} {
				p.Links = append(p.Links, inspectLink{list + " " + k.Plural,
					address("moderation", "tenant", p.Tenant, "kind", k.Name, "list", list, "author", id)})
			}
		}
	}
	if !known && p.What != kinds.Author {
		return &inputError{fmt.Sprintf("No kind has the name %.40q.", p.What)}
	}
	return nil
}

// countSides adds the counts of the edges of an object or a child, on both sides.
func (c *Console) countSides(ctx context.Context, p *inspectPage, k kinds.Edge, object string, id event.ID) error {
	b, exact, err := followercounts.InspectCounts(ctx, c.deps.Truth, c.deps.Projections, k, object, p.Tenant, id)
	b.Entity = k.Name + ": " + b.Entity
	p.Sides, p.Inexact = append(p.Sides, b), p.Inexact || !exact
	return err
}

// threadSides adds the settings and numbers of a thread, on both sides.
func (c *Console) threadSides(ctx context.Context, p *inspectPage, k kinds.Child, object event.ID) error {
	settings, counts, exact, err := threadcache.InspectThread(ctx, c.deps.Truth, c.deps.Projections, k, p.Tenant, object)
	if err != nil {
		return err
	}
	if counts.Entity = k.Plural + " of the " + counts.Entity; k.Moderated {
		settings.Entity = "settings for " + k.Plural + " of the " + settings.Entity
		p.Sides = append(p.Sides, settings)
	}
	p.Sides, p.Inexact = append(p.Sides, counts), p.Inexact || !exact
	return nil
}

func (c *Console) inspectEdges(ctx context.Context, v *view, p *inspectPage, k kinds.Edge, from event.ID) error {
	p.Title = fmt.Sprintf("Every %s from %s %s", k.Name, k.From, from)
	after, err := event.ID(""), error(nil)
	if text := v.query("after"); text != "" {
		if after, err = event.ParseID(text); err != nil {
			return &inputError{err.Error() + "."}
		}
	}
	var next event.ID
	if p.Rows, next, err = followercounts.InspectEdges(ctx, c.deps.Truth, c.deps.Projections, k, p.Tenant, from, after,
		inspectRows); err != nil {
		return err
	}
	if next != "" {
		p.Next = v.with("after", next)
	}
	for i := range p.Rows {
		p.Rows[i].Fields = shown(p.Rows[i].Fields, "active", "version", "positioned_at")
	}
	p.link(fmt.Sprintf("%s %s", k.From, from), "kind", k.From, "id", from)
	return nil
}

// shown selects the named fields, which fit into a row of a table, and all fields that differ.
func shown(all []projections.Field, names ...string) (some []projections.Field) {
	for _, f := range all {
		if f.Differs() || containsItem(strings.Join(names, ","), f.Name) {
			some = append(some, f)
		}
	}
	return some
}

func (c *Console) inspectEdge(ctx context.Context, p *inspectPage, k kinds.Edge, from, to event.ID) error {
	p.Title = fmt.Sprintf("%s from %s %s to %s %s", k.Name, k.From, from, k.To, to)
	edge, err := followercounts.InspectEdge(ctx, c.deps.Truth, c.deps.Projections, k, p.Tenant, from, to)
	if err != nil {
		return err
	}
	last, err := history.InspectEdge(ctx, c.deps.Truth, c.deps.Projections, k, p.Tenant, from, to)
	if err != nil {
		return err
	}
	p.add(edge, last)
	p.link(fmt.Sprintf("%s %s", k.From, from), "kind", k.From, "id", from)
	p.link(fmt.Sprintf("%s %s", k.To, to), "kind", k.To, "id", to)
	p.link("every "+k.Name+" from it", "kind", k.Name, "id", from)
	return c.versions(ctx, p, func(tx pgx.Tx) error {
		all, err := history.Edges(k).Recent(ctx, tx, p.Tenant, versioned.Key{from, to}, math.MaxInt64, inspectVersions+1)
		for _, v := range all {
			is := strings.ToLower(v.Object.Status)
			if len(v.Object.Attributes) > 0 {
				is += " " + string(store.CanonicalAttributes(v.Object.Attributes))
			}
			p.Versions = append(p.Versions, plainStep(v.Metadata, v.Object.Version, is))
		}
		return err
	})
}

// add adds those sides that have the entity.
func (p *inspectPage) add(sides ...projections.Diff) {
	for _, b := range sides {
		if b.InTruth || b.InProjection {
			p.Sides = append(p.Sides, b)
		}
	}
	p.Absent = len(p.Sides) == 0
}

// versions reads the newest versions of a history.
func (c *Console) versions(ctx context.Context, p *inspectPage, read func(tx pgx.Tx) error) error {
	err := postgres.InTenant(ctx, c.deps.Projections, p.Tenant, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		p.Versions = nil
		return read(tx)
	})
	if len(p.Versions) > inspectVersions {
		p.Versions, p.More = p.Versions[:inspectVersions], true
	}
	return err
}

func (c *Console) inspectChild(ctx context.Context, v *view, p *inspectPage, k kinds.Child, id string) error {
	p.Title = k.Name + " " + id
	child, err := threadcache.InspectChild(ctx, c.deps.Truth, c.deps.Projections, k, p.Tenant, id)
	if err != nil {
		return err
	}
	last, err := history.InspectChild(ctx, c.deps.Truth, c.deps.Projections, k, p.Tenant, id)
	if err != nil {
		return err
	}
	p.add(child, last)
	now, err := store.ReadChildren(ctx, c.deps.Truth, p.Tenant, k, []string{id})
	if err != nil {
		return err
	}
	if is, ok := now[id]; ok {
		if !p.Payload {
			is.Body, is.Attributes = "", nil
		}
		p.Child, p.Kind = &is, k.Name
		if k.Moderated && is.AuthorState == event.AuthorActive {
			p.Item = moderationRow{Child: is}.ItemID()
		}
		p.link(fmt.Sprintf("%s of %s %s", k.Plural, k.Parent, is.Parent), "kind", k.Name, "id", is.Parent)
		p.link(kinds.Author+" "+is.AuthorID.String(), "kind", kinds.Author, "id", is.AuthorID)
		if is.ReplyTo != "" {
			p.link("the "+k.Name+" that it replies to", "kind", k.Name, "id", is.ReplyTo)
		}
		for _, e := range c.deps.Kinds.Now().EdgesTo(k.Name) {
			if err := c.countSides(ctx, p, e, k.Name, event.ID(id)); err != nil {
				return err
			}
		}
	}
	return c.versions(ctx, p, func(tx pgx.Tx) error {
		all, err := history.Children(k).Recent(ctx, tx, p.Tenant, versioned.Key{id}, math.MaxInt64, inspectVersions+1)
		p.Versions = childSteps(k, p.Tenant, all, p.Payload && v.query("payload") == "show")
		return err
	})
}

// inspectChildOrThread shows the child with the id, or the thread of the object with the id. Both
// ids may be UUIDs. If neither exists, it says so of a UUID, and shows an empty thread of any other
// id.
func (c *Console) inspectChildOrThread(ctx context.Context, v *view, p inspectPage, k kinds.Child, id event.ID) (inspectPage, error) {
	u, err := uuid.Parse(string(id))
	if err != nil {
		return p, c.inspectThread(ctx, v, &p, k, id)
	}
	child, thread := p, p
	if err := c.inspectChild(ctx, v, &child, k, u.String()); err != nil || !child.Absent {
		return child, err
	}
	err = c.inspectThread(ctx, v, &thread, k, id)
	if len(thread.Rows)+len(thread.Versions) > 0 {
		return thread, err
	}
	return child, err
}

func (c *Console) inspectThread(ctx context.Context, v *view, p *inspectPage, k kinds.Child, object event.ID) error {
	p.Title, p.Thread = fmt.Sprintf("%s of %s %s", k.Plural, k.Parent, object), &inspectThread{k, object}
	if err := c.threadSides(ctx, p, k, object); err != nil {
		return err
	}
	rows, next, err := threadcache.InspectPage(ctx, c.deps.Truth, c.deps.Projections, k, p.Tenant, object, v.query("after"), inspectRows)
	if err != nil {
		return err
	}
	for i := range rows {
		rows[i].Fields = shown(rows[i].Fields, "author_id", "version", "author_state", "moderation_state")
	}
	if p.Rows = rows; next != "" {
		p.Next = v.with("after", next)
	}
	p.link(fmt.Sprintf("%s %s", k.Parent, object), "kind", k.Parent, "id", object)
	if !k.Moderated {
		return nil
	}
	p.Links = append(p.Links, inspectLink{"pending items", address("moderation", "tenant", p.Tenant, "kind", k.Name, "object", object)})
	all, err := c.store.ThreadVersions(ctx, p.Tenant, k, object, math.MaxInt64, inspectVersions+1)
	for _, v := range all {
		p.Versions = append(p.Versions, plainStep(v.Metadata, v.Object.Version, fmt.Sprintf("locked %s, premoderated %s, title %q",
			yes(v.Object.Locked), yes(v.Object.Premoderate), v.Object.Title)))
	}
	if len(p.Versions) > inspectVersions {
		p.Versions, p.More = p.Versions[:inspectVersions], true
	}
	return err
}

// repairInput returns the input of the act that repairs the entity of a Diff.
func repairInput(b projections.Diff) (url.Values, error) {
	key, err := json.Marshal(b.Key)
	if err != nil {
		return nil, err
	}
	return values("projection", b.Projection, "key", string(key)), nil
}

// entityWords describes the entity of a key.
func entityWords(k projections.Key) string {
	switch {
	case k.Child != "":
		return k.Type + " " + k.Child
	case k.Other != "":
		return fmt.Sprintf("%s from %s to %s", k.Type, k.Other, k.Aggregate)
	case k.Kind != "":
		return fmt.Sprintf("%s of %s, of its %ss", k.Type, k.Aggregate, k.Kind)
	}
	return fmt.Sprintf("%s of %s", k.Type, k.Aggregate)
}

// repairTarget reads the entity to repair from a form. A tenant's admin may repair only entities of
// its tenant.
func (c *Console) repairTarget(who tokens.Principal, in url.Values) (p projections.Projection, key projections.Key, err error) {
	if p, err = c.projection(in.Get("projection")); err != nil {
		return nil, key, &inputError{fmt.Sprintf("No projection has the name %.40q.", in.Get("projection"))}
	}
	if err := json.Unmarshal([]byte(in.Get("key")), &key); err != nil || key.TenantID <= 0 || key.Step != "" {
		return nil, key, &inputError{"The form names no entity to repair. Open the page again."}
	}
	set := c.deps.Kinds.Now()
	if !set.Has(cmp.Or(key.Kind, key.Type)) || !who.System() && key.TenantID != who.TenantID {
		return nil, key, errNotFound
	}
	if _, bad := uuid.Parse(key.Child); key.Child != "" && bad != nil {
		return nil, key, &inputError{"The form names an invalid child."}
	}
	return p, key, nil
}

func (c *Console) prepareRepair(_ context.Context, v *view, in url.Values) (subject, error) {
	p, key, err := c.repairTarget(v.who, in)
	if err != nil {
		return subject{}, err
	}
	s := subject{Tenant: key.TenantID, Target: p.Name() + ": " + entityWords(key), Back: root + "inspect", Says: []string{
		"The repair sets the projection to the current state of the truth. It does not change an entity whose aggregate has " +
			"dead letters: retry or discard these first.",
		"A difference may be an event that is not applied yet. Wait a few seconds and reload the page before you repair it."}}
	if _, ok := c.deps.Kinds.Now().Child(cmp.Or(key.Kind, key.Type)); ok && p.Name() == threadcache.Name {
		s.Says = append(s.Says, "The repair rebuilds the whole thread in slices, and the consumer continues between them. Until it ends, "+
			"readers see a large thread incomplete.")
	}
	return s, nil
}

func (c *Console) doRepair(ctx context.Context, d *doing) (string, error) {
	p, key, err := c.repairTarget(d.Who, d.In)
	if err != nil {
		return "", err
	}
	if err := verify.RepairKeys(ctx, verify.Deps{Sources: status.Sources{Truth: c.deps.Truth, Projections: c.deps.Projections,
		Broker: c.deps.Broker}, Fleet: c.deps.Fleet, Kinds: c.deps.Kinds.Now}, p, key); err != nil {
		return "", err
	}
	return "Set to the state in the truth, unless its aggregate has dead letters. Go back to compare again.", nil
}
