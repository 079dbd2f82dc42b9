// Package store is the write model: follows, comments and the settings of threads. It has the one reader of the truth's states, too
// (truth.go): all of them page after page, or some by reference.
//
// Each write commits its state and its event in one transaction, the state row first (which takes the entity's lock), then the
// outbox row, which goes to the server together with COMMIT:
//
//	Follow      (none) ──▶ ACTIVE v1        Unfollow   ACTIVE ──▶ REMOVED        a write that changes nothing makes no event
//	            REMOVED ──▶ ACTIVE
//	Create      (none) ──▶ ACTIVE v1        NONE, or PENDING in a premoderated thread
//	Edit        ACTIVE ──▶ ACTIVE           while NONE, APPROVED or PENDING
//	Delete      ACTIVE ──▶ DELETED          final; the row, its body and its replies stay
//	Moderate    any ──▶ APPROVED, HIDDEN, REMOVED or PENDING, while ACTIVE: an axis of its own
//	SetThreads  (none) ──▶ v1 ──▶ v2 ...    versions are kept (package versioned)
//
// The write functions take slices of one tenant's writes and return one outcome per item: an item that is refused does not
// hold back the others. Their error says that the transaction as a whole failed, and then nothing was written, unless it is a
// postgres.ErrUnknown. Items of a slice that write the same entity are applied in the slice's order.
//
// Single writes (slices of one) that come at the same time share transactions, tenant by tenant and kind by kind (group.go). A
// caller whose context ends stops waiting; its write may be done all the same.
//
// Rows are locked in the order of their keys, so two slices never wait for each other in a circle.
//
// The package does not authorise: a token acts for every user of its tenant. It does not read lists, which are projections.
package store
