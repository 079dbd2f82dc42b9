package relay

import (
	"slices"

	"github.com/tidings/tidings/outbox"
)

// horizon knows which ids of a partition need no further look, although ids do not commit in their order (docs/adr/0004-floor.md).
//
// After a claim no row up to taken that the claim could see is left. So a row up to there comes from a transaction that ran then, and one up
// to a sample's id from a transaction below the sample's. While all of these run, the next claim may begin behind the sample; where there are none, behind
// it for ever, and the floor follows.
type horizon struct {
	floor   int64            // no row up to here is pending, unless it waits for its time: the next mark may store it
	taken   int64            // as of the last claim
	running []uint64         // transactions when the last claim began, ascending
	xmax    uint64           // any other below it had ended
	samples []outbox.Horizon // ascending; of those with the same transactions running below them only the last
}

// claimed takes in a claim, and raises the floor, but not past the rows of inHand, which are not marked yet.
func (h *horizon) claimed(c *outbox.Claimed, inHand ...[]outbox.Row) {
	h.taken, h.running, h.xmax = c.Upto, c.Running, c.Xmax
	kept := h.samples[:0]
	for i, s := range h.samples {
		if i+1 < len(h.samples) && h.samples[i+1].XID <= h.xmax && h.below(s.XID) == h.below(h.samples[i+1].XID) {
			continue // the next one says more
		}
		kept = append(kept, s)
	}
	h.samples = kept
	if len(kept) > 0 && kept[0].XID <= h.xmax && h.below(kept[0].XID) == 0 {
		floor := min(kept[0].LastID, h.taken)
		for _, rows := range inHand {
			for i := range rows {
				if !rows[i].Delayed {
					floor = min(floor, rows[i].OutboxID-1)
				}
			}
		}
		h.floor = max(h.floor, floor)
	}
	if c.Sample != (outbox.Horizon{}) {
		h.samples = append(h.samples, c.Sample)
	}
}

// below returns how many of the running transactions are below xid.
func (h *horizon) below(xid uint64) int {
	n, _ := slices.BinarySearch(h.running, xid)
	return n
}

// begin returns behind which id the next claim may begin, and which transactions must still run for that.
func (h *horizon) begin() (above int64, open []outbox.Open) {
	above = h.floor
	for _, s := range h.samples {
		if s.XID > h.xmax { // of those between the two nobody knows
			break
		}
		for _, xid := range h.running[len(open):h.below(s.XID)] {
			open = append(open, outbox.Open{XID: xid, Above: above})
		}
		above = max(above, min(s.LastID, h.taken))
	}
	return above, open
}
