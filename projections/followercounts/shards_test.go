package followercounts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

func TestTheShardOfAFollowerIsFixed(t *testing.T) {
	// Stored edges have these shards. Another hash would put later edges into other shards, which
	// works, but must not happen by accident.
	for follower, want := range map[event.ID]int32{"1": 31, "2": 34, "42": 2, event.IDOf(1 << 62): 7} {
		if got := shardHash(follower); got != want {
			t.Errorf("shard of %s is %d, want %d", follower, got, want)
		}
	}
	var used [maxShards]int
	const followers = 64_000
	for i := range int64(followers) {
		used[shardHash(event.IDOf(i*1000))]++
	}
	if least, most := slices.Min(used[:]), slices.Max(used[:]); least < 850 || most > 1150 {
		t.Errorf("the shards of %d followers have %d to %d each", followers, least, most)
	}
}

// TestAnObjectIsSplitAsItGrows checks that old edges stay in their shards, also when they are
// removed and renewed. Every page has the same order for any number of shards.
func TestAnObjectIsSplitAsItGrows(t *testing.T) {
	for _, l := range tested {
		t.Run(l.Name, l.testSplit)
	}
}

func (l lifecycle) testSplit(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	ctx := context.Background()
	projection := Projection{kinds: kinds.Builtin, splitAt: 4}
	const followers = 300
	newest := map[key]int64{}
	step := func(version int64, who ...event.ID) {
		t.Helper()
		var events []event.Event
		for _, follower := range who {
			newest[key{1, follower, "1000"}] = version
			events = append(events, l.event(1, follower, "1000", version))
		}
		if err := postgres.InTx(ctx, pool, pgx.TxOptions{},
			func(tx pgx.Tx) error { return projection.Apply(ctx, tx, events) }); err != nil {
			t.Fatal(err)
		}
	}
	shards := func() (n int) {
		t.Helper()
		err := pool.QueryRow(ctx, `SELECT shards FROM edge_shards WHERE tenant_id = 1 AND object_id = '1000'`).Scan(&n)
		if errors.Is(err, pgx.ErrNoRows) {
			return 1
		}
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	home := func(follower event.ID) (shard int) {
		t.Helper()
		if err := pool.QueryRow(ctx, `SELECT shard_id FROM edge_lists WHERE from_id = $1`, follower).Scan(&shard); err != nil {
			t.Fatal(err)
		}
		return shard
	}
	var all []event.ID
	for n := int64(1); n <= followers; n++ {
		step(1, event.IDOf(n))
		all = append(all, event.IDOf(n))
		want := 1
		for at := int64(4); at <= n && want < maxShards; at *= 2 {
			want *= 2
		}
		if got := shards(); got != want {
			t.Fatalf("%d followers: %d shards, want %d", n, got, want)
		}
	}
	var used int
	if err := pool.QueryRow(ctx, `SELECT count(DISTINCT shard_id) FROM edge_lists`).Scan(&used); err != nil || used < 60 {
		t.Errorf("edges are in %d shards, %v", used, err)
	}
	if home("3") != 0 {
		t.Errorf("the third edge is in shard %d, want its first shard", home("3"))
	}
	step(l.versions, all[:150]...) // batches with gains and losses use other statements for the counts
	step(l.versions+1, all[:20]...)
	if home("3") != 0 || shards() != maxShards {
		t.Errorf("a renewed edge is in shard %d of %d", home("3"), shards())
	}
	var want []Edge
	for k, v := range newest {
		if l.active(v) {
			want = append(want, l.line(k, k.from, v))
		}
	}
	slices.SortFunc(want, newestFirst)
	inTenant(t, api, 1, func(ctx context.Context, tx pgx.Tx) error {
		for _, limit := range []int{1, 7, 170, 1000} {
			got, err := walk(func(after *EdgeCursor) ([]Edge, error) { return Incoming(ctx, tx, l.Edge, "1000", "", after, limit) }, limit)
			if err != nil {
				return err
			}
			if diff := cmp.Diff(want, got); diff != "" {
				return fmt.Errorf("pages of %d (-want +got):\n%s", limit, diff)
			}
		}
		return nil
	})
	if got := l.counts(t, pool, 1, "1000")["1000"]; got != (Counts{Incoming: int64(len(want))}) {
		t.Errorf("counts %v, want %d incoming", got, len(want))
	}
}
