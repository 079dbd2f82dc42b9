package daemon

import (
	"net"
	"net/http"
	"sync"
)

// limitedListener accepts a connection when it has a slot for it. The server says when one ends; the connections themselves are passed
// on as they are, because the server looks at their type.
type limitedListener struct {
	net.Listener
	slots  chan struct{}
	once   sync.Once
	closed chan struct{}
}

// Accept waits for a slot, then for a connection.
func (l *limitedListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
	}
	return c, err
}

// Close also ends the wait for a slot.
func (l *limitedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// follow frees the slots of connections that end.
func (l *limitedListener) follow(_ net.Conn, state http.ConnState) {
	if state == http.StateClosed || state == http.StateHijacked {
		<-l.slots
	}
}
