package demo

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/tidings/tidings/client"
)

// act is one request.
type act struct {
	did  string // the name under which a write is counted; empty for a read
	says string // the same as a sentence
	do   func(ctx context.Context) error
}

// choice is a kind of act. pick returns false if there is no object for it.
type choice struct {
	weight int
	pick   func() (act, bool)
}

// settle sets up the choices, and opens the first threads. The caller holds the lock.
func (s *Site) settle(edges []edgeKind, children []childKind) {
	s.edges, s.children = edges, children
	discussed := make(map[string]bool) // objects that have threads
	for _, k := range children {
		discussed[k.Parent] = discussed[k.Parent] || k.Moderated
	}
	s.choices = []choice{{25, s.readPage}}
	for _, k := range edges {
		weight := 4
		if k.To == user || discussed[k.To] || s.isChild(k.To) {
			weight = 14
		}
		s.choices = append(s.choices, choice{weight, func() (act, bool) { return s.put(k) }},
			choice{1 + weight/7, func() (act, bool) { return s.remove(k) }})
	}
	for _, k := range children {
		weight := 5
		if k.Moderated {
			weight = 22
			s.threads[k.Name] = make(map[client.ID]client.ChildSettings)
			s.choices = append(s.choices, choice{2, func() (act, bool) { return s.begin(k), true }},
				choice{4, func() (act, bool) { return s.queue(k), true }},
				choice{1, func() (act, bool) { return s.toggle(k) }}, choice{1, func() (act, bool) { return s.censor(k) }})
			for range firstThreads {
				s.due = append(s.due, s.begin(k))
			}
		}
		s.choices = append(s.choices, choice{weight, func() (act, bool) { return s.write(k), true }},
			choice{1 + weight/8, func() (act, bool) { return s.edit(k) }}, choice{1, func() (act, bool) { return s.withdraw(k) }})
	}
}

// next returns the next act. The caller holds the lock.
func (s *Site) next() act {
	if len(s.due) > 0 {
		a := s.due[0]
		s.due = s.due[1:]
		return a
	}
	total := 0
	for _, c := range s.choices {
		total += c.weight
	}
	for {
		n := s.rnd.IntN(total)
		for _, c := range s.choices {
			if n -= c.weight; n >= 0 {
				continue
			}
			if a, ok := c.pick(); ok {
				return a
			}
			break
		}
	}
}

func actor(id client.ID) client.Option { return client.Actor("user:" + id.String()) }

// change runs fn under the lock.
func (s *Site) change(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn()
}

// put creates an edge, or changes its attributes.
func (s *Site) put(k edgeKind) (act, bool) {
	to, ok := s.end(k.To)
	if !ok {
		return act{}, false
	}
	p := pair{s.target(k.From), to}
	if k.From == user {
		p.from = s.author()
	}
	if k.From == k.To && p.from == p.to {
		p.to = s.opener(p.to)
	}
	attributes := k.attributes.Generate(s.rnd)
	return act{k.Name, fmt.Sprintf("%s %s: %s of %s %s", k.From, p.from, k.Name, k.To, p.to), func(ctx context.Context) (err error) {
		if edges := s.client.Edges(k.Name); attributes == nil {
			_, err = edges.Put(ctx, p.from, p.to, actor(p.from))
		} else {
			_, err = edges.PutWith(ctx, p.from, p.to, attributes, actor(p.from))
		}
		if err == nil {
			s.change(func() { s.link(k.Name, p) })
		}
		return err
	}}, true
}

// remove deletes an edge.
func (s *Site) remove(k edgeKind) (act, bool) {
	p, ok := s.unlink(k.Name)
	return act{k.Name + " undone", fmt.Sprintf("%s %s removes the %s of %s %s", k.From, p.from, k.Name, k.To, p.to),
		func(ctx context.Context) error {
			return s.client.Edges(k.Name).Remove(ctx, p.from, p.to, actor(p.from))
		}}, ok
}

