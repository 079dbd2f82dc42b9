package daemon

import (
	"container/list"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// maxConnections bounds the connections of a port, and so their memory: some 50 KiB each.
const maxConnections = 4096

// slowOpener is how long a connection may take to bring its first request before it goes first when the port is full.
const slowOpener = time.Second

// connections is a listener that bounds the open connections, of all and of each address. A connection on which a request is under way is
// safe. When the port is full another one ends: one of the address that has most, there the oldest that has brought no request for slowOpener, else the
// one that has been idle for longest, else the oldest without a request. When requests are under way on all of them, new ones wait. An address
// that is at its bound loses one of its own in the same order, or gets no other one. The addresses of an IPv6 network of 64 bits count as one.
type connections struct {
	net.Listener
	most, perAddress int
	log              *slog.Logger

	once   sync.Once
	closed chan struct{}
	ended  chan struct{} // holds a signal when a connection has ended, or become idle

	mu     sync.Mutex
	open   map[net.Conn]*connection
	of     map[netip.Prefix]*address
	ousted int // since the last line in the log
	said   time.Time
}

// address has the connections of one client.
type address struct {
	open        int
	fresh, idle list.List // those on which no request is under way, the longest one first
}

// connection is one that is open.
type connection struct {
	net.Conn
	from    netip.Prefix
	since   time.Time
	in      *list.List // that it waits in; nil while a request is under way
	element *list.Element
}

func newConnections(l net.Listener, most, perAddress int, log *slog.Logger) *connections {
	return &connections{
		Listener: l, most: most, perAddress: perAddress, log: log, closed: make(chan struct{}), ended: make(chan struct{}, 1),
		open: make(map[net.Conn]*connection), of: make(map[netip.Prefix]*address),
	}
}

// Accept returns the next connection for which there is room.
func (l *connections) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if _, encrypted := c.(*tls.Conn); !encrypted { // at whose type the server looks
			c = &plainConn{Conn: c}
		}
		for {
			taken, full := l.take(c)
			if taken {
				return c, nil
			}
			if !full {
				_ = c.Close() // of a client that has enough
				break
			}
			select {
			case <-l.ended:
			case <-l.closed:
				_ = c.Close() // nothing was said on it
				return nil, net.ErrClosed
			}
		}
	}
}

// Close also ends the wait for room.
func (l *connections) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// take adds a connection, in the place of another one if need be. full: there may be room later.
func (l *connections) take(c net.Conn) (taken, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	from := prefixOf(c.RemoteAddr())
	if a := l.of[from]; a != nil && a.open >= l.perAddress {
		n := a.first()
		if n == nil {
			return false, false
		}
		l.oust(n)
	} else if len(l.open) >= l.most {
		n := l.first()
		if n == nil {
			return false, true
		}
		l.oust(n)
	}
	a := l.of[from]
	if a == nil {
		a = new(address)
		l.of[from] = a
	}
	a.open++
	n := &connection{Conn: c, from: from}
	l.open[c] = n
	n.wait(&a.fresh)
	return true, false
}

// first is the connection of the address that goes first, nil for none.
func (a *address) first() *connection {
	e := a.fresh.Front()
	if e == nil || time.Since(e.Value.(*connection).since) < slowOpener && a.idle.Len() > 0 {
		e = a.idle.Front()
	}
	if e == nil {
		return nil
	}
	return e.Value.(*connection)
}

// first is the connection of all addresses that goes first, nil for none. It costs a look at each address, of a port that is full.
func (l *connections) first() (first *connection) {
	most := 0
	for _, a := range l.of {
		if n := a.first(); n != nil && (a.open > most || a.open == most && n.since.Before(first.since)) {
			first, most = n, a.open
		}
	}
	return first
}

func (n *connection) wait(in *list.List) {
	n.work()
	n.since, n.in, n.element = time.Now(), in, in.PushBack(n)
}

func (n *connection) work() {
	if n.in != nil {
		n.in.Remove(n.element)
		n.in = nil
	}
}

func (l *connections) oust(n *connection) {
	l.forget(n)
	if encrypted, ok := n.Conn.(*tls.Conn); ok {
		_ = encrypted.NetConn().Close() // without a goodbye, which may have to wait
	} else {
		_ = n.Conn.Close() // nobody waits for anything on it
	}
	if l.ousted++; time.Since(l.said) >= time.Minute {
		l.log.Warn("the port, or an address, has as many connections as it may: closing those without a request", "connections", len(l.open)+1, "closed", l.ousted)
		l.said, l.ousted = time.Now(), 0
	}
}

func (l *connections) forget(n *connection) {
	n.work()
	delete(l.open, n.Conn)
	if a := l.of[n.from]; a.open > 1 {
		a.open--
	} else {
		delete(l.of, n.from)
	}
}

// follow is what the server says of a connection.
func (l *connections) follow(c net.Conn, state http.ConnState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.open[c]
	if n == nil {
		return // ousted
	}
	switch state {
	case http.StateActive:
		n.work()
		return
	case http.StateIdle:
		n.wait(&l.of[n.from].idle)
	case http.StateClosed, http.StateHijacked:
		l.forget(n)
	default:
		return
	}
	select {
	case l.ended <- struct{}{}:
	default:
	}
}

// prefixOf is the network that counts as one client.
func prefixOf(a net.Addr) netip.Prefix {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := tcp.AddrPort().Addr().Unmap().WithZone("")
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits) // of a valid address
	return p
}
