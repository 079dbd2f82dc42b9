package consumers

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func nothing(pgx.Tx) error { return nil }

// claims returns two instances of a projection. A claim without a sign of life for takeover can be
// taken.
func claims(t *testing.T, takeover time.Duration) (pool *pgxpool.Pool, a, b *Bootstrap) {
	pool = testkit.Postgres(t).Pool(t, postgres.RoleOwner)
	return pool, &Bootstrap{pool, "p", "a", takeover}, &Bootstrap{pool, "p", "b", takeover}
}

func claim(t *testing.T, b *Bootstrap, wantMine, wantFilled bool) {
	t.Helper()
	mine, filled, err := b.Claim(t.Context())
	if err != nil || mine != wantMine || filled != wantFilled {
		t.Errorf("%s: mine %t, filled %t, %v; want %t and %t", b.Owner, mine, filled, err, wantMine, wantFilled)
	}
}

func join(b *Bootstrap, seq uint64, during func()) error {
	return b.Join(context.Background(), func([]Exported) (map[int]Start, error) {
		during()
		return map[int]Start{0: {"EVENTS-0", time.Unix(1, 0), seq}}, nil
	})
}

func TestAnInstanceThatLostItsClaimStoresNothing(t *testing.T) {
	_, a, b := claims(t, time.Hour)
	claim(t, a, true, false)
	claim(t, b, false, false)
	at := Exported{Tenant: 1, Kind: "follow", Cursor: "c", After: "1", Streams: []byte(`[]`)}
	if err := a.Save(t.Context(), at, nothing); err != nil {
		t.Fatal(err)
	}
	b.Takeover = 0 // a has been suspended
	claim(t, b, true, false)
	at.After = "2"
	for what, err := range map[string]error{
		"save":    a.Save(t.Context(), at, func(pgx.Tx) error { t.Error("it stores"); return nil }),
		"restart": a.Restart(t.Context(), func(context.Context, pgx.Tx) error { t.Error("it clears"); return nil }),
		"join":    join(a, 7, func() { t.Error("it joins") }),
	} {
		if !errors.Is(err, ErrClaim) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if all, err := b.Progress(t.Context()); err != nil || len(all) != 1 || all[0].After != "1" || all[0].Cursor != "c" {
		t.Errorf("%+v, %v", all, err)
	}
}

// TestAClaimThatWaitsForTheJoinFindsTheProjectionFilled would otherwise read all exports once more.
func TestAClaimThatWaitsForTheJoinFindsTheProjectionFilled(t *testing.T) {
	pool, a, b := claims(t, time.Hour)
	claim(t, a, true, false)
	done := make(chan struct{})
	if err := join(a, 7, func() {
		go func() {
			defer close(done)
			claim(t, b, false, true)
		}()
		testkit.Eventually(t, "b waits for a", func() (waits bool, err error) {
			err = pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
				WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits)
			return waits, err
		})
	}); err != nil {
		t.Fatal(err)
	}
	<-done
	claim(t, a, false, true)
}

// TestExpiredEventsBeginOneBootstrap has instances that report the same position, and one that
// reports it late. Join moves offsets forward only.
func TestExpiredEventsBeginOneBootstrap(t *testing.T) {
	pool, a, b := claims(t, time.Hour)
	claim(t, a, true, false)
	if err := join(a, 7, func() {}); err != nil {
		t.Fatal(err)
	}
	cleared := 0
	reset := func(of *Bootstrap, seq uint64, want int) {
		t.Helper()
		err := of.Reset(t.Context(), Start{"EVENTS-0", time.Unix(1, 0), seq}, func(context.Context, pgx.Tx) error {
			cleared++
			return nil
		})
		if err != nil || cleared != want {
			t.Errorf("%s: cleared %d times, want %d: %v", of.Owner, cleared, want, err)
		}
	}
	reset(a, 6, 0) // it has moved on since
	reset(a, 7, 1)
	reset(b, 7, 1)
	claim(t, b, false, false)
	if _, err := pool.Exec(t.Context(), `UPDATE consumer_offsets SET last_processed_id = 20`); err != nil {
		t.Fatal(err)
	}
	if err := join(a, 9, func() {}); err != nil {
		t.Fatal(err)
	}
	var seq int64
	if err := pool.QueryRow(t.Context(), `SELECT last_processed_id FROM consumer_offsets`).Scan(&seq); err != nil || seq != 20 {
		t.Errorf("the offset is %d, %v", seq, err)
	}
	reset(b, 20, 2)
	if err := join(b, 30, func() {}); err != nil {
		t.Fatal(err)
	}
	if err := pool.QueryRow(t.Context(), `SELECT last_processed_id FROM consumer_offsets`).Scan(&seq); err != nil || seq != 30 {
		t.Errorf("the offset is %d, %v", seq, err)
	}
	reset(a, 7, 2) // late
}

// TestAnInstanceKeepsItsClaimWhileItWaitsForAnAnswer: the API may take longer than a takeover.
func TestAnInstanceKeepsItsClaimWhileItWaitsForAnAnswer(t *testing.T) {
	pool, a, b := claims(t, 300*time.Millisecond)
	claim(t, a, true, false)
	var first, now time.Time
	signs := func(at *time.Time) error {
		return pool.QueryRow(t.Context(), `SELECT moved_at FROM consumer_bootstraps`).Scan(at)
	}
	if err := signs(&first); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	kept := make(chan struct{})
	go func() { a.Keep(ctx); close(kept) }()
	testkit.Eventually(t, "several signs of life", func() (bool, error) { return now.Sub(first) > time.Second, signs(&now) })
	b.Takeover = time.Second // of a machine under load
	claim(t, b, false, false)
	b.Takeover = 0
	claim(t, b, true, false)
	<-kept // it ends by itself
	stop()
}