// write creates a child. If its text breaks the rule about links, the next act hides it.
func (s *Site) write(k childKind) act {
	object, author, text := s.open(k), s.author(), body(s.rnd)
	lured := k.Moderated && s.rnd.Float64() < lureShare
	if lured {
		text = lure(s.rnd)
	}
	n := client.NewChild{AuthorID: author, Body: text, ParentID: s.answered(k, object), Attributes: k.attributes.Generate(s.rnd)}
	return act{k.Name, fmt.Sprintf("user %s: %s on %s %s: %s", author, k.Name, k.Parent, object, short(text)),
		func(ctx context.Context) error {
			c, err := s.client.Children(k.Name).Create(ctx, object, n, actor(author))
			if err != nil {
				return err
			}
			s.change(func() {
				if lured {
					s.due = append(s.due, s.decide(k, c, client.Moderation{State: "HIDDEN",
						Reason: "rule links: a link in a text by a stranger"}, ruleActor))
					return
				}
				s.keep(k.Name, c)
			})
			return nil
		}}
}

// edit changes the text of a child, or its attributes.
func (s *Site) edit(k childKind) (act, bool) {
	c, ok := s.take(k.Name)
	with := client.ChildEdit{Body: c.Body + "\n\n" + one(s.rnd, edits), Attributes: k.attributes.Generate(s.rnd)}
	return act{k.Name + " edited", fmt.Sprintf("user %s edits a %s", c.AuthorID, k.Name), func(ctx context.Context) error {
		now, err := s.client.Children(k.Name).Edit(ctx, c, with, actor(c.AuthorID))
		if err == nil {
			s.change(func() { s.keep(k.Name, now) })
		}
		return err
	}}, ok && len(with.Body) < 4000
}

// withdraw has an author delete a child.
func (s *Site) withdraw(k childKind) (act, bool) {
	c, ok := s.take(k.Name)
	return act{k.Name + " withdrawn", fmt.Sprintf("user %s deletes a %s", c.AuthorID, k.Name), func(ctx context.Context) error {
		return s.client.Children(k.Name).Delete(ctx, c, actor(c.AuthorID))
	}}, ok
}

// decide records the decision of a moderator or a rule about a child.
func (s *Site) decide(k childKind, c client.Child, m client.Moderation, by string) act {
	did := strings.ToLower(m.State)
	return act{k.Name + " " + did, fmt.Sprintf("%s: %s %s: %s", by, k.Name, did, short(c.Body)), func(ctx context.Context) error {
		now, err := s.client.Children(k.Name).Moderate(ctx, c, m, client.Actor(by))
		if err == nil && now.State == visible {
			s.change(func() { s.keep(k.Name, now) })
		}
		return err
	}}
}

// censor has a moderator hide or remove a visible child.
func (s *Site) censor(k childKind) (act, bool) {
	c, ok := s.take(k.Name)
	m := client.Moderation{State: "HIDDEN", Reason: one(s.rnd, whyHidden)}
	if s.rnd.Float64() < 0.3 {
		m = client.Moderation{State: "REMOVED", Reason: one(s.rnd, whyRemoved)}
	}
	return s.decide(k, c, m, one(s.rnd, moderators)), ok
}

// queue has a moderator read the queue and decide on the oldest child. Some children remain in the
// queue, for the console to show.
func (s *Site) queue(k childKind) act {
	by, u := one(s.rnd, moderators), s.rnd.Float64()
	m := client.Moderation{State: "APPROVED"}
	switch {
	case u < 0.1:
		m = client.Moderation{State: "REMOVED", Reason: one(s.rnd, whyRemoved)}
	case u < 0.3:
		m = client.Moderation{State: "HIDDEN", Reason: one(s.rnd, whyHidden)}
	}
	return act{do: func(ctx context.Context) error {
		page, err := s.client.Children(k.Name).Pending(client.PageSize(queueKept + 1)).First(ctx)
		if err == nil && len(page.Items) > queueKept {
			s.change(func() { s.due = append(s.due, s.decide(k, page.Items[0], m, by)) })
		}
		return err
	}}
}

