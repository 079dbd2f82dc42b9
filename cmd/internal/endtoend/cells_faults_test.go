//go:build faults

package endtoend_test

import (
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/cells"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
)

// TestTwoTruthsFeedOneProjectionsDatabase has tenants with the same ids in two cells, and
// partitions with the same numbers. It kills relays and consumers, resizes a cell, and moves a
// tenant to the other cell.
func TestTwoTruthsFeedOneProjectionsDatabase(t *testing.T) {
	seed, _ := testkit.Seed(t)
	c := newCellular(t, "a", "b")
	names := slices.Sorted(maps.Keys(c.cells))
	a, b := c.cells[names[0]], c.cells[names[1]]

	testkit.Eventually(t, "both cells' streams to be read", func() (bool, error) {
		var n int
		err := c.system.QueryRow(t.Context(), `SELECT count(*) FROM consumer_offsets`).Scan(&n)
		return n == len(c.cells)*len(consumerNames), err
	})
	if err := verify.RepairKeys(t.Context(), c.deps(a), projection(consumerNames[0], a.kinds.Now),
		projections.Key{Type: "follow", TenantID: 1}); !errors.Is(err, cells.ErrUnassigned) {
		t.Errorf("repair before the tenants' cells are known: %v", err)
	}
	c.assign(0, a.name)
	c.assign(3, b.name)

	home := map[int64]*cell{1: a, 2: a, 3: b}
	var residents []*resident
	for tenant := range int64(3) {
		tenant++
		token, err := tokens.Create(t.Context(), home[tenant].system, tenant, "tester", tokens.Roles(), time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		residents = append(residents, &resident{tenant: tenant, m: newModel(),
			client: client{ctx: t.Context(), handler: door{c, tenant}, token: token}})
	}
	of := func(r *resident) *cell { return home[r.tenant] }
	consumers := func() {
		var g errgroup.Group
		for _, name := range consumerNames {
			g.Go(func() error { c.kill(c.consumers[name], c.system); return nil })
		}
		_ = g.Wait() // no function returns an error
		for _, name := range consumerNames {
			c.start(name)
		}
	}
	c.write(seed, residents, of, func() { c.kill(b.relay, b.system); c.startRelay(b) }, consumers, func() {
		if _, err := outbox.Resize(t.Context(), a.system, 2); err != nil {
			t.Error(err)
		}
	})
	c.move(residents[1], a, b)
	home[2] = b
	c.write(seed+2, residents, of, consumers, func() { c.kill(a.relay, a.system); c.startRelay(a) })

	c.verify()
	for _, r := range residents {
		if err := equalTenant(r.client, r.m, rand.New(rand.NewPCG(seed, uint64(r.tenant)))); err != nil {
			t.Errorf("tenant %d: %v", r.tenant, err)
		}
		c.awaitAsOf(r)
	}
	for _, name := range consumerNames {
		for _, x := range names {
			if testkit.Metric(c.t, c.metrics[name], "tidings_consumer_applied_total", x) == 0 {
				t.Errorf("%s applied nothing of %s", name, x)
			}
		}
	}
	c.compared(followercounts.Name, "edge_lists")
	c.compared(threadcache.Name, "child_lists")
	c.refusals(a)
}
