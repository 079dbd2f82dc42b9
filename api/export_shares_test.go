package api

import "github.com/tidings/tidings/internal/shares"

// Shrink gives the API's pools of requests and of documents so few places that a test can take them
// all.
func (h *Handler) Shrink(places int64) {
	g := h.Handler.(*router).base.gate
	g.arrived, g.documents = shares.NewPool(shares.Arrived, places), shares.NewPool(shares.Documents, places)
}
