package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// TestMain lets the test's binary serve as a broker or as a relay, as the program's does.
func TestMain(m *testing.M) {
	if child, err := serveChild(context.Background(), os.Args[1:]); child {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// TestThePageNamesTheVersions compares docs/comparison.md with go.mod.
func TestThePageNamesTheVersions(t *testing.T) {
	page, err := os.ReadFile("../../docs/comparison.md")
	if err != nil {
		t.Fatal(err)
	}
	all := 0
	for _, p := range peers {
		for _, v := range p.versions() {
			all++
			if !strings.Contains(string(page), v) {
				t.Errorf("docs/comparison.md does not name %q", v)
			}
		}
	}
	if all < 4 {
		t.Errorf("the program knows %d versions of libraries", all)
	}
}

// TestEachPeerBringsEverythingInACalmLoad checks the harness, not the peers: without a fault none
// of them may lose, double or invent anything. Only River may invert, because it promises no order.
func TestEachPeerBringsEverythingInACalmLoad(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a server")
	}
	calm, err := scenarioNamed("calm")
	if err != nil {
		t.Fatal(err)
	}
	o := options{seconds: 2, rate: 100, rounds: 1, settle: time.Minute, say: t.Logf}
	all, err := runAll(t.Context(), o, peers, []scenario{calm}, func(result) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != len(peers) {
		t.Fatalf("%d results of %d peers", len(all), len(peers))
	}
	for _, r := range all {
		if r.Events != 201 || r.Lost+r.Stuck+r.Doubled+r.Invented > 0 || r.Inverted > 0 && r.Peer != riverPeer.name {
			t.Errorf("%s: %+v", r.Peer, r)
		}
	}
}
