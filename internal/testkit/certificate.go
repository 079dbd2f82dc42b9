package testkit

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Certificate is a certificate for 127.0.0.1 and its key, as PEM files. It is self-signed, so its
// file is also the authority that verifies it. Clients and servers can use it.
type Certificate struct{ CertFile, KeyFile string }

// NewCertificate creates a certificate in a new directory.
func NewCertificate(t testing.TB) Certificate {
	t.Helper()
	dir := t.TempDir()
	c := Certificate{CertFile: filepath.Join(dir, "cert.pem"), KeyFile: filepath.Join(dir, "key.pem")}
	c.Renew(t)
	return c
}

// Renew replaces both files by a new pair that is valid for an hour.
func (c Certificate) Renew(t testing.TB) { t.Helper(); c.RenewUntil(t, time.Now().Add(time.Hour)) }

// RenewUntil is Renew with a time of expiry.
func (c Certificate) RenewUntil(t testing.TB, expires time.Time) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, "create a key", err)
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	check(t, "create a serial number", err)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "tidings test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: expires, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	check(t, "create a certificate", err)
	der, err := x509.MarshalECPrivateKey(key)
	check(t, "encode the key", err)
	check(t, "write the key", os.WriteFile(c.KeyFile, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600))
	check(t, "write the certificate", os.WriteFile(c.CertFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o600))
}

// Pool returns the authority that verifies the certificate.
func (c Certificate) Pool(t testing.TB) *x509.CertPool {
	t.Helper()
	b, err := os.ReadFile(c.CertFile)
	check(t, "read the certificate", err)
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		t.Fatal("the certificate is not PEM")
	}
	return pool
}
