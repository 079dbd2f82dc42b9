package console

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
)

const (
	actDecideAll = "moderation.decide_all"
	actUndo      = "moderation.undo"
)

// decided is what an act of actDecideAll did, as its record has it.
type decided struct {
	act     audit.Act
	kind    kinds.Child
	from    string // the moderation state before
	back    int    // the index in decisions that gives it again
	to      string // the moderation state after
	changed int64  // children; -1: the record does not know
}

// changedWords matches the outcome of a decision that has ended.
var changedWords = regexp.MustCompile(`^(?:Approved|Hid|Removed|Held) ([0-9,]+) `)

// decidedBy reads the record of a decision on all. ok is false for another act, and for one that
// has not ended.
func (c *Console) decidedBy(a audit.Act) (d decided, ok bool) {
	w := strings.Fields(a.Target) // "remove all pending comments of author 1"
	if a.Name != actDecideAll || a.Finished == nil || len(w) < 4 {
		return d, false
	}
	d = decided{act: a, from: lists[w[2]], back: -1, changed: -1}
	for i, one := range decisions {
		if one.Name == w[0] {
			d.to = one.state
		}
		if one.state == d.from {
			d.back = i
		}
	}
	for _, k := range c.deps.Kinds.Now().AllChildren() {
		if k.Moderated && k.Plural == w[3] {
			d.kind, ok = k, true
		}
	}
	if m := changedWords.FindStringSubmatch(a.Outcome); m != nil {
		d.changed, _ = strconv.ParseInt(strings.ReplaceAll(m[1], ",", ""), 10, 64) // no error: digits
	}
	return d, ok && d.back >= 0 && d.to != "" && d.changed != 0
}

// undoable returns the input of the act that undoes this one, nil if none does.
func (c *Console) undoable(a audit.Act) url.Values {
	if _, ok := c.decidedBy(a); !ok {
		return nil
	}
	return values("act", a.ActID)
}

// toUndo returns the decision on all that a form names. A tenant's token may name only acts of its
// tenant.
func (c *Console) toUndo(ctx context.Context, who tokens.Principal, in url.Values) (decided, error) {
	id, err := uuid.Parse(in.Get("act"))
	if err != nil {
		return decided{}, &inputError{"The form names no act."}
	}
	a, err := audit.Get(ctx, c.deps.Truth, id)
	if errors.Is(err, audit.ErrNotFound) || err == nil && !who.System() && a.TenantID != who.TenantID {
		return decided{}, errNotFound
	}
	if err != nil {
		return decided{}, err
	}
	d, ok := c.decidedBy(a)
	if !ok {
		return d, &inputError{"This act decided on nothing, or has not ended."}
	}
	return d, nil
}

func (c *Console) prepareUndo(ctx context.Context, v *view, in url.Values) (subject, error) {
	d, err := c.toUndo(ctx, v.who, in)
	if err != nil {
		return subject{}, err
	}
	return subject{Target: fmt.Sprintf("%s (act %s)", d.act.Target, d.act.ActID), Tenant: d.act.TenantID,
		Back: root + "acts/" + d.act.ActID.String(), Says: []string{d.act.Outcome,
			fmt.Sprintf("The undo makes them %s again, unless somebody changed them since.", strings.ToLower(d.from)),
			"It finds them in the histories, which the archiver writes a moment after the decision."}}, reasonFits(in)
}

// doUndo reads the decisions of the act from the histories, newest first, and sets each child back
// if it still has the version that the act gave it. The record of the act names no children, so an
// interrupted act is undone as far as it came. The name, the reason and the time tell its decisions
// from others.
func (c *Console) doUndo(ctx context.Context, d *doing) (string, error) {
	of, err := c.toUndo(ctx, d.Who, d.In)
	if err != nil {
		return "", err
	}
	t := tally{done: decisions[of.back].done, since: "that act", kind: of.kind}
	for before := int64(math.MaxInt64); before != 0 && (of.changed < 0 || t.looked < of.changed); {
		var found []history.Decision
		err := postgres.InTenant(ctx, c.deps.Projections, of.act.TenantID, pgx.TxOptions{AccessMode: pgx.ReadOnly},
			func(tx pgx.Tx) (err error) {
				found, before, err = history.Decisions(ctx, tx, of.kind, of.act.TenantID, before, decideSlice)
				return err
			})
		if err != nil {
			return "", fmt.Errorf("%s Then: %w", t.says(), err)
		}
		var items []store.ChildModeration
		for _, one := range found {
			if of.made(one) {
				items = append(items, store.ChildModeration{ID: one.Child.ID, IfVersion: one.Child.Version})
			}
		}
		if len(items) > 0 {
			if err := c.moderate(ctx, d, of.kind, of.back, items, &t); err != nil {
				return "", fmt.Errorf("%s Then: %w", t.says(), err)
			}
		}
		d.progress(t.looked, max(of.changed, 0))
	}
	says := t.says()
	if lacks := of.changed - t.looked; lacks > 0 {
		says += fmt.Sprintf(" %s: the archiver has not recorded the decision yet. Undo again in a moment.",
			words.Of(lacks, of.kind.Name))
		if t.looked == 0 {
			return "", &inputError{says}
		}
	}
	return says, nil
}

// made reports whether the act made the decision.
func (d *decided) made(one history.Decision) bool {
	return one.By == d.act.TokenName && one.Child.Reason == d.act.Reason && one.Was == d.from && one.Child.ModerationState == d.to &&
		!one.At.Before(d.act.Started) && !one.At.After(*d.act.Finished)
}
