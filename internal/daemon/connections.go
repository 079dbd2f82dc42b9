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

	"github.com/tidings/tidings/internal/shares"
	"github.com/tidings/tidings/internal/socket"
)

// maxConnections limits the connections of a port, and so their memory: some 50 KiB each, beside
// what is unread.
var maxConnections = int(shares.Connections.All.N)

// slowOpener is the time within which a new connection should bring its first request. On a full
// port later ones are closed first.
const slowOpener = time.Second

// connections is a listener that limits the open connections: in total, and for each address. It
// never closes a connection with a request in progress.
//
// When the port is full, the listener closes a connection of the address that has most. It chooses
// the oldest that has brought no request for slowOpener, else the one that has been idle longest,
// else the oldest without a request. If all connections have a request in progress, new connections
// wait. An address at its own limit loses one of its connections in the same order; if all of them
// work, its new connection is closed. An IPv6 network of 64 bits counts as one address.
type connections struct {
	net.Listener
	most, perAddress int
	log              *slog.Logger

	once   sync.Once
	closed chan struct{}
	ended  chan struct{} // holds a signal when a connection ended or became idle

	mu     sync.Mutex
	open   map[net.Conn]*connection
	of     map[netip.Prefix]*address
	ousted int       // connections closed since the last log line
	said   time.Time // time of the last log line
}

// address has the connections of one client.
type address struct {
	open        int
	fresh, idle list.List // connections without a request in progress, the oldest first
}

// connection is an open connection.
type connection struct {
	net.Conn
	from    netip.Prefix
	since   time.Time
	in      *list.List // the list that has it; nil while a request is in progress
	element *list.Element
}

func newConnections(l net.Listener, most, perAddress int, log *slog.Logger) *connections {
	return &connections{
		Listener: l, most: most, perAddress: perAddress, log: log, closed: make(chan struct{}), ended: make(chan struct{}, 1),
		open: make(map[net.Conn]*connection), of: make(map[netip.Prefix]*address),
	}
}

// Accept returns the next connection when there is room for it.
func (l *connections) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		bare := c
		if encrypted, ok := c.(*tls.Conn); ok { // the HTTP server needs to see the type *tls.Conn
			bare = encrypted.NetConn()
		} else {
			c = &plainConn{Conn: socket.Quiet(c)}
		}
		// Otherwise the kernel keeps up to some megabytes for a client that does not read.
		if sized, ok := bare.(interface{ SetWriteBuffer(bytes int) error }); ok {
			_ = sized.SetWriteBuffer(int(shares.Unread.Each.N)) // on an error the client has gone
		}
		socket.DropLost(bare, shares.UnreadTime)
		for {
			taken, full := l.take(c)
			if taken {
				return c, nil
			}
			if !full {
				_ = c.Close() // this address has as many as it may
				break
			}
			select {
			case <-l.ended:
			case <-l.closed:
				_ = c.Close() // no byte was exchanged on it
				return nil, net.ErrClosed
			}
		}
	}
}

// Close closes the listener and ends a wait for room.
func (l *connections) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// take adds a connection, and closes another one if necessary. full means that room may become free
// later.
func (l *connections) take(c net.Conn) (taken, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	from := prefixOf(c.RemoteAddr())
	if a := l.of[from]; a != nil && a.open >= l.perAddress {
		n := a.first()
		if n == nil {
			return false, false
		}
		l.evict(n)
	} else if len(l.open) >= l.most {
		n := l.first()
		if n == nil {
			return false, true
		}
		l.evict(n)
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

// first returns the connection of the address that is closed first, or nil if all work.
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

// first returns the connection that is closed first, or nil if all work. It visits every address,
// but only when the port is full.
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

func (l *connections) evict(n *connection) {
	l.forget(n)
	if encrypted, ok := n.Conn.(*tls.Conn); ok {
		_ = encrypted.NetConn().Close() // without the TLS alert, whose write may block
	} else {
		_ = n.Conn.Close() // no request is in progress on it
	}
	if l.ousted++; time.Since(l.said) >= time.Minute {
		l.log.Warn("too many connections on the port or from an address: closing those without a request", "connections",
			len(l.open)+1, "closed", l.ousted)
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

// follow is the server's ConnState callback.
func (l *connections) follow(c net.Conn, state http.ConnState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.open[c]
	if n == nil {
		return // already closed
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

// prefixOf returns the network that counts as one client.
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
	p, _ := ip.Prefix(bits) // the address is valid
	return p
}
