package daemon

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
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
