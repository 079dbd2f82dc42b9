//go:build faults

package api

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/tokens"
)

func TestLookUpsDoNotGrowWithTheTenants(t *testing.T) {
	for name, c := range map[string]struct {
		tokens, perSecond, seconds int
		most                       float64 // look-ups per second
	}{
		"100,000 tenants, two minutes":             {100_000, 1000, 120, 50},
		"a tenth of them and of that, three hours": {10_000, 100, 3 * 3600, 5},
	} {
		t.Run(name, func(t *testing.T) {
			s, a, all := newTokenStore(c.tokens)
			ask := func(h tokens.Hash) {
				if p, err := a.principal(t.Context(), h, mayFind); err != nil || p.TenantID != s.good[h].TenantID {
					t.Fatalf("%+v, %v", p, err)
				}
				s.now = s.now.Add(time.Second / time.Duration(c.perSecond))
			}
			for _, h := range all {
				ask(h)
			}
			random := rand.New(rand.NewPCG(1, 2))
			worst, finds, asked := 0, s.finds, s.asked
			const window = 60 // seconds: in fewer, the renewals, which are at random times, are at times twice as many as on average
			for range c.seconds / window {
				before := s.finds
				for range window * c.perSecond {
					ask(all[random.IntN(len(all))])
				}
				worst = max(worst, s.finds-before)
			}
			if each := float64(worst) / window; each > c.most {
				t.Errorf("%.1f look-ups a second at worst, want %.0f", each, c.most)
			}
			if n := s.asked - asked; n > 2*c.seconds+2 {
				t.Errorf("asked for changes %d times in %d s", n, c.seconds)
			}
			t.Logf("%d look-ups, %d reads of changes in %d s", s.finds-finds, s.asked-asked, c.seconds)
		})
	}
}
