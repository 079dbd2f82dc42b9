package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// layout writes partitions as "1:0-7<0", with a "c" for closing and an "x" for closed ones.
func layout(partitions []Partition) string {
	var all []string
	for _, p := range partitions {
		s := fmt.Sprintf("%d:%d-%d", p.Number, p.FirstSlot, p.LastSlot)
		if len(p.After) > 0 {
			s += "<" + strings.Trim(strings.ReplaceAll(fmt.Sprint(p.After), " ", ","), "[]")
		}
		if p.Closed {
			s += "x"
		} else if p.Closing {
			s += "c"
		}
		all = append(all, s)
	}
	return strings.Join(all, " ")
}

func checkLayout(t *testing.T, pool *pgxpool.Pool, all, active string) []Partition {
	t.Helper()
	got, err := Partitions(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	if layout(got) != all {
		t.Errorf("partitions are %s, want %s", layout(got), all)
	}
	if layout(Active(got)) != active {
		t.Errorf("active are %s, want %s", layout(Active(got)), active)
	}
	return got
}

func resize(t *testing.T, pool *pgxpool.Pool, to int, want string) {
	t.Helper()
	added, err := Resize(t.Context(), pool, to)
	if err != nil {
		t.Fatal(err)
	}
	if layout(added) != want {
		t.Errorf("to %d: added %s, want %s", to, layout(added), want)
	}
}

func closeAt(t *testing.T, pool *pgxpool.Pool, partition int, tail, final uint64) {
	t.Helper()
	if did, err := Close(t.Context(), pool, partition, tail, final); err != nil || !did {
		t.Fatalf("close partition %d: %t, %v", partition, did, err)
	}
}

func TestPartitionsAreReplacedOnceTheOldOnesHaveClosed(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	checkLayout(t, pool, "0:0-31", "0:0-31")
	resize(t, pool, 1, "")
	exec(t, pool, `UPDATE outbox_partitions SET tail_seq = 41, floor_id = 17`)

	resize(t, pool, 4, "1:0-7<0 2:8-15<0 3:16-23<0 4:24-31<0")
	all := checkLayout(t, pool, "0:0-31c 1:0-7<0 2:8-15<0 3:16-23<0 4:24-31<0", "0:0-31c")
	if all[1].Floor != 17 || all[4].Floor != 17 || all[1].Tail != 0 {
		t.Errorf("a new partition is %+v, want the floor of the old one and no tail", all[1])
	}
	if c := exchange(t, pool, Round{Partition: 0}); !c.Closing || c.Closed || c.Tail != 41 {
		t.Errorf("a claim of the old partition: %+v", c)
	}
	for _, to := range []int{1, 2, 4, 8} {
		if _, err := Resize(t.Context(), pool, to); !errors.Is(err, ErrResizing) {
			t.Errorf("to %d meanwhile: %v, want ErrResizing", to, err)
		}
	}
	if did, err := Close(t.Context(), pool, 0, 40, 42); did || err != nil {
		t.Errorf("closed at another tail: %t, %v", did, err)
	}
	if did, err := Close(t.Context(), pool, 1, 0, 1); did || err != nil {
		t.Errorf("closed a partition that is not closing: %t, %v", did, err)
	}
	closeAt(t, pool, 0, 41, 42)
	if did, err := Close(t.Context(), pool, 0, 42, 43); did || err != nil {
		t.Errorf("closed twice: %t, %v", did, err)
	}
	all = checkLayout(t, pool, "0:0-31x 1:0-7<0 2:8-15<0 3:16-23<0 4:24-31<0", "1:0-7<0 2:8-15<0 3:16-23<0 4:24-31<0")
	if all[0].Final != 42 || all[0].Tail != 42 {
		t.Errorf("the closed one is %+v", all[0])
	}

	resize(t, pool, 4, "")
	resize(t, pool, 2, "5:0-15<1,2 6:16-31<3,4")
	closeAt(t, pool, 1, 0, 1)
	closeAt(t, pool, 3, 0, 1)
	closeAt(t, pool, 4, 0, 1)
	checkLayout(t, pool, "0:0-31x 1:0-7<0x 2:8-15<0c 3:16-23<0x 4:24-31<0x 5:0-15<1,2 6:16-31<3,4", "2:8-15<0c 6:16-31<3,4")
	closeAt(t, pool, 2, 0, 1)
	checkLayout(t, pool, "0:0-31x 1:0-7<0x 2:8-15<0x 3:16-23<0x 4:24-31<0x 5:0-15<1,2 6:16-31<3,4", "5:0-15<1,2 6:16-31<3,4")
	for _, to := range []int{0, -1, 3, 64} {
		if _, err := Resize(t.Context(), pool, to); err == nil || errors.Is(err, ErrResizing) {
			t.Errorf("to %d: %v, want an error", to, err)
		}
	}
}

// TestANewPartitionHasTheLowestFloor: of those whose slots it takes over.
func TestANewPartitionHasTheLowestFloor(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	resize(t, pool, 2, "1:0-15<0 2:16-31<0")
	closeAt(t, pool, 0, 0, 1)
	exec(t, pool, `UPDATE outbox_partitions SET floor_id = CASE partition WHEN 0 THEN 5 WHEN 1 THEN 30 ELSE 10 END`)
	resize(t, pool, 1, "3:0-31<1,2")
	if _, floor := tailOf(t, pool, 3); floor != 10 {
		t.Errorf("the floor is %d, want 10", floor)
	}
}

func TestOfResizesAtOnceOneCounts(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	var g errgroup.Group
	for range 6 {
		g.Go(func() error {
			if _, err := Resize(t.Context(), pool, 2); err != nil && !errors.Is(err, ErrResizing) {
				return err
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	checkLayout(t, pool, "0:0-31c 1:0-15<0 2:16-31<0", "0:0-31c")
}

func TestAPartitionIsBoundOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, created := range []time.Time{made, made.Add(time.Hour)} {
		if err := Bind(t.Context(), pool, 0, "EVENTS-0", created); err != nil {
			t.Fatal(err)
		}
	}
	all, err := Partitions(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	want := Partition{LastSlot: 31, After: []int{}, Stream: "EVENTS-0", Created: made}
	if diff := cmp.Diff([]Partition{want}, all); diff != "" {
		t.Errorf("partitions (-want +got):\n%s", diff)
	}
}

// TestNoTwoOpenPartitionsShareASlot: an old database adopts partitions whose predecessors' streams
// were removed, and the database refuses a second partition for a slot whoever adds it.
func TestNoTwoOpenPartitionsShareASlot(t *testing.T) {
	stray := func(number, first, last int, after ...int) Partition {
		return Partition{Number: number, FirstSlot: first, LastSlot: last, After: after, Stream: fmt.Sprint("EVENTS-", number),
			Created: made}
	}
	for _, c := range []struct {
		name        string
		strays      []Partition
		all, active string
	}{
		{"all later streams are there", []Partition{stray(1, 0, 15, 0), stray(2, 16, 31, 0)}, "0:0-31c 1:0-15<0 2:16-31<0", "0:0-31c"},
		{"the streams between were removed", []Partition{stray(5, 0, 15, 1, 2), stray(6, 16, 31, 3, 4)},
			"0:0-31c 5:0-15<1,2 6:16-31<3,4", "0:0-31c"},
		{"a part of them was removed", []Partition{stray(2, 16, 31, 0), stray(3, 0, 15, 1)}, "0:0-31c 2:16-31<0 3:0-15<1", "0:0-31c"},
		{"the last ones were removed too", []Partition{stray(5, 0, 15, 1, 2)}, "0:0-31c 5:0-15<1,2 6:16-31<0", "0:0-31c"},
		{"a later one replaces a part of an earlier one", []Partition{stray(5, 0, 15, 1, 2), stray(7, 0, 7, 6)},
			"0:0-31c 5:0-15<1,2c 7:0-7<6 8:16-31<0 9:8-15<5", "0:0-31c"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
			if err := Bind(t.Context(), pool, 0, "EVENTS-0", made); err != nil {
				t.Fatal(err)
			}
			before, err := Partitions(t.Context(), pool)
			if err != nil {
				t.Fatal(err)
			}
			if err := Adopt(t.Context(), pool, c.strays); err != nil {
				t.Fatal(err)
			}
			all := checkLayout(t, pool, c.all, c.active)
			number := func(all []Partition) (numbers []int) {
				for _, p := range all {
					numbers = append(numbers, p.Number)
				}
				return numbers
			}
			if planned := Adopted(before, c.strays); fmt.Sprint(number(planned)) != fmt.Sprint(number(all)) {
				t.Errorf("the plan was %s", layout(planned))
			}
			// A lost stream whose slots have a later partition needs no other one.
			next := number(Successors(all, 0))
			if added, err := Replace(t.Context(), pool, all[0], 0, 9); err != nil || fmt.Sprint(number(added)) != fmt.Sprint(next) {
				t.Errorf("replaced by %s, %v, want %v", layout(added), err, next)
			}
			checkLayout(t, pool, c.all, c.active)
		})
	}
	t.Run("the database refuses", func(t *testing.T) {
		db := testkit.Postgres(t)
		pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
		resize(t, pool, 2, "1:0-15<0 2:16-31<0")
		closeAt(t, pool, 0, 0, 1)
		for _, sql := range []string{
			`INSERT INTO outbox_partitions (partition, first_slot, last_slot) VALUES (3, 15, 20)`,
			`UPDATE outbox_partitions SET closing = false, final_seq = NULL WHERE partition = 0`,
			`UPDATE outbox_partitions SET last_slot = 16 WHERE partition = 1`,
		} {
			if _, err := owner.Exec(t.Context(), sql); err == nil || !strings.Contains(err.Error(), "share slots") {
				t.Errorf("%s: %v, want an error about the slots", sql, err)
			}
		}
		tx, err := owner.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // if the test failed
		for _, sql := range []string{`UPDATE outbox_partitions SET closing = true`,
			`INSERT INTO outbox_partitions (partition, first_slot, last_slot) VALUES (3, 0, 31)`, `SET CONSTRAINTS ALL IMMEDIATE`} {
			if _, err := tx.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		var g errgroup.Group
		g.Go(func() error { // it sees no other partition before the first transaction has ended
			_, err := owner.Exec(t.Context(), `INSERT INTO outbox_partitions (partition, first_slot, last_slot) VALUES (4, 31, 31)`)
			return err
		})
		testkit.Eventually(t, "the second transaction to wait for the first", func() (waits bool, err error) {
			return waits, owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
				WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits)
		})
		if err := tx.Commit(t.Context()); err != nil {
			t.Error(err)
		}
		if err := g.Wait(); err == nil || !strings.Contains(err.Error(), "partitions 3 and 4 share slots") {
			t.Errorf("two transactions at once: %v, want an error of the second", err)
		}
		checkLayout(t, pool, "0:0-31x 1:0-15<0c 2:16-31<0c 3:0-31", "1:0-15<0c 2:16-31<0c")
	})
}
