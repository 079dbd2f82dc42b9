package api_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

func openLimited(t *testing.T, read, write, author int64) fixture {
	t.Helper()
	db := testkit.Postgres(t)
	f := fixture{system: db.Pool(t, postgres.RoleSystem), reg: prometheus.NewRegistry()}
	pool := db.Pool(t, postgres.RoleAPI)
	cfg := config()
	for rate, n := range map[*tokens.Rate]int64{&cfg.RateRead: read, &cfg.RateWrite: write, &cfg.RateAuthor: author} {
		*rate = tokens.Rate{N: n, Window: time.Hour}
	}
	var err error
	f.Handler, err = api.New(cfg, api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool,
		Fleet: fleet, Log: testkit.Logger(t), Reg: f.reg})
	if err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "tester", tokens.Roles()...)
	return f
}

// limits returns the rate limits in an answer's headers, without the seconds to the end of the
// window.
func (a answer) limits() string {
	return regexp.MustCompile(`;t=3(600|5\d\d)`).ReplaceAllString(strings.Join(a.Header["Ratelimit-Policy"], ",")+" "+
		strings.Join(a.Header["Ratelimit"], ","), ";t")
}

func (f fixture) refused(t *testing.T) map[string]float64 {
	return f.counts(t, "tidings_api_rate_limited_requests_total")
}

// shed returns tidings_api_shed_requests_total of a reason.
func (f fixture) shed(t *testing.T, reason string) float64 {
	return f.counts(t, "tidings_api_shed_requests_total")[reason]
}

