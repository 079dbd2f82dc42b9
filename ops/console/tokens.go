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

	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/store"
)

type tokensPage struct {
	Tenant int64 // 0: all
	All    bool  // include former tokens
	Rows   []tokenRow
	Former int
}

type tokenRow struct {
	tokens.Token
	State, Level string // a word, and a badge's class
	Current      bool   // neither replaced nor ended
}

func (c *Console) tokensData(ctx context.Context, v *view) (any, error) {
	tenant, err := v.tenant()
	if err != nil {
		return nil, err
	}
	all, err := tokens.List(ctx, c.deps.Truth, tenant)
	if err != nil {
		return nil, err
	}
	p := tokensPage{Tenant: tenant, All: v.query("all") != ""}
	for _, t := range all {
		row := tokenRow{Token: t, Current: t.Works && t.Replaced == nil}
		row.State, row.Level = tokenState(t, time.Now())
		if !t.Works {
			p.Former++
			if !p.All {
				continue
			}
		}
		p.Rows = append(p.Rows, row)
	}
	return p, nil
}

// tokenState describes the state of a token in a word.
func tokenState(t tokens.Token, now time.Time) (state, level string) {
	const soon = 14 * 24 * time.Hour
	switch {
	case t.Revoked != nil:
		return "revoked", "off"
	case !t.Works:
		return "expired", "off"
	case t.Replaced != nil:
		return "replaced", "warn"
	case t.Expires != nil && t.Expires.Sub(now) < soon:
		return "expires soon", "warn"
	}
	return "works", "ok"
}

// tokenTenant returns the tenant of the form's token. A tenant's admin may name only its own
// tenant.
func tokenTenant(v tokens.Principal, in url.Values) (int64, error) {
	if !v.System() {
		return v.TenantID, nil
	}
	t, err := strconv.ParseInt(cmp.Or(in.Get("tenant"), "0"), 10, 64)
	if err != nil || t < 0 {
		return 0, &inputError{"The tenant is a positive number, or 0 for a system token."}
	}
	return t, nil
}

func tokenTarget(tenant int64, name string) string {
	if tenant == tokens.SystemTenant {
		return fmt.Sprintf("system token %q", name)
	}
	return fmt.Sprintf("token %q of tenant %d", name, tenant)
}

func (c *Console) prepareTokenCreate(_ context.Context, v *view, in url.Values) (subject, error) {
	tenant, err := tokenTenant(v.who, in)
	if err != nil {
		return subject{}, err
	}
	s := subject{Target: tokenTarget(tenant, strings.TrimSpace(in.Get("name"))), Tenant: tenant, Back: root + "tokens",
		Says: []string{"The token is shown once, after you confirm. Only its hash is kept."},
		Fields: []field{
			{Name: "name", Label: "Name", Hint: "The actor of writes that name none", Kind: "text", Required: true},
			{Name: "roles", Label: "Roles", Kind: "checks", Options: grantable(v.who), Value: tokens.RoleRead},
			daysField("365"),
		}}
	if in.Get("name") == "" {
		s.Target = "a new token"
	}
	s.Says = append(s.Says, describeMade(v.who))
	if v.who.System() {
		s.Fields = append([]field{{Name: "tenant", Label: "Tenant",
			Hint: "0 for a system token: it opens the console and sees every tenant", Kind: "number", Value: in.Get("tenant"),
			Required: true}}, s.Fields...)
	}
	return s, nil
}

func (c *Console) doTokenCreate(ctx context.Context, d *doing) (string, error) {
	tenant, err := tokenTenant(d.Who, d.In)
	if err != nil {
		return "", err
	}
	spec := tokens.Spec{TenantID: tenant, Name: strings.TrimSpace(d.In.Get("name")), Roles: d.In["roles"]}
	if spec.Expires, err = expires(d.In); err != nil {
		return "", err
	}
	return c.issue(ctx, d, spec)
}

// daysField is the input of a token's life.
func daysField(days string) field {
	return field{Name: "days", Label: "Expires after days", Hint: "Empty: never", Kind: "number", Value: days}
}

// expires returns the end of a token's life, zero for none.
func expires(in url.Values) (time.Time, error) {
	days := in.Get("days")
	if days == "" {
		return time.Time{}, nil
	}
	n, err := strconv.Atoi(days)
	if err != nil || n < 1 || n > 36_500 {
		return time.Time{}, &inputError{"A token expires after 1 to 36,500 days, or never."}
	}
	return time.Now().AddDate(0, 0, n), nil
}

// describeMade describes a token that a token of the same tenant makes.
func describeMade(who tokens.Principal) string {
	const says = "shares the limits of yours, has no role that yours lacks, ends no later, and is revoked with it."
	if who.System() {
		return "A system token " + says
	}
	return "The token " + says
}

