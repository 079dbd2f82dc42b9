// Package lease shares the partitions of a kind of work among the instances that do it.
//
// A lease is for efficiency: it keeps two instances from doing the same work, and says when one may take over from another.
// It is never what makes the work right, because a holder can be frozen past its lease and go on when it thaws. What is
// written under a lease is fenced where it is written: the relay's check of the stream's last sequence, the consumers' offsets.
//
//	         take (free or expired)            renew every TTL/5
//	free ───────────────────────────▶ held ◀──────────────┐
//	 ▲                                 │ └────────────────┘
//	 │ next heartbeat                  │ more than the fair share, because somebody joined
//	 └──────────────── draining ◀──────┘          stop, or refused: freed at once
//
// Every instance is a row of lease_members with an expiry, so that all know how many they are; the fair share is the number of
// partitions divided by that, and at least one: a lone partition stays with its holder until it stops or dies. Share changes the
// partitions at any time: those that are gone are given up like a surplus, and an instance that shares none counts for nobody.
//
// An instance that cannot serve a partition refuses it: another one takes it, beyond its fair share if need be, and gives up one in return. For a minute the
// first does not take it back, and the other does not refuse it.
//
// Time is the database's, except for one thing: an instance trusts its leases until a TTL after the
// *start* of the attempt that renewed them, less a margin, by its own monotonic clock. That ends before the row expires
// however long the attempt took, and a moved wall clock changes nothing.
package lease
