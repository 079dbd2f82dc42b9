package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestStagesStopInOrder(t *testing.T) {
	var order []string // only one part at a time may append; otherwise -race fails
	p := func(name string) Part {
		return Part{name, func(ctx context.Context) error {
			<-ctx.Done()
			order = append(order, name)
			return nil
		}}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := RunStages(ctx, []Part{p("api")}, []Part{p("consumers")}, []Part{p("relay")}); err != nil {
		t.Error(err)
	}
	if want := []string{"api", "consumers", "relay"}; !slices.Equal(order, want) {
		t.Errorf("stopped in the order %v, want %v", order, want)
	}
}

func TestStagesStopWhenAPartEnds(t *testing.T) {
	broken := errors.New("broken")
	for name, result := range map[string]error{"with an error": broken, "by itself": nil} {
		t.Run(name, func(t *testing.T) {
			stopped := false
			err := RunStages(t.Context(),
				[]Part{{"other", func(ctx context.Context) error { <-ctx.Done(); stopped = true; return nil }}},
				[]Part{{"relay", func(context.Context) error { return result }}})
			if !stopped || err == nil || !strings.HasPrefix(err.Error(), "relay: ") || result != nil && !errors.Is(err, result) {
				t.Errorf("error %v, other part stopped: %t", err, stopped)
			}
		})
	}
}

// A prober may ask between the start of the ops port and the start of a part.
func TestAProcessIsNotReadyBeforeAllItsPartsAre(t *testing.T) {
	ops := NewOps("relay", "127.0.0.1:0", prometheus.NewRegistry(), slog.Default())
	ready := func(_ context.Context, h Host) error { h.Ready(nil); return nil }
	stage := ops.stage("relay", slog.Default(), []Run{ready, ready})
	for started, want := range []int{http.StatusServiceUnavailable, http.StatusServiceUnavailable, http.StatusOK} {
		w := httptest.NewRecorder()
		ops.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", http.NoBody))
		if w.Code != want {
			t.Errorf("after the start of %d of 2 parts: %d %s, want %d", started, w.Code, w.Body, want)
		}
		if started < len(stage) {
			if err := stage[started].Run(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
}
