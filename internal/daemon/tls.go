package daemon

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"
)

// Encrypt returns l with TLS 1.2 or newer, for HTTP/1.1 and HTTP/2. The certificate chain and the
// key are in two PEM files. Encrypt reads them again when they change, so a certificate is renewed
// without a restart: new connections get the new one. If the files cannot be read then (half
// written, for example), it logs that and keeps the last good certificate. It returns an error if
// they cannot be read at the start.
func Encrypt(l net.Listener, certFile, keyFile string, log *slog.Logger) (net.Listener, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile, log: log}
	if err := c.load(); err != nil {
		return nil, err
	}
	return tls.NewListener(l, &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.current(), nil },
	}), nil
}

// certificate is the last good content of the two files.
type certificate struct {
	certFile, keyFile string
	log               *slog.Logger

	mu     sync.Mutex
	loaded *tls.Certificate
	seen   [2]time.Time // the modification times of the files that were read
	failed string       // the error of the last attempt, logged once
}

func (c *certificate) load() error {
	var seen [2]time.Time // read before the files: a change meanwhile causes another read
	for i, name := range []string{c.certFile, c.keyFile} {
		info, err := os.Stat(name)
		if err != nil {
			return fmt.Errorf("read the certificate: %w", err)
		}
		seen[i] = info.ModTime()
	}
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("read the certificate %s with the key %s: %w", c.certFile, c.keyFile, err)
	}
	c.loaded, c.seen, c.failed = &pair, seen, ""
	return nil
}

// current returns the certificate in use. It costs two calls of stat for each handshake.
func (c *certificate) current() *tls.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.changed() {
		return c.loaded
	}
	switch err := c.load(); {
	case err == nil:
		c.log.Info("loaded a new TLS certificate", "file", c.certFile)
	case err.Error() != c.failed:
		c.failed = err.Error()
		c.log.Error("the new TLS certificate is unusable: the previous one stays in use", "err", err, "runbook", "CertificateExpires")
	}
	return c.loaded
}

func (c *certificate) changed() bool {
	for i, name := range []string{c.certFile, c.keyFile} {
		if info, err := os.Stat(name); err == nil && !info.ModTime().Equal(c.seen[i]) {
			return true
		}
	}
	return false
}
