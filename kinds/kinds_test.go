package kinds_test

import (
	"testing"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

func TestTheBuiltInKindsAreThere(t *testing.T) {
	s := kinds.Builtin()
	if len(s.AllEdges()) != 6 || len(s.AllChildren()) != 3 {
		t.Fatalf("%d kinds of edges, %d of children", len(s.AllEdges()), len(s.AllChildren()))
	}
	if got, want := s.Edges["follow"].Names(), (event.EdgeNames{From: "follower_id", To: "followee_id"}); got != want {
		t.Errorf("a follow names %v, want %v", got, want)
	}
	if got, want := s.Children["review"].Names(), (event.ChildNames{ID: "review_id", Parent: "product_id"}); got != want {
		t.Errorf("a review names %v, want %v", got, want)
	}
}
