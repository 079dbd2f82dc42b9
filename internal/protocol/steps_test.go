package protocol

import "github.com/tidings/tidings/outbox"

const repaired = 5

type emit func(step string, to state)

// next calls out for each step that is possible in s.
func (b Bounds) next(s *state, out emit) {
	for id := 1; id <= b.Rows; id++ {
		if !s.rows[id].committed {
			t := *s
			t.rows[id].committed = true
			out("a writer commits a row", t)
			break
		}
	}
	active := outbox.Active(s.layout())
	for i := range b.Relays {
		if s.relays[i].at != idle {
			t := *s
			t.relays[i] = relay{}
			out("a relay dies, or ends its writer", t)
		}
		b.relay(s, i, active, out)
	}
	for i := range b.Late {
		if s.late[i].used {
			b.deliver(s, i, out)
		}
	}
	for i := range b.Readers {
		if s.readers[i].at != idle {
			t := *s
			t.readers[i] = reader{}
			out("a consumer dies, or ends its reader", t)
		}
		b.reader(s, i, out)
	}
	if b.Resize && !s.resized && s.damaged == 0 {
		out("resize", s.resize())
	}
	if st := &s.streams[0]; b.Loss && s.damaged == 0 && st.n > 0 && !s.parts[0].closed && s.parts[0].tail == st.n {
		t := *s
		t.damaged = 1
		t.streams[0].n--
		t.streams[0].messages[t.streams[0].n] = 0
		out("a stream loses its last message", t)
	}
	if s.damaged != 0 {
		s.stepRepair(out)
	}
}

// relay does one step of a writer (relay/writer.go).
func (b Bounds) relay(s *state, i int, active []outbox.Partition, out emit) {
	t := *s
	w := &t.relays[i]
	p, st := &t.parts[w.part], &t.streams[w.part]
	switch w.at {
	case idle:
		if b.Mutant == NoPredecessors {
			active = s.layout()
		}
		for _, a := range active {
			if a.Closed || a.Replaced() {
				continue
			}
			*w = relay{at: bound, part: uint8(a.Number), stored: uint8(a.Tail)}
			out("a relay reads its partition", t)
		}
	case bound: // the stream's end, refused if it is before the stored tail
		if w.last = st.n; w.last < w.stored {
			*w = relay{}
		} else {
			w.at = compared
		}
		out("a relay compares the stream with the stored tail", t)
	case compared:
		t.record(w)
		out("a relay marks what the stream has after the stored tail", t)
	case ready:
		b.exchange(&t, w)
		out("a relay marks and claims", t)
	case claimed:
		b.send(&t, w, out)
	case sent:
		if w.answered {
			t.answer(w)
			out("a relay reads the answer", t)
		}
		t = *s
		if w.try = 0; b.Mutant == UnknownIsFailure && w.row != closingMessage {
			w.at, w.answered, w.refused, w.tail = claimed, false, false, st.n
		} else {
			*w = relay{}
		}
		out("an answer is lost: the outcome is unknown", t)
	case closes:
		if p.tail == w.stored && p.closing && !p.closed {
			p.tail, p.closed = w.tail, true
		}
		*w = relay{}
		out("a relay records that the partition is closed", t)
	}
}

// fits reports whether a mark of w finds the tail, and the stream, that it expects (markSQL).
func (s *state) fits(w *relay) bool {
	p := &s.parts[w.part]
	return p.tail == w.stored && !p.fenced && !p.closed
}

// record is MarkCaughtUp: the first message of a row counts.
func (s *state) record(w *relay) {
	st := &s.streams[w.part]
	if !s.fits(w) || w.last > st.n {
		*w = relay{}
		return
	}
	tail := w.stored
	for ; tail < w.last; tail++ {
		m := st.messages[tail]
		if m == closingMessage {
			s.parts[w.part].tail, w.stored, w.tail, w.at = tail, tail, tail+1, closes
			return
		}
		if r := &s.rows[m]; !r.marked {
			r.marked, r.part, r.seq = true, w.part, tail+1
		}
	}
	s.parts[w.part].tail = tail
	w.stored, w.tail, w.last, w.at = tail, tail, 0, ready
}

