package postgres_test

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// encrypting listens in front of the server at addr and speaks TLS with clients, as PostgreSQL does
// with ssl = on.
func encrypting(t *testing.T, addr string, cert testkit.Certificate) string {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(cert.CertFile, cert.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait)
	t.Cleanup(func() { l.Close() })
	serve := func(client net.Conn) {
		defer client.Close()
		var request [8]byte // an SSLRequest: a length and a code; the answer is one letter
		if _, err := io.ReadFull(client, request[:]); err != nil || request[4] != 4 || request[5] != 210 {
			return
		}
		if _, err := client.Write([]byte{'S'}); err != nil {
			return
		}
		encrypted := tls.Server(client, &tls.Config{Certificates: []tls.Certificate{pair}})
		server, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		defer server.Close()
		serving.Go(func() {
			_, _ = io.Copy(encrypted, server)
			encrypted.Close()
		})
		_, _ = io.Copy(server, encrypted)
	}
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				serving.Go(func() { serve(c) })
			}
		}
	})
	return l.Addr().String()
}

func TestTheConnectionStringAsksForTLSAndForTheServersCertificate(t *testing.T) {
	db := testkit.Postgres(t)
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	cert, other := testkit.NewCertificate(t), testkit.NewCertificate(t)
	u.Host = encrypting(t, u.Host, cert)
	for _, c := range []struct {
		name, mode, root string
		ok               bool
	}{
		{"the server's authority", "verify-full", cert.CertFile, true},
		{"another authority", "verify-full", other.CertFile, false},
	} {
		q := url.Values{"sslmode": {c.mode}, "sslrootcert": {c.root}}
		u.RawQuery = q.Encode()
		pool, err := postgres.Open(t.Context(), u.String(), postgres.Config{MaxConns: 2, ConnectTimeout: 1e10}, postgres.RoleSystem, "test")
		if err != nil {
			t.Fatal(err)
		}
		if err := pool.Ping(t.Context()); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
		pool.Close()
	}
}

func TestTheExpiryOfAClientCertificateIsKnown(t *testing.T) {
	cert := testkit.NewCertificate(t)
	until := time.Now().Add(50 * time.Hour).Truncate(time.Second)
	cert.RenewUntil(t, until)
	for query, want := range map[string]bool{"?sslmode=require&sslcert=" + url.QueryEscape(cert.CertFile) + "&sslkey=" +
		url.QueryEscape(cert.KeyFile): true, "?sslmode=require": false, "?sslmode=disable": false} {
		pool, err := postgres.Open(t.Context(), "postgres://u@127.0.0.1:1/x"+query,
			postgres.Config{MaxConns: 2, ConnectTimeout: time.Second}, postgres.RoleAPI, "test")
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		if at, ok := postgres.CertificateExpiry(pool)(); ok != want || want && !at.Equal(until) {
			t.Errorf("%s: %s, %t", query, at, ok)
		}
	}
}
