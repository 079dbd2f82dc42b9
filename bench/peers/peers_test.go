package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
)

// broken is naive with a relay that loses, doubles and inverts.
var broken = func() peer {
	p := naive
	p.name, p.relay = "broken", runBroken
	return p
}()

type outboxRow struct {
	ID      int
	Payload []byte
}

// runBroken publishes each batch from its last row to its first, each fifth row twice, and each
// seventh never.
func runBroken(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, _ string) error {
	for ctx.Err() == nil {
		rows, _ := pool.Query(ctx, `UPDATE naive_outbox SET sent_at = now() WHERE sent_at IS NULL
			RETURNING id, convert_to(payload::text, 'UTF8')`)
		batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[outboxRow])
		if err != nil {
			return err
		}
		slices.SortFunc(batch, func(a, b outboxRow) int { return b.ID - a.ID })
		for _, r := range batch {
			times := 1
			if r.ID%5 == 0 {
				times = 2
			}
			if r.ID%7 == 0 {
				times = 0
			}
			for range times {
				if _, err := js.Publish(ctx, peerSubject, r.Payload); err != nil {
					return err
				}
			}
		}
		sleep(ctx, 100*time.Millisecond)
	}
	return nil
}

// TestMain lets the test's binary serve as a broker or as a relay, as the program's does.
func TestMain(m *testing.M) {
	peers = append(peers, broken)
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
	good := slices.DeleteFunc(slices.Clone(peers), func(p peer) bool { return p.name == broken.name })
	all, err := runAll(t.Context(), o, good, []scenario{calm}, func(result) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 4 {
		t.Fatalf("%d results of four peers", len(all))
	}
	for _, r := range all {
		if r.Events != 201 || r.Lost+r.Stuck+r.Doubled+r.Invented > 0 || r.Inverted > 0 && r.Peer != riverPeer.name {
			t.Errorf("%s: %+v", r.Peer, r)
		}
	}
}

// TestABrokenRelayIsFound runs the whole harness on a relay that does everything wrong.
func TestABrokenRelayIsFound(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a server")
	}
	o := options{seconds: 2, rate: 100, rounds: 1, settle: time.Minute, say: t.Logf, relayBin: "none"}
	two := scenario{name: "two entities", relays: 1, entities: 2}
	all, err := runAll(t.Context(), o, []peer{broken}, []scenario{two}, func(result) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	// 201 rows: 28 are multiples of 7, and 40 of 5, of which 5 are multiples of 7 too.
	if r := all[0]; r.Lost != 28 || r.Doubled != 35 || r.Inverted == 0 {
		t.Errorf("got %d lost, %d doubled, %d inverted; want 28, 35, and some", r.Lost, r.Doubled, r.Inverted)
	}
}
