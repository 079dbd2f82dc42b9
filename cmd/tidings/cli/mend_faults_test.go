//go:build faults

package cli

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/verify"
)

func TestVerifyRepairMendsEveryDifferenceWhileWritesGoOn(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	for _, generate := range [][]string{{"--generate", "users=80,edges=600,seed=1"},
		{"--kind", "comment", "--generate", "posts=8,comments=200,seed=1"}} {
		if code, stdout, stderr := run(t, nil, "", append([]string{"load", "--data", d.dir}, generate...)...); code != exitOK {
			t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
		}
	}
	d.verify(t)
	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	writing := make(chan int)
	go func() {
		code, _, _ := run(t, nil, "", "load", "--data", d.dir, "--generate", "users=300,edges=3000,seed=2")
		writing <- code
	}()
	for _, sql := range damages {
		if tag, err := conn.Exec(t.Context(), sql); err != nil || tag.RowsAffected() == 0 {
			t.Fatalf("%s: %d rows, %v", sql, tag.RowsAffected(), err)
		}
	}
	_, stdout, stderr := run(t, nil, "", "verify", "--repair", "--wait", "1s", "--data", d.dir, "--json")
	var v verify.Report
	if err := json.Unmarshal([]byte(stdout), &v); err != nil {
		t.Fatalf("verify --repair: %v\n%s\n%s", err, stdout, stderr)
	}
	for _, p := range v.Projections {
		if p.Mended == 0 && p.Projection != "thread versions" && p.Projection != "comment archive" { // these are the truth
			t.Errorf("%s: nothing mended: %s", p.Projection, stdout)
		}
		for _, d := range p.Differences { // rows whose events had not arrived yet
			t.Log(d)
		}
	}
	if code := <-writing; code != exitOK {
		t.Errorf("load: exit code %d", code)
	}
	d.verify(t)
	code, stdout, stderr := run(t, nil, "", "verify", "--repair", "--data", d.dir, "--json")
	if err := json.Unmarshal([]byte(stdout), &v); code != exitOK || err != nil {
		t.Fatalf("verify --repair: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	for _, p := range v.Projections {
		if p.Mended != 0 {
			t.Errorf("%s: mended %d where nothing differs", p.Projection, p.Mended)
		}
	}
}
