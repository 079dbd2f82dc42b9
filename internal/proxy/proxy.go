package proxy

import (
	"net"
	"sync"
	"time"
)

// Proxy forwards TCP connections to a server, and disturbs them on request.
type Proxy struct {
	listener net.Listener
	passing  sync.WaitGroup

	mu      sync.Mutex
	target  string        // for new connections
	changed chan struct{} // closed and replaced by every change of the fields below
	refuse  bool
	delay   time.Duration // each way
	stalled bool
	links   map[*link]lost
}

// lost is the direction that a link has stopped forwarding. The link stays open.
type lost int

const (
	nothing lost = iota
	answers      // from the server
	everything
)

// link is one connection through the proxy.
type link struct {
	client, server net.Conn
	once           sync.Once
	done           chan struct{}
}

func (l *link) close() {
	l.once.Do(func() {
		close(l.done)
		for _, c := range []net.Conn{l.client, l.server} {
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0) // a reset, as from a router that forgot the connection
			}
			_ = c.Close() // it may have ended by itself
		}
	})
}

// Start returns a proxy to target (host:port), on a port of its own on loopback.
func Start(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{target: target, listener: l, changed: make(chan struct{}), links: map[*link]lost{}}
	p.passing.Go(p.accept)
	return p, nil
}

// Close resets all connections and ends the proxy.
func (p *Proxy) Close() {
	_ = p.listener.Close() // ends accept
	p.Cut()
	p.passing.Wait()
}

// Addr returns the address for clients, host:port.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.passing.Go(func() { p.open(client) })
	}
}

func (p *Proxy) open(client net.Conn) {
	l := &link{client: client, done: make(chan struct{})}
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	server, err := net.DialTimeout("tcp", target, 2*time.Second)
	if err == nil {
		l.server = server
	} else {
		l.server = client // closing it twice is harmless
	}
	p.mu.Lock()
	if err != nil || p.refuse {
		p.mu.Unlock()
		l.close()
		return
	}
	p.links[l] = nothing
	p.mu.Unlock()
	p.passing.Go(func() { p.pass(l, l.server, l.client, answers) })
	p.pass(l, l.client, l.server, everything)
	<-l.done
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// chunk is the data of one read, and its time.
type chunk struct {
	data []byte
	read time.Time
}

// pass copies data from one connection to the other. It delays each chunk without limiting the
// rate, and stops copying when the link has lost until or more.
func (p *Proxy) pass(l *link, from, to net.Conn, until lost) {
	chunks := make(chan chunk, 256)
	p.passing.Go(func() {
		defer l.close()
		for c := range chunks {
			if !p.hold(l, c.read, until) {
				return
			}
			if _, err := to.Write(c.data); err != nil {
				return
			}
		}
	})
	defer close(chunks)
	for {
		buf := make([]byte, 32<<10)
		n, err := from.Read(buf)
		if n > 0 {
			select {
			case chunks <- chunk{buf[:n], time.Now()}:
			case <-l.done:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// precise is the rest of a delay that hold leaves to nap: a timer of the runtime is up to a
// millisecond late.
const precise = time.Millisecond

// hold waits until a chunk may be forwarded, and returns true. It returns false if the link ends
// first.
func (p *Proxy) hold(l *link, read time.Time, until lost) bool {
	for {
		p.mu.Lock()
		wait, held, changed := time.Until(read.Add(p.delay)), p.stalled || p.links[l] >= until, p.changed
		p.mu.Unlock()
		if !held && wait <= 0 {
			return true
		}
		if !held && wait < precise {
			nap(wait)
			continue
		}
		var due <-chan time.Time
		if !held {
			due = time.After(wait - precise)
		}
		select {
		case <-changed:
		case <-due:
		case <-l.done:
			return false
		}
	}
}

func (p *Proxy) change(set func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	set()
	close(p.changed)
	p.changed = make(chan struct{})
}

// Cut resets all connections and refuses new ones.
func (p *Proxy) Cut() {
	p.change(func() {
		p.refuse = true
		for l := range p.links {
			l.close()
		}
	})
}

// Redirect resets all connections, and forwards new ones to another server (host:port).
func (p *Proxy) Redirect(target string) {
	p.change(func() {
		p.target = target
		for l := range p.links {
			l.close()
		}
	})
}

// Slow delays all data by d in each direction.
func (p *Proxy) Slow(d time.Duration) { p.change(func() { p.delay = d }) }

// Stall keeps connections open, accepts new ones, and forwards no data.
func (p *Proxy) Stall() { p.change(func() { p.stalled = true }) }

// Lose stalls the existing connections forever. It forwards new ones.
func (p *Proxy) Lose() { p.lose(everything) }

// LoseAnswers is Lose for the server's data only: the clients' data still arrives.
func (p *Proxy) LoseAnswers() { p.lose(answers) }

func (p *Proxy) lose(what lost) {
	p.change(func() {
		for l := range p.links {
			p.links[l] = what
		}
	})
}

// Heal undoes Cut, Slow and Stall. Stalled data is forwarded.
func (p *Proxy) Heal() { p.change(func() { p.refuse, p.delay, p.stalled = false, 0, false }) }
