package testkit

import (
	"net/url"
	"testing"

	"github.com/tidings/tidings/internal/proxy"
)

// Proxy forwards TCP connections to a server, and disturbs them on request.
type Proxy = proxy.Proxy

// NewProxy returns a proxy to target (host:port). It ends with the test.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p, err := proxy.Start(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// withHost returns a server's address with the address of p in place of its host.
func withHost(t testing.TB, raw string, p *Proxy) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = p.Addr()
	return u.String()
}
