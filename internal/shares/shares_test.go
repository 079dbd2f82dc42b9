package shares

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAGreedyCallerLeavesRoomForAModestOne(t *testing.T) {
	p := NewPool(Resource{Tenant: Bound{Free: 3}, Each: Bound{Free: 1}}, 64)
	fill := func(tenant int64, each string) *Hold {
		h := p.Hold(tenant, each)
		for h.Take(1) {
		}
		return h
	}
	var got []int64
	var all []*Hold
	for _, who := range []struct {
		tenant int64
		each   string
	}{{1, "a"}, {1, "b"}, {1, "c"}, {2, "a"}, {2, "b"}, {0, "127.0.0.1/32"}, {0, ""}} {
		h := fill(who.tenant, who.each)
		got, all = append(got, h.n), append(all, h)
	}
	// Tenant 1 alone stops at three quarters. Each token halves the rest.
	if diff := cmp.Diff([]int64{32, 16, 0, 8, 4, 2, 2}, got); diff != "" {
		t.Errorf("held (-want +got):\n%s", diff)
	}
	for _, h := range all {
		h.Release()
		h.Release()
	}
	if p.Held() != 0 || len(p.tenants)+len(p.each) != 0 {
		t.Errorf("after all released: %d held, %v, %v", p.Held(), p.tenants, p.each)
	}
	if h := p.Hold(1, "a"); h.Take(65) || p.Held() != 0 {
		t.Errorf("more than there is: %d held", p.Held())
	}
}

func TestAFixedBoundHoldsWhateverIsFree(t *testing.T) {
	p := NewPool(Resource{Tenant: Bound{N: 4}, Each: Bound{N: 3}}, 10)
	a, b := p.Hold(7, "a"), p.Hold(7, "b")
	if !a.Take(3) || a.Take(1) || b.Take(2) || !b.Take(1) || !p.Hold(8, "a").Take(3) {
		t.Errorf("%d held, %v, %v", p.Held(), p.tenants, p.each)
	}
}

func TestEachRowSaysWhatItBounds(t *testing.T) {
	names := make(map[string]bool)
	for _, r := range Table() {
		bounded := r.All != Bound{} || r.Tenant != Bound{} || r.Each != Bound{}
		if names[r.Name] || r.Name == "" || r.Beyond == "" || r.Slow == "" || !bounded {
			t.Errorf("%+v", r)
		}
		names[r.Name] = true
	}
}
