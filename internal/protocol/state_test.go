package protocol

import (
	"fmt"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/outbox"
)

// Mutant is a seeded fault of the protocol.
type Mutant uint8

// The mutants. The explorer finds each.
const (
	NoMutant         Mutant = iota
	NoExpected              // the stream accepts a publish whatever sequence it names
	MarkBeforeAck           // a row is marked when it is sent
	UnknownIsFailure        // a lost answer counts as "not published": the relay takes the stream's end and sends again
	NoPredecessors          // a relay opens a partition whose predecessors are not closed
	OffsetOutside           // a consumer commits its offset after the transaction that applies
)

// Bounds are the bounds of an exploration.
type Bounds struct {
	Relays, Readers int // processes, each with one partition at a time
	Rows            int // rows 1 to Rows; two slots take turns
	Partitions      int // open at the beginning: 1 or 2
	Late            int // publishes that the network may keep, and deliver late or again
	Resize, Loss    bool
	Mutant          Mutant
}

const (
	maxParts, maxRows, maxLen, maxProcs, maxLate = 4, 4, 7, 2, 3

	closingMessage = 9
)

// part is a row of outbox_partitions.
type part struct {
	exists, closing, closed, fenced bool
	tail, first, last               uint8 // the slots are halves of all: 0 and 1
	after                           uint8 // one bit per predecessor
}

// stream holds row ids, or closingMessage.
type stream struct {
	n        uint8
	messages [maxLen]uint8
}

// row is a row of outbox_messages.
type row struct {
	committed, marked, lost bool // lost: a repair made it pending again
	part, seq               uint8
	applied                 uint8
}

type phase uint8

const (
	idle phase = iota
	bound
	compared
	ready
	claimed
	sent
	acked
	closes
	opened
	fetched
	applied
)

// relay is a writer of one partition.
type relay struct {
	at                         phase
	part                       uint8
	stored, tail, last         uint8
	row                        uint8 // claimed
	mark, markSeq              uint8 // published, not marked
	closing, answered, refused bool
	try                        uint8 // the publish in flight, as its place in late plus 1
}

// publish is a message in the network.
type publish struct {
	used            bool
	part, row, tail uint8
}

// offset is a consumer's row for a stream.
type offset struct {
	seq, message uint8
	closed       bool
}

type reader struct {
	at         phase
	part       uint8
	from, item uint8
}

type state struct {
	parts   [maxParts]part
	streams [maxParts]stream
	rows    [maxRows + 1]row
	relays  [maxProcs]relay
	late    [maxLate]publish
	offsets [maxParts]offset
	readers [maxProcs]reader
	resized bool
	damaged uint8 // the partition that lost its end, plus 1
	left    uint8
	repair  uint8 // its steps done
	wrong   bool  // a consumer applied a row again or out of order
}

func (b Bounds) first() state {
	var s state
	for i := range b.Partitions {
		s.parts[i] = part{exists: true, first: uint8(i), last: uint8(i)}
	}
	if b.Partitions == 1 {
		s.parts[0].last = 1
	}
	return s
}

func slot(row uint8) uint8 { return (row - 1) % 2 }

func (p *part) has(row uint8) bool { return p.first <= slot(row) && slot(row) <= p.last }

// layout returns the partitions as the code reads them.
func (s *state) layout() (all []outbox.Partition) {
	const half = event.Slots / 2
	for i := range s.parts {
		p := &s.parts[i]
		if !p.exists {
			continue
		}
		o := outbox.Partition{Number: i, FirstSlot: int(p.first) * half, LastSlot: int(p.last)*half + half - 1, Stream: "bound",
			Created: time.Unix(1, 0), Tail: uint64(p.tail), Closing: p.closing, Closed: p.closed}
		if p.fenced {
			o.Created = time.Unix(0, 0).UTC()
		}
		for n := range i {
			if p.after&(1<<n) != 0 {
				o.After = append(o.After, n)
			}
		}
		all = append(all, o)
	}
	return all
}

// check returns the invariant that s breaks, or "".
func (b Bounds) check(s *state) string {
	if s.wrong {
		return "a consumer applied a row again or out of order"
	}
	var last [2]uint8
	for i := range s.streams {
		st := &s.streams[i]
		for q := range st.n {
			m := st.messages[q]
			if m == closingMessage {
				continue
			}
			if s.damaged == 0 && m <= last[slot(m)] {
				return fmt.Sprintf("row %d is on the streams twice or out of order", m)
			}
			last[slot(m)] = m
		}
		if p := &s.parts[i]; st.n > 0 && p.exists {
			for o := range i {
				if e := &s.streams[o]; s.damaged != uint8(o)+1 && s.parts[o].first <= p.last && p.first <= s.parts[o].last &&
					(e.n == 0 || e.messages[e.n-1] != closingMessage) {
					return fmt.Sprintf("partitions %d and %d are open and share a slot", o, i)
				}
			}
		}
	}
	if s.damaged != 0 {
		return ""
	}
	for id := 1; id <= b.Rows; id++ {
		if r := &s.rows[id]; r.marked {
			if st := &s.streams[r.part]; r.seq > st.n || st.messages[r.seq-1] != uint8(id) {
				return fmt.Sprintf("row %d is marked and not on the stream", id)
			}
		}
	}
	return ""
}

// final reports that all is published, marked and, if there are consumers, applied. A resize or a
// repair that began has ended.
func (b Bounds) final(s *state) bool {
	for id := 1; id <= b.Rows; id++ {
		r := &s.rows[id]
		st := &s.streams[r.part]
		if !r.marked || b.Readers > 0 && r.applied == 0 || r.seq > st.n || st.messages[r.seq-1] != uint8(id) {
			return false
		}
	}
	for i := range s.parts {
		if p := &s.parts[i]; p.closing && !p.closed {
			return false
		}
	}
	return s.damaged == 0 || s.repair == 0 || s.repair == repaired // a late publish can bring the lost message back
}
