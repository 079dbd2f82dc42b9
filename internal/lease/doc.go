// Package lease distributes the partitions of a kind of work among the instances that do it. It is
// for relay and consumers.
//
// A lease saves work: it keeps two instances from working on the same partition, and lets one take
// over from another. It never makes the work correct, because a holder can be frozen past its lease
// and resume afterwards. A fence at the place of each write does that: the relay's check of the
// stream's last sequence, and the consumers' offsets.
//
//	         take (free or expired)            renew every TTL/5
//	free ───────────────────────────▶ held ◀──────────────┐
//	 ▲                                 │ └────────────────┘
//	 │ next heartbeat                  │ above the fair share, because an instance joined
//	 └──────────────── draining ◀──────┘          stop, or refused: freed at once
//
// Every instance has a row with an expiry in lease_members, so each one can count them. The fair
// share is the number of partitions divided by the number of instances, and at least one. So a
// single partition remains with its holder until that stops or dies. Share may change the
// partitions at any time. An instance gives up removed partitions like a surplus, and an instance
// without partitions does not count.
//
// A process that joins takes what an ended process of its name and host held, and does not wait for
// the expiry. It does so once, with its first instance.
//
// An instance that cannot serve a partition refuses it. Another instance then takes it, even above
// its fair share, and gives up another partition in return. For a minute the first instance does
// not take it back, and the second one cannot refuse it.
//
// All times are the database's, with one exception. An instance trusts its leases until a TTL after
// the *start* of the attempt that renewed them, minus a margin, by its own monotonic clock. That
// moment is before the row's expiry, however long the attempt took. A change of the wall clock has
// no effect.
package lease
