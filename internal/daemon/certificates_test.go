package daemon_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/testkit"
)

// TestTheExpiryOfCertificatesIsAGauge expects the first expiry of a chain, 0 for an unreadable
// file, and no value without a file.
func TestTheExpiryOfCertificatesIsAGauge(t *testing.T) {
	soon, later := testkit.NewCertificate(t), testkit.NewCertificate(t)
	later.RenewUntil(t, time.Now().Add(1000*time.Hour))
	var chain []byte
	for _, file := range []string{later.KeyFile, later.CertFile, soon.CertFile} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		chain = append(chain, b...)
	}
	dir := t.TempDir()
	chainFile, damaged := filepath.Join(dir, "chain.pem"), filepath.Join(dir, "damaged.pem")
	if err := os.WriteFile(chainFile, chain, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(damaged, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := daemon.NewCertificates(map[string]daemon.Expiry{
		"chain": daemon.FileExpiry(chainFile), "later": daemon.FileExpiry(later.CertFile), "gone": daemon.FileExpiry(dir + "/none"),
		"damaged": daemon.FileExpiry(damaged), "none": daemon.FileExpiry(""),
	})
	reg := prometheus.NewRegistry()
	reg.MustRegister(c)
	in := func() map[string]time.Duration {
		t.Helper()
		families, err := reg.Gather()
		if err != nil || len(families) != 1 {
			t.Fatalf("%d families, %v", len(families), err)
		}
		all := make(map[string]time.Duration)
		for _, m := range families[0].Metric {
			seconds := m.GetGauge().GetValue()
			all[m.GetLabel()[0].GetValue()] = time.Until(time.Unix(int64(seconds), 0)).Round(time.Hour)
			if seconds == 0 {
				all[m.GetLabel()[0].GetValue()] = 0
			}
		}
		return all
	}
	if got := in(); len(got) != 4 || got["chain"] != time.Hour || got["later"] != 1000*time.Hour ||
		got["gone"] != 0 || got["damaged"] != 0 {
		t.Errorf("got %v", got)
	}
	later.RenewUntil(t, time.Now().Add(2000*time.Hour))
	if got := in()["later"]; got != 2000*time.Hour {
		t.Errorf("a renewed certificate: %s", got)
	}
}
