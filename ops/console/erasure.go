package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/audit"
	"github.com/tidings/tidings/ops/erase"
	"github.com/tidings/tidings/ops/erasure"
)

const (
	erasureRows    = 50
	erasureWait    = 10 * time.Minute // for the relay and the consumers
	erasureConnect = 5 * time.Second
	scanFor        = time.Hour // an erasure shows a scan that is at most so old
)

const actScan = "erasure.count"

type erasurePage struct {
	Rows []erasure.Record
	Next string
}

// erasureData lists the erasures, with the number of redacted rows in each store.
func (c *Console) erasureData(ctx context.Context, v *view) (any, error) {
	p := erasurePage{}
	var before *time.Time
	if t, err := v.queryTime("before"); err != nil {
		return nil, err
	} else if !t.IsZero() {
		before = &t
	}
	var err error
	if p.Rows, err = erasure.List(ctx, c.deps.Truth, before, erasureRows+1); err != nil {
		return nil, err
	}
	if len(p.Rows) > erasureRows {
		p.Rows = p.Rows[:erasureRows]
		p.Next = v.with("before", p.Rows[erasureRows-1].RequestedAt.UTC().Format(event.TimeFormat))
	}
	return p, nil
}

// person reads the tenant and the user from a form.
func person(in url.Values) (tenant int64, author event.ID, err error) {
	n, err := event.ParseNumber(strings.TrimSpace(in.Get("tenant")))
	if err == nil {
		author, err = event.ParseID(strings.TrimSpace(in.Get("author")))
	}
	if err != nil {
		err = &inputError{"Name the person by the tenant and the id of the user: " + err.Error() + "."}
	}
	return int64(n), author, err
}

// prepareErase asks for the person and describes the effect.
func (c *Console) prepareErase(says ...string) func(context.Context, *view, url.Values) (subject, error) {
	return func(_ context.Context, _ *view, in url.Values) (subject, error) {
		s := subject{Target: "a person", Back: root + "erasure", Says: says, Fields: []field{
			{Name: "tenant", Label: "Tenant", Kind: "number", Value: in.Get("tenant"), Required: true},
			{Name: "author", Label: "User", Value: in.Get("author"), Required: true}}}
		if in.Get("tenant")+in.Get("author") == "" {
			return s, nil
		}
		tenant, author, err := person(in)
		s.Tenant, s.Target = tenant, fmt.Sprintf("user %s of tenant %d", author, tenant)
		return s, err
	}
}

// prepareErasure shows what a scan found of the person, and asks for the id again. An erasure that
// has begun needs no scan to continue.
func (c *Console) prepareErasure(says ...string) func(context.Context, *view, url.Values) (subject, error) {
	ask := c.prepareErase(says...)
	return func(ctx context.Context, v *view, in url.Values) (subject, error) {
		tenant, author, err := person(in)
		if err != nil {
			return subject{}, err
		}
		s, err := ask(ctx, v, in)
		if err != nil {
			return s, err
		}
		s.Confirm = author.String()
		if begun, err := erasure.Unfinished(ctx, c.deps.Truth, tenant, author); err != nil || begun {
			return s, err
		}
		last, err := audit.Last(ctx, c.deps.Truth, actScan, []string{s.Target})
		if err != nil {
			return s, err
		}
		scan, found := last[s.Target]
		if !found || scan.Failed || time.Since(*scan.Finished) > scanFor {
			return s, &problem{http.StatusConflict, "Scan for this person first",
				"Nobody scanned for " + s.Target + " in the last hour. The result of a scan shows what the erasure removes, " +
					"and leads to it."}
		}
		s.Says = append([]string{"The scan of " + scan.Finished.UTC().Format("15:04:05") + " UTC: " + scan.Outcome}, s.Says...)
		return s, nil
	}
}

// scanned returns the input of the erasure to which a finished scan leads, nil for other acts.
func scanned(a audit.Act) url.Values {
	var author string
	var tenant int64
	if a.Name != actScan || a.Finished == nil || a.Failed {
		return nil
	}
	if _, err := fmt.Sscanf(a.Target, "user %s of tenant %d", &author, &tenant); err != nil {
		return nil
	}
	return values("tenant", tenant, "author", author, fieldBack, root+"erasure")
}

func (c *Console) doErase(dry bool) func(context.Context, *doing) (string, error) {
	return func(ctx context.Context, d *doing) (string, error) {
		tenant, author, err := person(d.In)
		if err != nil {
			return "", err
		}
		r, err := erase.Run(ctx, erase.Deps{Deps: erasure.Deps{Truth: c.deps.Truth, Projections: c.deps.Projections,
			Kinds: c.deps.Kinds.Now(), Fleet: c.deps.Fleet, JetStream: c.deps.JetStream, Broker: c.deps.Broker},
			ProjectionsURL: c.deps.Projections.Config().ConnString(), Postgres: postgres.Config{ConnectTimeout: erasureConnect}},
			erasure.Options{TenantID: tenant, AuthorID: author, Actor: d.actor(), Reason: d.Act.Reason, DryRun: dry,
				Wait: erasureWait, Progress: d.at})
		if errors.Is(err, erasure.ErrUnfinished) {
			return "", &inputError{"The erasure is not finished. Start it again. " + c.unfinished(r)}
		}
		if err != nil {
			return "", err
		}
		if dry {
			return "Nothing was changed. Found: " + c.counts(r.Counts) + ".", nil
		}
		return "A scan of all stores found nothing more. Redacted: " + c.counts(r.Counts) + ".", nil
	}
}

// unfinished describes what an erasure waits for.
func (c *Console) unfinished(r erasure.Report) string {
	var why []string
	if len(r.Waiting) > 0 {
		why = append(why, "It waited for "+strings.Join(r.Waiting, "; ")+".")
	}
	if len(r.Unread) > 0 {
		why = append(why, "These files may contain data of the person: "+strings.Join(r.Unread, "; ")+".")
	}
	if len(why) == 0 {
		why = append(why, "A projection is being replayed.")
	}
	return strings.Join(why, " ")
}

// counts describes the number of rows in each store.
func (c *Console) counts(counts map[string]int) string {
	var all []string
	for _, s := range erasure.Stores(c.deps.Fleet) {
		if n := counts[s]; n > 0 {
			all = append(all, s+" "+words.Count(int64(n)))
		}
	}
	if len(all) == 0 {
		return "nothing"
	}
	return strings.Join(all, ", ")
}
