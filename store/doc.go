// Package store is the write model: edges (follows), children (comments) and the settings of
// threads. It also has the one reader of the truth's states (truth.go), which reads all of them
// page by page, or some by reference. It is for the API and for operators' commands. It may change
// in any release.
//
// Each write commits its state and its event in one transaction. It writes the state row first,
// which takes the entity's lock. The outbox row follows and goes to the server together with
// COMMIT:
//
//	Follow      (none) ──▶ ACTIVE v1        Unfollow   ACTIVE ──▶ REMOVED        a write that changes nothing makes no event
//	            REMOVED ──▶ ACTIVE
//	Create      (none) ──▶ ACTIVE v1        NONE, or PENDING in a premoderated thread
//	Edit        ACTIVE ──▶ ACTIVE           while NONE, APPROVED or PENDING
//	Delete      ACTIVE ──▶ DELETED          final; the row, its body and its replies remain
//	Moderate    any ──▶ APPROVED, HIDDEN, REMOVED or PENDING, while ACTIVE: an axis of its own
//	SetThreads  (none) ──▶ v1 ──▶ v2 ...    versions are kept (package versioned)
//
// The write functions take a slice of one tenant's writes and return one outcome per item. A
// refused item does not hold back the others. A returned error means that the whole transaction
// failed and wrote nothing, except that after a postgres.ErrUnknown it may have committed. Items
// that write the same entity are applied in the slice's order.
//
// Concurrent single writes (slices of one) share transactions, per tenant and kind (group.go). A
// caller whose context ends stops waiting, but its write may still commit.
//
// Each statement locks rows in the order of their keys, so two slices never deadlock. A put of
// edges to children locks the children first (targets.go). Statements about children wait for those
// on the shelf before the others.
//
// An edge leads to a child only while the child's body travels (event.BodyTravels); other edges
// lead to any id. An erasure of a child has the edges to it removed. A deletion or a decision of a
// moderator leaves them.
//
// The package does not authorize: a token acts for every user of its tenant. It does not read
// lists, which are projections.
package store
