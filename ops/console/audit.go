package console

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/tidings/tidings/ops/audit"
)

const auditRows = 50

type auditPage struct {
	Rows []audit.Act
	Next string // URL; empty: the last page
	Acts []string
	Any  bool // a filter is set
}

func (c *Console) auditFilter(v *view) (f audit.Filter, err error) {
	tenant, err := v.tenant()
	if err != nil {
		return f, err
	}
	if tenant != 0 || !v.who.System() {
		f.Tenant = &tenant
	}
	f.Name, f.TokenName, f.Text = v.query("act"), v.query("who"), v.query("q")
	if f.From, err = v.queryTime("from"); err != nil {
		return f, err
	}
	if f.Until, err = v.queryTime("until"); err != nil {
		return f, err
	}
	f.Before, err = v.queryInt("before")
	return f, err
}

// queryTime returns a parameter as a time in UTC, in the format of a form or RFC 3339. It is zero
// if absent. Errors: *inputError.
func (v *view) queryTime(name string) (time.Time, error) { return parseMoment(name, v.query(name)) }

// parseMoment parses a time for queryTime.
func parseMoment(name, s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02T15:04", time.DateOnly} {
		if t, err := time.Parse(layout, s); err == nil {
			return t, nil
		}
	}
	return time.Time{}, &inputError{name + " is not a time: want 2030-01-31 or 2030-01-31T12:00, in UTC."}
}

func (c *Console) auditData(ctx context.Context, v *view) (any, error) {
	f, err := c.auditFilter(v)
	if err != nil {
		return nil, err
	}
	p := auditPage{Any: f.Name+f.TokenName+f.Text != "" || !f.From.IsZero() || !f.Until.IsZero() || f.Before > 0}
	for _, a := range c.allActs() {
		p.Acts = append(p.Acts, a.name)
	}
	if p.Rows, err = audit.List(ctx, c.deps.Truth, f, auditRows+1); err != nil {
		return nil, err
	}
	if len(p.Rows) > auditRows {
		p.Rows = p.Rows[:auditRows]
		p.Next = v.with("before", p.Rows[auditRows-1].ID)
	}
	return p, nil
}

// auditLine is one line of the export.
type auditLine struct {
	ActID       string     `json:"act_id"`
	Started     time.Time  `json:"started"`
	Finished    *time.Time `json:"finished"`
	TenantID    string     `json:"tenant_id"`
	TokenTenant string     `json:"token_tenant_id"`
	TokenName   string     `json:"token_name"`
	Fingerprint string     `json:"token_fingerprint"`
	Act         string     `json:"act"`
	Target      string     `json:"target"`
	Reason      string     `json:"reason"`
	Outcome     string     `json:"outcome"`
	Failed      bool       `json:"failed"`
}

// exportAudit sends the acts that match the filter, as one JSON object per line.
func (c *Console) exportAudit(v *view) error {
	f, err := c.auditFilter(v)
	if err != nil {
		return err
	}
	v.w.Header().Set("Content-Type", "application/x-ndjson")
	v.w.Header().Set("Content-Disposition", `attachment; filename="tidings-audit.ndjson"`)
	ctl, enc := http.NewResponseController(v.w), json.NewEncoder(v.w)
	n := 0
	err = audit.Export(v.r.Context(), c.deps.Truth, f, func(a audit.Act) error {
		if n++; n%1000 == 1 {
			_ = ctl.SetWriteDeadline(time.Now().Add(time.Minute)) // the writer of tests has no deadline
		}
		var finished *time.Time
		if a.Finished != nil {
			t := a.Finished.UTC()
			finished = &t
		}
		return enc.Encode(auditLine{a.ActID.String(), a.Started.UTC(), finished, strconv.FormatInt(a.TenantID, 10),
			strconv.FormatInt(a.TokenTenant, 10), a.TokenName, a.Fingerprint, a.Name, a.Target, a.Reason, a.Outcome, a.Failed})
	})
	if err != nil && n > 0 {
		panic(http.ErrAbortHandler) // a cut connection tells the reader that lines are missing
	}
	return err
}