// exchange is one transaction: the mark, the claim and the stored tail (outbox.Exchange).
func (b Bounds) exchange(s *state, w *relay) {
	p := &s.parts[w.part]
	if w.mark > 0 {
		if !s.fits(w) || s.rows[w.mark].marked && b.Mutant != MarkBeforeAck {
			*w = relay{}
			return
		}
		r := &s.rows[w.mark]
		r.marked, r.part, r.seq = true, w.part, w.markSeq
		p.tail, w.stored, w.mark, w.markSeq = w.markSeq, w.markSeq, 0, 0
	}
	if p.closed || p.tail != w.stored {
		*w = relay{}
		return
	}
	if w.closing = p.closing; w.closing { // the claimed rows are for the successors
		w.row, w.at = closingMessage, claimed
		return
	}
	for id := 1; id <= b.Rows; id++ {
		if r := &s.rows[id]; r.committed && !r.marked && p.has(uint8(id)) {
			w.row, w.at = uint8(id), claimed
			return
		}
	}
}

// send puts a publish that names the tail into the network.
func (b Bounds) send(s *state, w *relay, out emit) {
	for i := range b.Late {
		if !s.late[i].used {
			s.late[i] = publish{used: true, part: w.part, row: w.row, tail: w.tail}
			w.at, w.try = sent, uint8(i)+1
			if r := &s.rows[min(int(w.row), maxRows)]; b.Mutant == MarkBeforeAck && w.row != closingMessage {
				r.marked, r.part, r.seq = true, w.part, w.tail+1
			}
			out("a relay publishes and names the tail", *s)
			return
		}
	}
}

// answer is a plain ack, or a refusal, after which the relay catches up.
func (s *state) answer(w *relay) {
	switch {
	case w.refused:
		*w = relay{}
	case w.row == closingMessage:
		w.tail++
		*w = relay{at: closes, part: w.part, stored: w.stored, tail: w.tail}
	default:
		w.tail++
		*w = relay{at: ready, part: w.part, stored: w.stored, tail: w.tail, mark: w.row, markSeq: w.tail}
	}
}

// deliver is the stream's part. The network may drop a publish, and deliver it again.
func (b Bounds) deliver(s *state, i int, out emit) {
	t := *s
	forget := func(t *state) {
		t.late[i] = publish{}
		for n := range t.relays {
			if w := &t.relays[n]; w.try == uint8(i)+1 {
				w.try = 0
			}
		}
	}
	forget(&t)
	out("the network drops a publish", t)
	t = *s
	m, st := t.late[i], &t.streams[t.late[i].part]
	accepted := (st.n == m.tail || b.Mutant == NoExpected) && st.n < maxLen
	if accepted {
		st.messages[st.n] = m.row
		st.n++
	}
	for n := range t.relays {
		if w := &t.relays[n]; w.at == sent && w.try == uint8(i)+1 && !w.answered {
			w.answered, w.refused = true, !accepted
		}
	}
	out("the stream takes or refuses a publish, which may come again", t)
	forget(&t)
	out("the stream takes or refuses a publish", t)
}

// resize replaces the open partitions: two by one, or one by two (outbox.Resize).
func (s *state) resize() state {
	t := *s
	t.resized = true
	if t.parts[1].exists {
		t.parts[2] = part{exists: true, first: 0, last: 1, after: 3}
		t.parts[0].closing, t.parts[1].closing = true, true
		return t
	}
	t.parts[1], t.parts[2] = part{exists: true, after: 1}, part{exists: true, first: 1, last: 1, after: 1}
	t.parts[0].closing = true
	return t
}

