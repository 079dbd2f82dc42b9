package testkit

import (
	"net/url"
	"testing"
)

// Gate returns the URL of a server behind a proxy that refuses connections until open is called, as
// if the server started then.
func Gate(t testing.TB, server string) (gated string, open func()) {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	p := NewProxy(t, u.Host)
	p.Cut()
	u.Host = p.Addr()
	return u.String(), p.Heal
}