// begin opens a thread with a title. Some threads are premoderated. A thread that an earlier run
// opened keeps its settings.
func (s *Site) begin(k childKind) act {
	s.newest[k.Parent]++
	n := s.newest[k.Parent]
	object := s.id(k.Parent, n)
	set := client.NewSettings{Title: title(s.rnd), Premoderated: n%6 == premoderated}
	return act{k.Name + " thread opened", fmt.Sprintf("%s %s: %s", k.Parent, object, short(set.Title)), func(ctx context.Context) error {
		now, err := s.client.Children(k.Name).PutSettings(ctx, client.ChildSettings{Object: object}, set, actor(s.opener(object)))
		if p, is := errors.AsType[*client.Problem](err); is && p.Status == http.StatusPreconditionFailed {
			now, err = s.client.Children(k.Name).Settings(ctx, object)
		}
		if err == nil {
			s.change(func() { s.threads[k.Name][object] = now })
		}
		return err
	}}
}

// opener returns the user who opened the thread.
func (s *Site) opener(object client.ID) client.ID {
	n, _ := strconv.ParseInt(string(object[strings.LastIndexByte(string(object), '-')+1:]), 10, 64) // see load.ID
	return s.id(user, n%int64(s.users)+1)
}

// toggle has a moderator lock or unlock a thread. At most a quarter of the threads is locked.
func (s *Site) toggle(k childKind) (act, bool) {
	all := s.threads[k.Name]
	was, ok := all[s.id(k.Parent, 1+s.rnd.Int64N(max(s.newest[k.Parent], 1)))]
	locked := 0
	for _, t := range all {
		if t.Locked {
			locked++
		}
	}
	if !ok || !was.Locked && 4*(locked+1) > len(all) {
		return act{}, false
	}
	set := client.NewSettings{Title: was.Title, Premoderated: was.Premoderated, Locked: !was.Locked}
	did := "locked"
	if was.Locked {
		did = "unlocked"
	}
	by := one(s.rnd, moderators)
	return act{k.Name + " thread " + did, fmt.Sprintf("%s: %s %s is %s", by, k.Parent, was.Object, did), func(ctx context.Context) error {
		now, err := s.client.Children(k.Name).PutSettings(ctx, was, set, client.Actor(by))
		if err == nil {
			s.change(func() { all[was.Object] = now })
		}
		return err
	}}, true
}

// readPage reads one page.
func (s *Site) readPage() (act, bool) {
	if len(s.edges) == 0 || len(s.children) == 0 {
		return act{}, false
	}
	e, c := s.edges[s.rnd.IntN(len(s.edges))], s.children[s.rnd.IntN(len(s.children))]
	to, ok := s.end(e.To)
	if !ok {
		return act{}, false
	}
	from, object := s.target(e.From), s.target(c.Parent)
	counted, id := e.To, to
	if s.isChild(e.To) {
		counted, id = e.From, from
	}
	order := "newest"
	if c.Threaded {
		order = "threaded"
	}
	return act{do: []func(context.Context) error{
		func(ctx context.Context) error { _, err := s.client.Edges(e.Name).Forward(from).First(ctx); return err },
		func(ctx context.Context) error { _, err := s.client.Edges(e.Name).Reverse(to).First(ctx); return err },
		func(ctx context.Context) error { _, err := s.client.Objects(counted).Counts(ctx, id); return err },
		func(ctx context.Context) error {
			_, err := s.client.Children(c.Name).List(object, client.Order(order)).First(ctx)
			return err
		},
		func(ctx context.Context) error { _, err := s.client.Children(c.Name).Summary(ctx, object); return err },
	}[s.rnd.IntN(5)]}, true
}
