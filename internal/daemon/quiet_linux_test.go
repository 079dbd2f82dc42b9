//go:build !race

package daemon

import (
	"crypto/tls"
	"log/slog"
	"net"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

// TestAcceptedConnectionsAreQuiet: package socket tests the effect.
func TestAcceptedConnectionsAreQuiet(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	cert := testkit.NewCertificate(t)
	for name, bare := range map[string]func(net.Conn) net.Conn{
		"without TLS": func(c net.Conn) net.Conn { return c.(*plainConn).Conn },
		"with TLS":    func(c net.Conn) net.Conn { return c.(*tls.Conn).NetConn() },
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			addr := l.Addr().String()
			if name == "with TLS" {
				if l, err = Encrypt(l, cert.CertFile, cert.KeyFile, log); err != nil {
					t.Fatal(err)
				}
			}
			defer l.Close()
			client, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			c, err := newConnections(l, 1, 1, log).Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, loud := bare(c).(*net.TCPConn); loud {
				t.Error("each of its system calls wakes the monitor of an idle process")
			}
		})
	}
}
