package console_test

import (
	"testing"
	"time"

	"github.com/tidings/tidings/internal/tokens"
)

// The admin of a tenant has no role to write and a rate of its own. It makes no token with more,
// also not by replacing one, and what it makes ends with it.
func TestATenantsAdminMakesNoMoreThanItHas(t *testing.T) {
	t.Parallel()
	h := start(t)
	made, err := tokens.Issue(t.Context(), h.pool, tokens.Spec{TenantID: tenant, Name: "boss", Roles: []string{tokens.RoleRead,
		tokens.RoleAdmin}, ReadRate: &tokens.Rate{N: 50, Window: time.Minute}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tokens.Create(t.Context(), h.pool, tenant, "service", []string{tokens.RoleWrite}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	boss, ada := h.signIn(t, made.Token), h.signIn(t, h.Tokens.Admin)
	const create = "/console/act/token.create"
	page(t, boss, create).says("read", "admin", "is revoked with it").without(`value="write"`, `value="export"`)
	boss.act(create, "name", "spy", "roles", tokens.RoleWrite).says("Your token lacks a role of this one").without("tdg_")
	boss.act("/console/act/token.rotate?name=service", "overlap", "0").says("Your token lacks a role of this one").without("tdg_")
	boss.act(create, "name", "child", "roles", tokens.RoleAdmin).says("Made the token")
	works := func() map[string]tokens.Token {
		t.Helper()
		list, err := tokens.List(t.Context(), h.pool, tenant)
		if err != nil {
			t.Fatal(err)
		}
		all := make(map[string]tokens.Token)
		for _, token := range list {
			if token.Works {
				all[token.Name] = token
			}
		}
		return all
	}
	all := works()
	if child := all["child"]; child.ReadRate == nil || child.ReadRate.N != 50 || all["spy"].Name != "" || all["service"].Name == "" {
		t.Errorf("after its acts: %+v", all)
	}
	// An operator gives a tenant's token any role.
	page(t, ada, create).says("A system token shares the limits of yours")
	ada.act(create, "tenant", "7", "name", "importer", "roles", tokens.RoleWrite).says("Made the token")
	ada.act(create, "tenant", "0", "name", "colleague", "roles", tokens.RoleExport).says("Your token lacks a role of this one")
	ada.act("/console/act/token.revoke?tenant=7&name=boss").says("Revoked the token")
	if all := works(); all["child"].Name != "" || all["importer"].Name == "" {
		t.Errorf("after its revocation: %+v", all)
	}
}
