package daemon

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/socket"
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
	return tls.NewListener(quietListener{l}, &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.current(), nil },
	}), nil
}

// quietListener returns quiet connections.
type quietListener struct{ net.Listener }

func (l quietListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return socket.Quiet(c), nil
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

// Expiry returns the time at which the first certificate of a chain expires; ok is false if there
// is no certificate. If the certificate cannot be read, at is the zero time. Each scrape of the
// metrics calls it, so it should be quick.
type Expiry func() (at time.Time, ok bool)

// FileExpiry returns the Expiry of the certificates in a PEM file. It reads the file at each call,
// so it notices renewals. An empty name means no certificate.
func FileExpiry(file string) Expiry {
	return func() (at time.Time, ok bool) {
		if file == "" {
			return at, false
		}
		rest, err := os.ReadFile(file)
		if err != nil {
			return at, true
		}
		for {
			var block *pem.Block
			if block, rest = pem.Decode(rest); block == nil {
				return at, true
			}
			if block.Type != "CERTIFICATE" {
				continue
			}
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return time.Time{}, true
			}
			if at.IsZero() || cert.NotAfter.Before(at) {
				at = cert.NotAfter
			}
		}
	}
}

type certificates struct {
	expiries map[string]Expiry
	desc     *prometheus.Desc
}

// NewCertificates returns a gauge of the time at which each certificate of the process expires. Its
// keys are the uses: api, nats, postgres, postgres_projections.
func NewCertificates(expiries map[string]Expiry) prometheus.Collector {
	return certificates{expiries, prometheus.NewDesc("tidings_tls_certificate_expires_timestamp_seconds",
		"The earliest expiry of any certificate in a chain that this process serves or presents, by use; 0 if a file cannot be read.",
		[]string{"use"}, nil)}
}

// Describe implements prometheus.Collector.
func (c certificates) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c certificates) Collect(ch chan<- prometheus.Metric) {
	for use, expiry := range c.expiries {
		at, ok := expiry()
		if !ok {
			continue
		}
		seconds := 0.0
		if !at.IsZero() {
			seconds = float64(at.Unix())
		}
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, seconds, use)
	}
}
