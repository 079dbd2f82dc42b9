package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
	"github.com/tidings/tidings/store"
)

const (
	shelvingsShown = 20
	exportsShown   = 100
	monthFormat    = "2006-01"
)

type archivePage struct {
	Ranges  []outbox.Range
	Holds   []outbox.ArchiveHold
	All     bool // include released holds
	Exports []coldstore.Export
	More    int // number of older exports that the page omits
	Threads []store.Shelving
	Jobs    []jobs.LastRun
}

// archiveData reads the ranges of the outbox and its archive, holds, exports, shelved threads and
// the last runs of jobs.
func (c *Console) archiveData(ctx context.Context, v *view) (any, error) {
	p := archivePage{All: v.query("all") != ""}
	var err error
	if p.Ranges, _, err = outbox.Ranges(ctx, c.deps.Truth); err != nil {
		return nil, err
	}
	if p.Holds, err = outbox.Holds(ctx, c.deps.Truth, p.All); err != nil {
		return nil, err
	}
	if p.Exports, err = coldstore.New(c.deps.Truth, "", nil, nil, nil).List(ctx); err != nil {
		return nil, err
	}
	if p.More = max(0, len(p.Exports)-exportsShown); p.More > 0 {
		p.Exports = p.Exports[p.More:]
	}
	if p.Threads, err = store.Shelvings(ctx, c.deps.Truth, shelvingsShown); err != nil {
		return nil, err
	}
	p.Jobs, _, err = jobs.LastRuns(ctx, c.deps.Truth)
	return p, err
}

// holdOf reads the hold from a form.
func holdOf(in url.Values) (h outbox.ArchiveHold, err error) {
	if h.TenantID, err = strconv.ParseInt(cmp.Or(in.Get("tenant"), "0"), 10, 64); err != nil || h.TenantID < 0 {
		return h, &inputError{"The tenant is a positive number, or empty for every tenant."}
	}
	for name, to := range map[string]*time.Time{"from": &h.From, "to": &h.To} {
		if s := in.Get(name); s != "" {
			if *to, err = time.Parse(monthFormat, s); err != nil {
				return h, &inputError{"A month is written 2030-01."}
			}
		}
	}
	if !h.From.IsZero() && !h.To.IsZero() && h.To.Before(h.From) {
		return h, &inputError{"The last month is before the first one."}
	}
	return h, nil
}

// holdWords describes the rows that a hold keeps.
func holdWords(h outbox.ArchiveHold) string {
	says := "the archive of every tenant"
	if h.TenantID != 0 {
		says = fmt.Sprintf("the archive of tenant %d", h.TenantID)
	}
	if !h.From.IsZero() {
		says += " from " + h.From.Format(monthFormat)
	}
	if !h.To.IsZero() {
		says += " to " + h.To.Format(monthFormat)
	}
	return says
}

func (c *Console) prepareHoldAdd(_ context.Context, _ *view, in url.Values) (subject, error) {
	h, err := holdOf(in)
	if err != nil {
		return subject{}, err
	}
	s := subject{Target: "hold on " + holdWords(h), Tenant: h.TenantID, Back: root + "archive",
		Says: []string{"The archiver does not drop rows that the hold covers until you release the hold. Rows that it has " +
			"dropped already do not come back."}}
	s.Fields = []field{{Name: "tenant", Label: "Tenant", Hint: "Empty: every tenant", Kind: "number", Value: in.Get("tenant")},
		{Name: "from", Label: "From month", Hint: "2030-01. Empty: from the beginning", Kind: "text", Value: in.Get("from")},
		{Name: "to", Label: "To month", Hint: "This month is included. Empty: without end", Kind: "text", Value: in.Get("to")}}
	return s, nil
}

func (c *Console) doHoldAdd(ctx context.Context, d *doing) (string, error) {
	h, err := holdOf(d.In)
	if err != nil {
		return "", err
	}
	h.CreatedBy, h.Reason = d.actor(), d.Act.Reason
	if h, err = outbox.AddHold(ctx, c.deps.Truth, h); err != nil {
		return "", err
	}
	return fmt.Sprintf("Hold %d keeps %s.", h.ID, holdWords(h)), nil
}

// hold finds the unreleased hold that a form names.
func (c *Console) hold(ctx context.Context, in url.Values) (outbox.ArchiveHold, error) {
	all, err := outbox.Holds(ctx, c.deps.Truth, false)
	if err != nil {
		return outbox.ArchiveHold{}, err
	}
	for _, h := range all {
		if strconv.FormatInt(h.ID, 10) == strings.TrimSpace(in.Get("hold")) {
			return h, nil
		}
	}
	return outbox.ArchiveHold{}, errNotFound
}

func (c *Console) prepareHoldRelease(ctx context.Context, _ *view, in url.Values) (subject, error) {
	h, err := c.hold(ctx, in)
	if err != nil {
		return subject{}, err
	}
	return subject{Target: fmt.Sprintf("hold %d", h.ID), Tenant: h.TenantID, Back: root + "archive",
		Says: []string{"It keeps " + holdWords(h) + ". Its reason: " + h.Reason,
			"The archiver's next run drops rows that are past their time and that no other hold keeps. They do not come back."}}, nil
}

func (c *Console) doHoldRelease(ctx context.Context, d *doing) (string, error) {
	h, err := c.hold(ctx, d.In)
	if err == nil {
		err = outbox.ReleaseHold(ctx, c.deps.Truth, h.ID, d.actor(), d.Act.Reason)
	}
	if errors.Is(err, outbox.ErrNoHold) || errors.Is(err, errNotFound) {
		return "", &inputError{"The hold is released already."}
	}
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("Hold %d is released. The archiver's next run drops what no other hold keeps.", h.ID), nil
}
