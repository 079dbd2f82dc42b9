package brokermetrics_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/brokermetrics"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestTheExpiryOfCredentialsIsAGauge expects the times of the file at each scrape, 0 for an
// unreadable file, and no expiry of credentials that have none.
func TestTheExpiryOfCredentialsIsAGauge(t *testing.T) {
	keys, p := broker.Keys{}, broker.Principal{Role: broker.Relay}
	if _, err := keys.Add([]broker.Principal{p}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "relay.creds")
	write := func(expires time.Duration) {
		t.Helper()
		creds, err := keys.Credentials(broker.Config{}, p, expires)
		if err == nil {
			err = os.WriteFile(file, creds, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	scrape := func(file string) map[string]float64 {
		t.Helper()
		reg := prometheus.NewRegistry()
		reg.MustRegister(brokermetrics.NewCredentials(file))
		return testkit.Series(t, reg)
	}
	const expires, issued = "tidings_nats_credentials_expires_timestamp_seconds", "tidings_nats_credentials_issued_timestamp_seconds"
	about := func(got float64, want time.Duration) bool {
		return (time.Until(time.Unix(int64(got), 0)) - want).Abs() < time.Minute
	}
	if got := scrape(file); len(got) != 2 || got[expires] != 0 || got[issued] != 0 {
		t.Errorf("without the file: %v", got)
	}
	for _, life := range []time.Duration{time.Hour, 1000 * time.Hour} {
		write(life)
		if got := scrape(file); len(got) != 2 || !about(got[expires], life) || !about(got[issued], 0) {
			t.Errorf("credentials for %s: %v", life, got)
		}
	}
	write(0)
	if got := scrape(file); len(got) != 1 || !about(got[issued], 0) {
		t.Errorf("credentials that never expire: %v", got)
	}
	if got := scrape(""); len(got) != 0 {
		t.Errorf("no credentials: %v", got)
	}
}