// counts returns a counter with one label by the label's values.
func (f fixture) counts(t *testing.T, name string) map[string]float64 {
	t.Helper()
	families, err := f.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counts := make(map[string]float64)
	for _, family := range families {
		for _, m := range family.Metric {
			if family.GetName() == name {
				counts[m.Label[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	return counts
}

func TestATokensReadsAndWritesAreLimitedApart(t *testing.T) {
	t.Parallel()
	f := openLimited(t, 4, 3, 1000)
	const path = "/v1/follows/7/42"
	limited := func(what string, a answer) {
		t.Helper()
		if seconds := a.Header.Get("Retry-After"); a.StatusCode != 429 || a.text("code") != "rate-limited" ||
			a.Header.Get("Content-Type") != "application/problem+json" ||
			!regexp.MustCompile(`^3(600|5\d\d)$`).MatchString(seconds) || !strings.HasSuffix(a.Header.Get("RateLimit"), ";r=0;t="+seconds) {
			t.Errorf("%s: %d %s %v, want 429", what, a.StatusCode, a.body, a.Header)
		}
	}
	// Every answer has the limits, and every request counts.
	f.want(t, 201, "PUT", path, "")
	for i, c := range []struct {
		status int
		path   string
		header string
	}{{200, path, "X-Nothing"}, {304, path, `If-None-Match: "1"`}, {404, "/v1/follows/7/43", "X-Nothing"},
		{422, "/v1/follows/a,b/43", "X-Nothing"}} {
		a := f.do(t, "GET", c.path, "", c.header)
		if want := fmt.Sprintf(`"read";q=4;w=3600 "read";r=%d;t`, 3-i); a.StatusCode != c.status || a.limits() != want {
			t.Errorf("%s: %d %s, want %d %s", c.path, a.StatusCode, a.limits(), c.status, want)
		}
	}
	limited("a read too many", f.do(t, "GET", path, ""))
	limited("a read by POST", f.do(t, "POST", "/v1/users:counts", `{"ids":["1"]}`))
	if a := f.do(t, "GET", path, "", "Authorization: Bearer x"); a.StatusCode != 401 || a.limits() != " " {
		t.Errorf("nobody's: %d %s", a.StatusCode, a.limits())
	}

	comment := f.want(t, 201, "POST", "/v1/posts/5/comments", `{"author_id":"3","body":"x"}`, "Idempotency-Key: k")
	if want := `"write";q=3;w=3600,"author";q=1000;w=3600 "write";r=1;t,"author";r=999;t`; comment.limits() != want {
		t.Errorf("a create: %s, want %s", comment.limits(), want)
	}
	f.want(t, 201, "POST", "/v1/posts/5/comments", `{"author_id":"3","body":"x"}`, "Idempotency-Key: k") // a replay counts too
	before := f.rows(t)
	for _, c := range [][3]string{
		{"POST", "/v1/posts/5/comments", `{"author_id":"3","body":"y"}`}, {"PUT", "/v1/follows/7/44", ""}, {"DELETE", path, ""},
		{"DELETE", "/v1/comments/" + comment.text("comment_id"), ""},
		{"PUT", "/v1/posts/5/thread", `{"locked":true}`}, {"POST", "/v1/outbox/dlq/1:retry", ""}, {"POST", "/v1/posts/5/comments", `{`},
	} {
		limited(c[0]+" "+c[1], f.do(t, c[0], c[1], c[2], "If-Match: *"))
	}
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("a refused write wrote (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]float64{"read": 2, "write": 7, "author": 0, "unknown": 0}, f.refused(t)); diff != "" {
		t.Errorf("tidings_api_rate_limited_requests_total (-want +got):\n%s", diff)
	}

	// Another token has limits of its own, and so has another tenant's token of the same name. A
	// token may also have other limits.
	others := f
	for _, spec := range []tokens.Spec{
		{TenantID: tenant, Name: "another"}, {TenantID: 2, Name: "tester"},
		{TenantID: tenant, Name: "more", ReadRate: &tokens.Rate{N: 9, Window: time.Minute}},
		{TenantID: tenant, Name: "unlimited", ReadRate: &tokens.Rate{}},
	} {
		spec.Roles = tokens.Roles()
		made, err := tokens.Issue(t.Context(), f.system, spec)
		if err != nil {
			t.Fatal(err)
		}
		others.token = made.Token
		want := map[string]string{"more": `"read";q=9;w=60 "read";r=8;t=60`, "unlimited": " "}[spec.Name]
		if want == "" {
			want = `"read";q=4;w=3600 "read";r=3;t`
		}
		if a := others.want(t, 404, "GET", "/v1/follows/1/2", ""); a.limits() != want {
			t.Errorf("%s of tenant %d: %s, want %s", spec.Name, spec.TenantID, a.limits(), want)
		}
	}
}

func TestWhatOneUserMakesIsLimited(t *testing.T) {
	t.Parallel()
	f := openLimited(t, 1000, 1000, 2)
	create := func(f fixture, status int, author int) {
		t.Helper()
		f.want(t, status, "POST", "/v1/posts/5/comments", fmt.Sprintf(`{"author_id":"%d","body":"x"}`, author))
	}
	create(f, 201, 3)
	f.want(t, 201, "PUT", "/v1/follows/3/42", "")
	before := f.rows(t)
	create(f, 429, 3)
	if a := f.want(t, 429, "PUT", "/v1/follows/3/43", ""); a.text("code") != "rate-limited" || a.Header.Get("Retry-After") == "" ||
		a.Header.Get("Tidings-Token") != "" {
		t.Errorf("%s %v", a.body, a.Header)
	}
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("a refused write wrote (-before +after):\n%s", diff)
	}
	f.want(t, 204, "DELETE", "/v1/follows/3/42", "") // a removal creates nothing
	f.want(t, 201, "PUT", "/v1/follows/42/3", "")
	create(f, 201, 4)
	other := f
	other.token = f.newToken(t, 2, "tester", tokens.Roles()...)
	create(other, 201, 3)
	// The limit of a user counts writes with any token, except with an importer's, whose own writes
	// have no limit.
	other.token = f.newToken(t, tenant, "another", tokens.Roles()...)
	create(other, 429, 3)
	made, err := tokens.Issue(t.Context(), f.system, tokens.Spec{TenantID: tenant, Name: "importer", Roles: tokens.Roles(),
		WriteRate: &tokens.Rate{}})
	if err != nil {
		t.Fatal(err)
	}
	other.token = made.Token
	create(other, 201, 3)
	if diff := cmp.Diff(map[string]float64{"read": 0, "write": 0, "author": 3, "unknown": 0}, f.refused(t)); diff != "" {
		t.Errorf("tidings_api_rate_limited_requests_total (-want +got):\n%s", diff)
	}
}

func TestABatchCountsItsOperations(t *testing.T) {
	t.Parallel()
	f := openLimited(t, 1000, 5, 2)
	follow := func(n int) string {
		return `{"operations":[` + strings.TrimSuffix(strings.Repeat(`{"op":"put","follower_id":"3","followee_id":"1"},`, n), ",") + `]}`
	}
	// A batch larger than a window is always refused, and counts as one request.
	before := f.rows(t)
	for _, n := range []int{6, 1000} {
		if a := f.want(t, 413, "POST", "/v1/follows:batch", follow(n)); a.text("code") != "too-many-operations" ||
			!strings.Contains(a.text("detail"), "5 times in 1h") || a.Header.Get("Retry-After") != "" {
			t.Errorf("%d operations: %s %v", n, a.body, a.Header)
		}
	}
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("a refused batch wrote (-before +after):\n%s", diff)
	}
	a := f.want(t, 200, "POST", "/v1/follows:batch",
		`{"operations":[{"op":"put","follower_id":"3","followee_id":"1"},{"op":"put","follower_id":"3","followee_id":"2"},
		{"op":"put","follower_id":"3","followee_id":"4"},{"op":"remove","follower_id":"3","followee_id":"1"},
		{"op":"put","follower_id":"4","followee_id":"3"}]}`)
	var got []string
	for _, item := range a.json["items"].([]any) {
		problem, _ := item.(map[string]any)["problem"].(map[string]any)
		got = append(got, fmt.Sprint(item.(map[string]any)["status"], " ", problem["code"]))
	}
	if diff := cmp.Diff([]string{"201 <nil>", "201 <nil>", "429 rate-limited", "204 <nil>", "201 <nil>"}, got); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}
	if want := `"write";q=5;w=3600 "write";r=0;t`; a.limits() != want {
		t.Errorf("the answer says %s, want %s", a.limits(), want)
	}
	f.want(t, 429, "PUT", "/v1/follows/9/1", "")
	f.want(t, 429, "POST", "/v1/follows:batch", follow(1))
}

// A token makes others, and others of those. Together they read as often as the first may.
func TestWhatATokenMakesSharesItsLimits(t *testing.T) {
	t.Parallel()
	f := openLimited(t, 1000, 1000, 1000)
	var maker *tokens.Hash
	made := f
	for i, want := range []string{`"read";q=3;w=3600 "read";r=2;t`, `"read";q=3;w=3600 "read";r=1;t`, `"read";q=3;w=3600 "read";r=0;t`} {
		token, err := tokens.Issue(t.Context(), f.system, tokens.Spec{TenantID: tenant, Name: fmt.Sprint("made-", i), Roles: tokens.Roles(),
			ReadRate: &tokens.Rate{N: 3, Window: time.Hour}, Maker: maker})
		if err != nil {
			t.Fatal(err)
		}
		h := tokens.HashOf(token.Token)
		maker, made.token = &h, token.Token
		if a := made.want(t, 404, "GET", "/v1/follows/1/2", ""); a.limits() != want {
			t.Errorf("token %d: %s, want %s", i, a.limits(), want)
		}
	}
	made.want(t, 429, "GET", "/v1/follows/1/2", "")
	f.want(t, 404, "GET", "/v1/follows/1/2", "")
}
