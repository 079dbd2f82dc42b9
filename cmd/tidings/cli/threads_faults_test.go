//go:build faults

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/load"
	"github.com/tidings/tidings/internal/testkit"
)

func TestALoadOfThreadsSurvivesKills(t *testing.T) {
	d := newDevWithPostgres(t)
	d.start(t)
	spec := load.ChildSpec{Objects: 30, Children: 600, Seed: rand.Uint64() >> 1}
	t.Logf("seed %d", spec.Seed)
	threads := load.GenerateChildren(commentKind, spec)
	// among the creates and the changes
	creates, changes := spec.Children/2, spec.Children+(threads.Requests()-spec.Children)/2 // answers before each kill
	g, l := d.startGate(t, creates+spec.Children/4, load.Config{Concurrency: 16, RetryFor: startWithin})
	loaded := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { loaded <- l.RunChildren(ctx, threads) }()
	for _, kill := range []struct{ at, next int64 }{{creates, changes + 1}, {changes, threads.Requests() + 1}} {
		testkit.Eventually(t, "the load to be at the kill", func() (bool, error) { return l.Stats().Done() >= kill.at, nil })
		d.kill(t)
		g.raise(kill.next)
		d.start(t)
	}
	if err := <-loaded; err != nil {
		t.Fatal(err)
	}
	if s := l.Stats(); s.Done() != threads.Requests() || s.Refused > 0 || s.Retried == 0 {
		t.Errorf("%+v, want %d requests, some retried, none refused", s, threads.Requests())
	}

	code, stdout, stderr := run(t, nil, "", "load", "--kind", "comment", "--generate",
		fmt.Sprintf("posts=%d,comments=%d,seed=%d", spec.Objects, spec.Children, spec.Seed), "--data", d.dir, "--json")
	var got childrenResult
	if err := json.Unmarshal([]byte(stdout), &got); code != exitOK || err != nil {
		t.Fatalf("load: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	// A busy API may refuse a request for now, which the load then repeats: how often says nothing about what exists.
	got.Seconds, got.RequestsPerSecond, got.Retried = 0, 0, 0
	if want := (childrenResult{Requests: threads.Requests(), Existed: threads.Requests()}); got != want {
		t.Errorf("the second load: %+v, want %+v", got, want)
	}
	d.verify(t)

	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	var comments, events int64
	var settings bool
	if err := conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM comments), (SELECT count(*) FROM outbox_messages), EXISTS (SELECT
		FROM threads)`).
		Scan(&comments, &events, &settings); err != nil {
		t.Fatal(err)
	}
	if comments != spec.Children || events != threads.Requests() {
		t.Errorf("%d comments, %d events, settings %t: want %d and %d", comments, events, settings, spec.Children, threads.Requests())
	}
	rows, _ := conn.Query(t.Context(), wrongVersionsSQL)
	wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if diff := cmp.Diff([]string(nil), wrong); err != nil || len(wrong) > 0 {
		t.Errorf("events and versions: %v\n%s", err, diff)
	}
}
