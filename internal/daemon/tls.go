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

// Encrypt returns l with TLS 1.2 or newer, for HTTP/1.1 and HTTP/2, with the certificate chain and the key of two PEM files. They
// are read again when they change, so a certificate is renewed without a restart: new connections get the new one. Files
// that cannot be read then, half written for example, leave the last good certificate in use and are logged. It fails when
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

// certificate is what two files held when they were last good.
type certificate struct {
	certFile, keyFile string
	log               *slog.Logger

	mu     sync.Mutex
	loaded *tls.Certificate
	seen   [2]time.Time // when the files had changed
	failed string       // why the last try failed, which is logged once
}

func (c *certificate) load() error {
	var seen [2]time.Time // looked at first: what changes while it is read is read again
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

// current costs two looks at the file system per handshake.
func (c *certificate) current() *tls.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.changed() {
		return c.loaded
	}
	switch err := c.load(); {
	case err == nil:
		c.log.Info("took a new TLS certificate", "file", c.certFile)
	case err.Error() != c.failed:
		c.failed = err.Error()
		c.log.Error("the new TLS certificate cannot be used, the last one stays", "err", err, "runbook", "CertificateExpires")
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
