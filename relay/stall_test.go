package relay

import (
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestACatchUpThatGetsNoAnswerGivesUp(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATSProcess(t)
	s, err := newRelay(t, pool, b).connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer s.nc.Close()
	b.Freeze(t)
	begun := time.Now()
	if _, err := s.catchUp(t.Context(), 0); err == nil || time.Since(begun) > 2*s.cfg.PublishTimeout {
		t.Errorf("%v after %s: want an error within twice the publish timeout", err, time.Since(begun))
	}
}
