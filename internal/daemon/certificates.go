package daemon

import (
	"crypto/x509"
	"encoding/pem"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

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
