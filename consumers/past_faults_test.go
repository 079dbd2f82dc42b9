//go:build faults

package consumers_test

import (
	"testing"

	"github.com/tidings/tidings/consumers"
)

func TestNoConsumerIsStrandedByALeaderThatForgets(t *testing.T) {
	t.Parallel()
	r, p, js := inPast(t)
	p.Forget("INFO", 2)
	stranded, err := consumers.Stranded(t.Context(), r.system, js, r.cfg, name)
	if err != nil || len(stranded) > 0 {
		t.Errorf("%v, %v", stranded, err)
	}
}
