//go:build faults

package cli

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/load"
	"github.com/tidings/tidings/internal/status"
	"github.com/tidings/tidings/internal/testkit"
)

// TestPartitionsAreResizedWhileEverythingRuns resizes with two processes, each with all parts, and a continuous load.
func TestPartitionsAreResizedWhileEverythingRuns(t *testing.T) {
	d := newDev(t)
	d.start(t)
	in := d.instance(t)
	second := newDev(t, "DATABASE_URL="+in.DatabaseURL, "NATS_URL="+in.NATSURL, "DEV_TOKEN="+in.Token)
	second.start(t)

	spec := followGraph(200, 4000, rand.Uint64())
	t.Logf("seed %d", spec.Seed)
	// The load goes on while each resize begins.
	g, l := d.startGate(t, 3*spec.Edges/4, load.Config{Concurrency: 8, RetryFor: startWithin})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	loaded := make(chan error, 1)
	go func() { loaded <- l.Run(ctx, followKind, sequence(spec)) }()
	for i, to := range []int{4, 2} {
		testkit.Eventually(t, "a quarter more is loaded",
			func() (bool, error) { return l.Stats().Done() >= spec.Edges/4*int64(i+1), nil })
		if i == 1 {
			g.raise(spec.Edges)
		}
		code, stdout, stderr := run(t, nil, "", "partitions", "resize", "--to", fmt.Sprint(to), "--wait", arriveWithin.String(), "--yes",
			"--data", d.dir)
		if code != exitOK || !strings.Contains(stdout, "takes slots 0-") || !strings.Contains(stdout, " are open.") {
			t.Fatalf("resize to %d: exit code %d\n%s\n%s", to, code, stdout, stderr)
		}
	}
	if err := <-loaded; err != nil {
		t.Fatal(err)
	}
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)

	var open, all []int
	var listed []status.Partition
	testkit.Eventually(t, "each open partition to have a relay", func() (bool, error) { // one relay may hand it to the other
		listed = d.listed(t)
		return !slices.ContainsFunc(listed, func(p status.Partition) bool { return p.Relay == "" }), nil
	})
	for _, p := range listed {
		open = append(open, p.Partition)
		if p.State != status.Open || p.LastSlot-p.FirstSlot != 15 {
			t.Errorf("partition %+v", p)
		}
	}
	for _, p := range d.listed(t, "--all") {
		all = append(all, p.Partition)
	}
	if !slices.Equal(open, []int{5, 6}) || !slices.Equal(all, []int{0, 1, 2, 3, 4, 5, 6}) {
		t.Errorf("the partitions %v of %v are open, want 5 and 6 of 7", open, all)
	}
	if code, stdout, stderr := run(t, nil, "", "partitions", "resize", "--to", "2", "--data", d.dir); code != exitOK ||
		stdout != "There are 2 partitions already. Nothing was changed.\n" {
		t.Errorf("resize to as many: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	second.stop(t)
	if status, _ := d.request(t, http.MethodPut, "/v1/follows/900/901", "", nil, nil); status != http.StatusCreated {
		t.Errorf("follow: status %d", status)
	}
	d.verify(t)
}
