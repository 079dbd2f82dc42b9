package console

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/kinds/upstreams"
)

type kindsPage struct {
	Edges     []kindRow
	Children  []kindRow
	Upstreams []upstreams.Upstream // only for operators, like the next
	History   []catalog.Version    // newest first
}

type kindRow struct {
	Name, Plural, From, To, Lists string
	Has                           []string // capabilities
	Attributes                    []string
	Source                        string
}

func (c *Console) kindsData(ctx context.Context, v *view) (any, error) {
	set := c.deps.Kinds.Now()
	stated := set.Without(kinds.Builtin())
	source := func(name string) string {
		switch {
		case !kinds.Builtin().Has(name):
			return "applied"
		case stated.Has(name):
			return "built in, changed"
		}
		return "built in"
	}
	var p kindsPage
	for _, e := range set.AllEdges() {
		row := kindRow{Name: e.Name, Plural: e.Plural, From: e.From, To: e.To, Lists: e.Forward + ", " + e.Reverse,
			Attributes: attributes(e.Attributes), Source: source(e.Name)}
		if e.Self {
			row.Has = append(row.Has, "lead to itself")
		}
		p.Edges = append(p.Edges, row)
	}
	for _, k := range set.AllChildren() {
		row := kindRow{Name: k.Name, Plural: k.Plural, To: k.Parent, Attributes: attributes(k.Attributes), Source: source(k.Name)}
		for _, can := range []struct {
			is   bool
			says string
		}{{k.Threaded, "threaded"}, {k.Moderated, "moderated"}, {k.OnePerAuthor, "one per author"}} {
			if can.is {
				row.Has = append(row.Has, can.says)
			}
		}
		p.Children = append(p.Children, row)
	}
	if !v.who.System() {
		return p, nil
	}
	var err error
	if p.Upstreams, err = declared.List(ctx, c.deps.Truth); err != nil {
		return nil, err
	}
	p.History, err = catalog.History(ctx, c.deps.Truth)
	slices.Reverse(p.History)
	return p, err
}

// applyKinds puts the file of the form in force, or finds what it would change. Errors: *inputError
// if it cannot be done.
func (c *Console) applyKinds(ctx context.Context, file string, r catalog.Request) (done catalog.Applied, err error) {
	if r.Kinds, err = kindfile.Extend(kinds.Builtin(), []byte(file)); err != nil {
		return done, &inputError{"This is not a file of kinds:\n" + err.Error()}
	}
	done, err = catalog.Apply(ctx, catalog.Databases{Truth: c.deps.Truth, Projections: c.deps.Projections}, r)
	var refused *catalog.RefusedError
	if errors.As(err, &refused) {
		return done, &inputError{"The change is refused, and nothing was changed:\n" + err.Error()}
	}
	if err == nil && len(done.Changes) == 0 {
		return done, &inputError{"The file has the kinds in force, so there is nothing to change."}
	}
	return done, err
}

// prepareKinds shows the plan of a file, and before that the file in force.
func (c *Console) prepareKinds(ctx context.Context, v *view, in url.Values) (subject, error) {
	now, err := kindfile.Write(c.deps.Kinds.Now().Without(kinds.Builtin()))
	if err != nil {
		return subject{}, err
	}
	s := subject{Target: "kinds", Back: root + "kinds", Button: "Show the plan", Says: []string{
		"The file replaces the kinds in force, beside the built-in ones. You see the plan before anything changes."},
		Fields: []field{{Name: fieldFile, Label: "File", Kind: "code", Required: true, Value: string(now),
			Hint: "As tidings kinds apply takes it. It begins as the file in force, without the built-in kinds."}}}
	file := in.Get(fieldFile)
	if v.r.Method != http.MethodPost || strings.TrimSpace(file) == "" {
		return s, nil
	}
	plan, err := c.applyKinds(ctx, file, catalog.Request{Actor: v.who.Name, DryRun: true})
	var wrong *inputError
	if errors.As(err, &wrong) {
		s.Wrong = wrong.says
		return s, nil
	}
	if err != nil {
		return s, err
	}
	restricts := 0
	for _, change := range plan.Changes {
		s.Plan = append(s.Plan, change.Path+": "+change.What)
		if change.Kind != "" { // possible only because no row contradicts it
			restricts++
		}
	}
	seen := sha256.Sum256([]byte(file + "\n" + strings.Join(s.Plan, "\n")))
	s.Button, s.Seen = "Apply", hex.EncodeToString(seen[:])
	s.Says = []string{"All processes use the kinds within 5 seconds, without a restart."}
	if restricts > 0 {
		s.Says = append(s.Says, "Some of it removes or restricts kinds, which have no rows: "+
			words.Of(int64(restricts), "change")+".")
		s.Confirm = strconv.Itoa(restricts)
	}
	return s, nil
}

// doKinds puts the file in force.
func (c *Console) doKinds(ctx context.Context, d *doing) (string, error) {
	done, err := c.applyKinds(ctx, d.In.Get(fieldFile), catalog.Request{Actor: d.actor(), Reason: d.Act.Reason})
	if err != nil {
		return "", err
	}
	if _, err := c.deps.Kinds.Refresh(ctx); err != nil { // this process reads them soon anyway
		c.log.WarnContext(ctx, "applied kinds not read", "err", err)
	}
	return fmt.Sprintf("Applied version %d: %s.", done.Version, words.Of(int64(len(done.Changes)), "change")), nil
}

// actKinds puts the kinds of a file in force, which is in the field fieldFile.
const (
	actKinds  = "kinds.apply"
	fieldFile = "file"
)

func attributes(of map[string]kinds.Attribute) (all []string) {
	for name, a := range of {
		all = append(all, strings.TrimSpace(name+" "+a.Type))
	}
	slices.Sort(all)
	return all
}