// stepRepair does one step of the repair of a stream that lost its end (relay/repair.go, replace).
func (s *state) stepRepair(out emit) {
	t := *s
	lost := int(t.damaged - 1)
	p, st := &t.parts[lost], &t.streams[lost]
	switch t.repair {
	case 0: // stepBack and outbox.Replace
		if st.n >= p.tail && !p.fenced {
			return // nothing to see: a late publish brought the message back
		}
		t.left = st.n
		for ; t.left > 0; t.left-- {
			m := st.messages[t.left-1]
			if m != closingMessage && t.rows[m].marked && int(t.rows[m].part) == lost && t.rows[m].seq == t.left {
				break
			}
		}
		p.fenced, p.tail, p.closing = true, t.left, true
		if len(outbox.Successors(t.layout(), lost)) == 0 {
			n := 0
			for t.parts[n].exists {
				n++
			}
			t.parts[n] = part{exists: true, first: p.first, last: p.last, after: 1 << lost}
		}
	case 1: // outbox.Restore
		for id := range t.rows {
			if r := &t.rows[id]; r.marked && int(r.part) == lost && r.seq > t.left {
				r.marked, r.lost, r.part, r.seq = false, true, 0, 0
			}
		}
	case 2: // end
		if st.n == 0 || st.messages[st.n-1] != closingMessage {
			st.messages[st.n] = closingMessage
			st.n++
		}
	case 3: // outbox.Close
		p.tail, p.closed = st.n, true
	case 4, repaired: // consumers.Rebase; a repair may run again, because a consumer can move its offset after the first
		o := &t.offsets[lost]
		if t.repair == repaired && (o.seq < t.left || o.closed) {
			return
		}
		o.closed = o.closed || o.seq >= t.left
		t.repair = repaired - 1
	}
	t.repair++
	out("a repair does its next step", t)
}

// reader does one step of a consumer (consumers/session.go, consumers/apply.go).
func (b Bounds) reader(s *state, i int, out emit) {
	t := *s
	r := &t.readers[i]
	o := &t.offsets[r.part]
	switch st := &t.streams[r.part]; r.at {
	case idle:
		for n := range s.parts {
			if s.mayOpen(n) {
				*r = reader{at: opened, part: uint8(n), from: s.offsets[n].seq}
				out("a consumer opens a stream at its offset", t)
			}
		}
	case opened, applied:
		if r.at == applied { // only of the mutant
			o.seq, o.message, o.closed = r.from+1, r.item, r.item == closingMessage
			r.from, r.item, r.at = r.from+1, 0, opened
			out("a consumer commits its offset", t)
			return
		}
		if r.from < st.n {
			r.item, r.at = st.messages[r.from], fetched
			out("a consumer fetches", t)
		}
	case fetched:
		if o.seq != r.from || o.closed {
			*r = reader{}
			out("a consumer finds its offset moved", t)
			return
		}
		if r.item != closingMessage {
			t.apply(r.item)
		}
		if b.Mutant == OffsetOutside {
			r.at = applied
			out("a consumer applies", t)
			return
		}
		o.seq, o.message, o.closed = r.from+1, r.item, r.item == closingMessage
		r.from, r.item, r.at = r.from+1, 0, opened
		if o.closed {
			*r = reader{}
		}
		out("a consumer applies and moves its offset", t)
	}
}

// mayOpen reports whether a consumer can continue a stream: its predecessors are applied to their
// ends, and the message at the offset is the one that was applied (reader.open, lost).
func (s *state) mayOpen(n int) bool {
	p, o, st := &s.parts[n], &s.offsets[n], &s.streams[n]
	if !p.exists || o.closed || o.seq > st.n || o.seq == st.n || o.seq > 0 && st.messages[o.seq-1] != o.message {
		return false
	}
	for before := range n {
		if p.after&(1<<before) != 0 && !s.offsets[before].closed {
			return false
		}
	}
	return true
}

// apply applies a row. After a loss a row may come again.
func (s *state) apply(id uint8) {
	r := &s.rows[id]
	if s.damaged == 0 {
		s.wrong = s.wrong || r.applied > 0
		for later := id + 1; later <= maxRows; later++ {
			s.wrong = s.wrong || slot(later) == slot(id) && s.rows[later].applied > 0
		}
	}
	r.applied = 1
}
