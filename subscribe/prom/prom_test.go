package prom

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestEachMetricOfAHandlerHasItsName(t *testing.T) {
	reg := prometheus.NewRegistry()
	s, err := settings.New("mailer", settings.Handle, []subscribe.Option{Metrics(reg)})
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.Registry.Handler("mailer-follow-created")
	if err != nil {
		t.Fatal(err)
	}
	for times, c := range []interface{ Inc() }{m.Handled, m.Failures, m.Foreign, m.Dead, m.Snapshots} {
		for range times + 1 {
			c.Inc()
		}
	}
	m.Lag.Set(6)
	if diff := cmp.Diff(map[string]float64{
		"tidings_subscriber_handled_total mailer-follow-created":      1,
		"tidings_subscriber_failures_total mailer-follow-created":     2,
		"tidings_subscriber_foreign_total mailer-follow-created":      3,
		"tidings_subscriber_dead_letters_total mailer-follow-created": 4,
		"tidings_subscriber_snapshots_total mailer-follow-created":    5,
		"tidings_subscriber_lag_messages mailer-follow-created":       6,
	}, testkit.Series(t, reg)); diff != "" {
		t.Error(diff)
	}
	if _, ok := s.Registry.(prometheus.Registerer); !ok {
		t.Error("a projection cannot register its metrics")
	}
	var already prometheus.AlreadyRegisteredError
	if _, err := s.Registry.Handler("mailer-follow-created"); !errors.As(err, &already) {
		t.Errorf("a second handler of the name in one registry: %v", err)
	}
}

func TestWithoutARegistryThereAreNoMetrics(t *testing.T) {
	s, err := settings.New("mailer", settings.Handle, []subscribe.Option{Metrics(nil)})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := s.Registry.Handler("mailer-follow-created"); err != nil || m.Lag != (settings.Unmeasured{}) {
		t.Errorf("%+v, %v", m, err)
	}
}