// grantable returns the roles that the form offers: to an operator all, for a tenant's token, and
// to a tenant's admin those of its own token.
func grantable(who tokens.Principal) []string {
	if who.System() {
		return tokens.Roles()
	}
	return slices.DeleteFunc(tokens.Roles(), func(role string) bool { return !who.Has(role) })
}

func (c *Console) issue(ctx context.Context, d *doing, spec tokens.Spec) (string, error) {
	if spec.TenantID == d.Who.TenantID {
		spec.Maker = &d.owner
	}
	made, err := tokens.Issue(ctx, c.deps.Truth, spec)
	switch {
	case errors.Is(err, tokens.ErrNotHeld):
		return "", &inputError{"Your token lacks a role of this one, so it cannot make it. An operator can: tidings token create."}
	case errors.Is(err, tokens.ErrUnauthenticated):
		return "", &inputError{"Your token has ended, so it makes no other."}
	case errors.Is(err, tokens.ErrExists):
		return "", &inputError{"There is a token of this name already. Rotate it, or choose another name."}
	case errors.Is(err, tokens.ErrUnknown):
		return "", &inputError{"There is no current token of this name. Create one."}
	case errors.Is(err, store.ErrInvalid):
		return "", &inputError{"A token needs a name of printable text and a role that exists."}
	case err != nil:
		return "", err
	}
	d.showOnce(made.Token)
	says := fmt.Sprintf("Made the %s with the fingerprint %s and the roles %s.", tokenTarget(spec.TenantID, spec.Name),
		tokens.Fingerprint(made.Token), strings.Join(made.Roles, ", "))
	if made.Replaced != nil {
		says += " The token before it works until " + made.Replaced.UTC().Format(time.RFC3339) + "."
	}
	return says, nil
}

// prepareToken finds the current token that a form names.
func (c *Console) prepareToken(ctx context.Context, v *view, in url.Values) (s subject, t tokens.Token, err error) {
	tenant, err := tokenTenant(v.who, in)
	if err != nil {
		return s, t, err
	}
	all, err := tokens.List(ctx, c.deps.Truth, tenant)
	if err != nil {
		return s, t, err
	}
	name, found := in.Get("name"), false
	for _, one := range all {
		if one.TenantID == tenant && one.Name == name && one.Works && (!found || one.Replaced == nil) {
			t, found = one, true
		}
	}
	if !found {
		return s, t, errNotFound
	}
	return subject{Target: tokenTarget(tenant, name), Tenant: tenant, Back: root + "tokens"}, t, nil
}

func (c *Console) prepareTokenRotate(ctx context.Context, v *view, in url.Values) (subject, error) {
	s, t, err := c.prepareToken(ctx, v, in)
	days := "" // the new token lives as long as this one
	if t.Expires != nil {
		days = strconv.Itoa(max(1, int(math.Ceil(t.Expires.Sub(t.Created).Hours()/24))))
	}
	s.Says = []string{"A new token with the same roles takes the name. It is shown once, after you confirm.",
		"The current token continues to work for the time below. Give the service the new one meanwhile."}
	if s.Tenant == v.who.TenantID {
		s.Says = append(s.Says, describeMade(v.who))
	}
	s.Fields = []field{{Name: "overlap", Label: "Hours for which the current token continues to work", Kind: "number",
		Value: "24", Required: true}, daysField(days)}
	return s, err
}

func (c *Console) doTokenRotate(ctx context.Context, d *doing) (string, error) {
	tenant, err := tokenTenant(d.Who, d.In)
	if err != nil {
		return "", err
	}
	hours, err := strconv.Atoi(d.In.Get("overlap"))
	if err != nil || hours < 0 || hours > 24*90 {
		return "", &inputError{"The current token continues to work for 0 to 2,160 hours."}
	}
	ends, err := expires(d.In)
	if err != nil {
		return "", err
	}
	return c.issue(ctx, d, tokens.Spec{TenantID: tenant, Name: d.In.Get("name"), Replace: true, Expires: ends,
		Overlap: time.Duration(hours) * time.Hour})
}

func (c *Console) prepareTokenRevoke(ctx context.Context, v *view, in url.Values) (subject, error) {
	s, _, err := c.prepareToken(ctx, v, in)
	s.Says = []string{"Every token of this name ends, including those that it replaced, and every token that one of them made. After " +
		"one second no process accepts them.",
		"This cannot be undone. Sessions of the console that began with one of them end as well."}
	return s, err
}

func (c *Console) doTokenRevoke(ctx context.Context, d *doing) (string, error) {
	tenant, err := tokenTenant(d.Who, d.In)
	if err != nil {
		return "", err
	}
	n, _, err := tokens.Revoke(ctx, c.deps.Truth, tenant, d.In.Get("name"))
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("Revoked the %s: %d ended.", tokenTarget(tenant, d.In.Get("name")), n), nil
}
