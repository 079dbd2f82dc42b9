package relay

import (
	"slices"

	"github.com/tidings/tidings/outbox"
)

// horizon decides where a partition's next claim may begin, although ids do not commit in order
// (docs/adr/0004-floor.md).
//
// After a claim, every row up to taken that the claim could see has been handled. Any other row up
// to taken belongs to a transaction that ran at the time of the claim. Any row up to a sample's
// LastID belongs to a transaction below the sample's XID. So while all running transactions below
// XID still run, the next claim may begin above LastID. Once none of them runs, claims may
// begin above LastID forever, and the floor rises to it.
type horizon struct {
	floor   int64            // no row up to this id is pending, unless it is delayed; the next mark may store it
	taken   int64            // Claimed.Upto of the last claim
	running []uint64         // transactions at the beginning of the last claim, ascending
	xmax    uint64           // all other transactions below it had ended
	samples []outbox.Horizon // ascending; of those with the same running transactions below them only the last
}

// claimed records a claim and raises the floor. The floor remains below the rows of inHand, which
// are not marked yet.
func (h *horizon) claimed(c *outbox.Claimed, inHand ...[]outbox.Row) {
	h.taken, h.running, h.xmax = c.Upto, c.Running, c.Xmax
	kept := h.samples[:0]
	for i, s := range h.samples {
		if i+1 < len(h.samples) && h.samples[i+1].XID <= h.xmax && h.below(s.XID) == h.below(h.samples[i+1].XID) {
			continue // the next sample covers more
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

// below returns the number of running transactions below xid.
func (h *horizon) below(xid uint64) int {
	n, _ := slices.BinarySearch(h.running, xid)
	return n
}

// begin returns the id above which the next claim may begin, and the transactions that must still
// run for that.
func (h *horizon) begin() (above int64, open []outbox.Open) {
	above = h.floor
	for _, s := range h.samples {
		if s.XID > h.xmax { // whether the transactions in between run is unknown
			break
		}
		for _, xid := range h.running[len(open):h.below(s.XID)] {
			open = append(open, outbox.Open{XID: xid, Above: above})
		}
		above = max(above, min(s.LastID, h.taken))
	}
	return above, open
}
