package projector

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// TestALateFunctionFreesItsTransaction calls a function that returns too late, as Retry of dead
// letters and several partitions may: nobody may read that it was stuck, or only once.
func TestALateFunctionFreesItsTransaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := newProjection(&settings.Settings{Timeout: time.Second}, func(context.Context, pgx.Tx, []event.Event) error {
			<-time.After(time.Hour)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if err := p.Apply(ctx, nil, make([]event.Event, 1)); err != nil {
				t.Error(err)
			}
			cancel()
		}
	})
}
