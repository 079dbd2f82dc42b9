package testkit

import (
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy passes TCP connections on to a server, and disturbs them when it is told to.
type Proxy struct {
	target   string
	listener net.Listener
	passing  sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed and replaced by every change of what follows
	refuse  bool
	delay   time.Duration // each way
	stalled bool
	links   map[*link]lost
}

// lost is what a link does not pass any more. It stays open.
type lost int

const (
	nothing lost = iota
	answers      // of the server
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
				_ = tcp.SetLinger(0) // a reset, as from a router that has forgotten the connection
			}
			_ = c.Close() // it may have ended by itself
		}
	})
}

// NewProxy returns a proxy to target, host:port. It ends with the test.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{target: target, listener: l, changed: make(chan struct{}), links: map[*link]lost{}}
	p.passing.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close() // accept ends with its error
		p.Cut()
		p.passing.Wait()
	})
	return p
}

// Addr is where clients connect, host:port.
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
	server, err := net.DialTimeout("tcp", p.target, 2*time.Second)
	if err == nil {
		l.server = server
	} else {
		l.server = client // closed twice, which does no harm
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

// chunk is what one read found, and when.
type chunk struct {
	data []byte
	read time.Time
}

// pass carries what from says to to, delayed but not slowed down, until so much is lost.
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

// hold returns when a chunk that was read then may go on, and false when its link has ended instead.
func (p *Proxy) hold(l *link, read time.Time, until lost) bool {
	for {
		p.mu.Lock()
		wait, held, changed := time.Until(read.Add(p.delay)), p.stalled || p.links[l] >= until, p.changed
		p.mu.Unlock()
		if !held && wait <= 0 {
			return true
		}
		var due <-chan time.Time
		if !held {
			due = time.After(wait)
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

// Slow delays everything by d, each way.
func (p *Proxy) Slow(d time.Duration) { p.change(func() { p.delay = d }) }

// Stall keeps connections open, accepts new ones, and passes nothing.
func (p *Proxy) Stall() { p.change(func() { p.stalled = true }) }

// Lose stalls the connections that there are for ever; new ones are passed.
func (p *Proxy) Lose() { p.lose(everything) }

// LoseAnswers is Lose of what the server says: what clients say still arrives.
func (p *Proxy) LoseAnswers() { p.lose(answers) }

func (p *Proxy) lose(what lost) {
	p.change(func() {
		for l := range p.links {
			p.links[l] = what
		}
	})
}

// Heal undoes Cut, Slow and Stall: what was stalled goes on.
func (p *Proxy) Heal() { p.change(func() { p.refuse, p.delay, p.stalled = false, 0, false }) }
