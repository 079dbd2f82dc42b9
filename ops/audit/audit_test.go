package audit_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/audit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestAnActIsRecordedOnceAndKept(t *testing.T) {
	db := testkit.Postgres(t)
	pool, ctx := db.Pool(t, postgres.RoleSystem), t.Context()
	act := audit.Act{ActID: uuid.New(), TenantID: 7, TokenName: "ada", Fingerprint: "0123456789ab", Name: "consumer.pause",
		Target: "history", Reason: " a migration \n"}
	first, begun, err := audit.Begin(ctx, pool, act)
	if err != nil || !begun || first.ID == 0 || first.Reason != "a migration" || first.Finished != nil ||
		time.Since(first.Started) > time.Hour {
		t.Fatalf("begin: %+v, %t, %v", first, begun, err)
	}
	again := act
	again.Reason = "another"
	if got, begun, err := audit.Begin(ctx, pool, again); err != nil || begun || got.Reason != "a migration" {
		t.Errorf("begin the same act again: %+v, %t, %v; want the first one's record", got, begun, err)
	}
	if err := audit.Finish(ctx, pool, act.ActID, "Paused.", false); err != nil {
		t.Fatal(err)
	}
	if err := audit.Finish(ctx, pool, act.ActID, "Failed.", true); err != nil {
		t.Fatal(err)
	}
	if got, err := audit.Get(ctx, pool, act.ActID); err != nil || got.Outcome != "Paused." || got.Failed || got.Finished == nil {
		t.Errorf("the finished act: %+v, %v; want the first outcome", got, err)
	}
	if _, err := audit.Get(ctx, pool, uuid.New()); !errors.Is(err, audit.ErrNotFound) {
		t.Errorf("an unknown act: %v", err)
	}
	for _, reason := range []string{"", " \n", strings.Repeat("x", audit.MaxReasonBytes+1), "\xff", "a\x00"} {
		bad := act
		bad.ActID, bad.Reason = uuid.New(), reason
		if _, _, err := audit.Begin(ctx, pool, bad); !errors.Is(err, audit.ErrInvalid) {
			t.Errorf("reason %.20q: %v, want ErrInvalid", reason, err)
		}
	}
	odd := act
	odd.ActID, odd.Target = uuid.New(), "\x00\xff"+strings.Repeat("é", 5000)
	got, _, err := audit.Begin(ctx, pool, odd)
	if err != nil || !strings.HasPrefix(got.Target, "\uFFFD\uFFFDé") || len(got.Target) > 2000 {
		t.Errorf("a long target of odd bytes: %d bytes, %v", len(got.Target), err)
	}
	for _, sql := range []string{`DELETE FROM operator_acts`, `UPDATE operator_acts SET reason = 'none'`,
		`UPDATE operator_acts SET token_name = 'eve'`} {
		if _, err := pool.Exec(ctx, sql); err == nil || !strings.Contains(err.Error(), "permission denied") {
			t.Errorf("%s: %v, want it refused", sql, err)
		}
	}
	if _, err := db.Pool(t, postgres.RoleAPI).Exec(ctx, `SELECT FROM operator_acts`); err == nil {
		t.Error("the API's role reads the acts")
	}
}

func TestActsAreFilteredAndPaged(t *testing.T) {
	pool, ctx := testkit.Postgres(t).Pool(t, postgres.RoleSystem), t.Context()
	for i := range 25 {
		a := audit.Act{ActID: uuid.New(), TenantID: int64(i % 3), TokenName: []string{"ada", "bob"}[i%2], Fingerprint: "0123456789ab",
			Name: "a.b", Target: "T", Reason: "because"}
		if i == 20 {
			a.Name, a.Reason = "c.d", "a Special one"
		}
		if _, _, err := audit.Begin(ctx, pool, a); err != nil {
			t.Fatal(err)
		}
	}
	for _, end := range []string{"first", "second", ""} { // the last one is in progress
		a := audit.Act{ActID: uuid.New(), TenantID: 9, TokenName: "eve", Fingerprint: "0123456789ab", Name: "e.f",
			Target: "U", Reason: "because"}
		if _, _, err := audit.Begin(ctx, pool, a); err != nil {
			t.Fatal(err)
		}
		if end == "" {
			continue
		}
		if err := audit.Finish(ctx, pool, a.ActID, end, false); err != nil {
			t.Fatal(err)
		}
	}
	if last, err := audit.Last(ctx, pool, "e.f", []string{"T", "U"}); err != nil || len(last) != 1 || last["U"].Outcome != "second" {
		t.Errorf("the last that ended: %+v, %v", last, err)
	}
	one := int64(1)
	for name, c := range map[string]struct {
		f    audit.Filter
		want int
	}{
		"all": {audit.Filter{}, 28}, "a tenant's": {audit.Filter{Tenant: &one}, 8}, "by name": {audit.Filter{Name: "c.d"}, 1},
		"by token": {audit.Filter{TokenName: "bob"}, 12},
		"by text":  {audit.Filter{Text: "special"}, 1}, "of the future": {audit.Filter{From: time.Now().Add(time.Hour)}, 0},
		"of the past": {audit.Filter{Until: time.Now().Add(-time.Hour)}, 0},
		"of now":      {audit.Filter{From: time.Now().Add(-time.Hour), Until: time.Now().Add(time.Hour)}, 28},
	} {
		n, last := 0, int64(1<<62)
		for f := c.f; ; {
			page, err := audit.List(ctx, pool, f, 4)
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range page {
				if a.ID >= last {
					t.Errorf("%s: act %d behind %d", name, a.ID, last)
				}
				last, n = a.ID, n+1
			}
			if len(page) < 4 {
				break
			}
			f.Before = last
		}
		if n != c.want {
			t.Errorf("%s: %d acts, want %d", name, n, c.want)
		}
		exported := 0
		if err := audit.Export(ctx, pool, c.f, func(audit.Act) error { exported++; return nil }); err != nil || exported != c.want {
			t.Errorf("%s: exported %d, %v, want %d", name, exported, err, c.want)
		}
	}
}
