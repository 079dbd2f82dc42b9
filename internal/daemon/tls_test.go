package daemon_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/testkit"
)

// hello sends one request on a new connection, and returns the protocol of the answer.
func hello(t *testing.T, addr string, config *tls.Config) (string, error) {
	t.Helper()
	c := http.Client{Transport: &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true, DisableKeepAlives: true},
		Timeout: time.Minute}
	resp, err := c.Get("https://" + addr)
	if err != nil {
		return "", err
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return "", err
	}
	return resp.Proto + " " + string(body), nil
}

func TestACertificateIsRenewedWithoutARestart(t *testing.T) {
	cert := testkit.NewCertificate(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	encrypted, err := daemon.Encrypt(l, cert.CertFile, cert.KeyFile, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
	go func() { ended <- daemon.Serve(ctx, encrypted, h, 100, slog.New(slog.DiscardHandler)) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	addr := l.Addr().String()

	first := cert.Pool(t)
	if got, err := hello(t, addr, &tls.Config{RootCAs: first}); got != "HTTP/2.0 hello" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := hello(t, addr, &tls.Config{RootCAs: first, MaxVersion: tls.VersionTLS11}); err == nil {
		t.Error("the server accepted TLS 1.1")
	}
	resp, err := http.Get("http://" + addr)
	if err == nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("plain HTTP is answered with %d", resp.StatusCode)
		}
	}

	// The new files are half written: the key does not belong to the certificate.
	good, err := os.ReadFile(cert.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	write(t, cert.KeyFile, good[:len(good)/2])
	if got, err := hello(t, addr, &tls.Config{RootCAs: first}); got != "HTTP/2.0 hello" {
		t.Errorf("while the new key is written: %q, %v", got, err)
	}
	cert.Renew(t)
	if got, err := hello(t, addr, &tls.Config{RootCAs: cert.Pool(t)}); got != "HTTP/2.0 hello" {
		t.Errorf("with the new certificate: %q, %v", got, err)
	}
	var unknown x509.UnknownAuthorityError
	if _, err := hello(t, addr, &tls.Config{RootCAs: first}); !errors.As(err, &unknown) {
		t.Errorf("the old one is still in use: %v", err)
	}
}

func write(t *testing.T, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestACertificateThatCannotBeReadIsAnErrorAtTheStart(t *testing.T) {
	cert := testkit.NewCertificate(t)
	write(t, cert.KeyFile, []byte("no key"))
	if _, err := daemon.Listen("127.0.0.1:0", cert.CertFile, cert.KeyFile, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("served")
	}
}
