package subscribe_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

func noClear(context.Context, pgx.Tx) error { return nil }

func noErased(context.Context, pgx.Tx, int64, event.ID) error { return nil }

// TestBootstrapWithoutAllItsPartsIsRefused: without Erased, persons whom the exports include and an
// erasure removes would stay.
func TestBootstrapWithoutAllItsPartsIsRefused(t *testing.T) {
	handlers, projections := offline(t)
	c, err := client.New("http://127.0.0.1:1", client.WithToken("t"))
	if err != nil {
		t.Fatal(err)
	}
	for what, opts := range map[string][]subscribe.Option{
		"no Erased": {projector.Bootstrap(noClear, c)},
		"no client": {projector.Bootstrap(noClear), projector.Erased(noErased)},
		"nil":       {projector.Bootstrap(noClear, nil), projector.Erased(noErased)},
		"no clear":  {projector.Bootstrap(nil, c), projector.Erased(noErased)},
	} {
		for _, name := range []string{"Project", "DeadLetters"} {
			if err := projections[name](opts...); !errors.Is(err, subscribe.ErrOption) {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
	}
	whole := []subscribe.Option{projector.Bootstrap(noClear, c), projector.Erased(noErased)}
	for _, name := range []string{"Project", "DeadLetters"} {
		if err := projections[name](whole...); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := handlers["Handle"](whole[1]); !errors.Is(err, subscribe.ErrOption) {
		t.Errorf("Handle: %v", err)
	}
}

// TestAProjectionHearsOfErasedPersonsInTheirPlace has an erased person between events of one batch,
// of a projection that asks for follows alone.
func TestAProjectionHearsOfErasedPersonsInTheirPlace(t *testing.T) {
	r := newRig(t, 1)
	pool := r.logged()
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	erased := func(person event.ID) event.Event {
		payload, err := json.Marshal(event.PersonErased{PersonID: person, RequestedAt: event.Time{Time: time.Now()}})
		if err != nil {
			t.Fatal(err)
		}
		return event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregatePerson, AggregateID: "3", Type: event.Erased,
			Version: 1, OccurredAt: time.Now(), Payload: payload}
	}
	r.publish(erased("9"), follow("1", "2", 1), follow("1", "2", 2), erased("1"), follow("3", "4", 1))
	var mu sync.Mutex
	var got []string
	p := r.start(func(ctx context.Context) error {
		return projector.Project(ctx, r.nc, pool, "search", func(_ context.Context, _ pgx.Tx, batch []event.Event) error {
			mu.Lock()
			defer mu.Unlock()
			for i := range batch {
				got = append(got, batch[i].AggregateType+" "+string(batch[i].AggregateID))
			}
			return nil
		}, subscribe.Only("follow"), subscribe.Log(testkit.Logger(t)),
			projector.Erased(func(_ context.Context, _ pgx.Tx, tenant int64, person event.ID) error {
				mu.Lock()
				defer mu.Unlock()
				got = append(got, "person "+string(person))
				return nil
			}))
	})
	r.await("the events", func() (bool, error) {
		mu.Lock()
		defer mu.Unlock()
		return len(got) >= 5, nil
	})
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	if want := []string{"person 9", "follow 2", "follow 2", "person 1", "follow 4"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestAFunctionThatNeverReturnsFromStatesIsReported: states of an export come before the events.
func TestAFunctionThatNeverReturnsFromStatesIsReported(t *testing.T) {
	x := newExporting(t, 1)
	pool := x.logged()
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	x.write(1)
	never := make(chan struct{})
	p := x.start(func(ctx context.Context) error {
		return projector.Project(ctx, x.nc, pool, "search", func(context.Context, pgx.Tx, []event.Event) error {
			<-never
			return errors.New("too late")
		}, subscribe.Only("follow"), subscribe.Timeout(100*time.Millisecond), subscribe.Log(testkit.Logger(t)),
			projector.Bootstrap(noClear, x.client), projector.Erased(noErased))
	})
	t.Cleanup(func() { close(never) }) // before the stop of p
	x.await("the end of Project", func() (bool, error) {
		select {
		case <-p.done:
			return true, nil
		default:
			return false, nil
		}
	})
	if err := p.stop(); !errors.Is(err, subscribe.ErrStuck) {
		t.Errorf("a function that never returns: %v, want ErrStuck", err)
	}
}

// TestAReplayEndsABootstrap: the tables are empty, so its states would be missing.
func TestAReplayEndsABootstrap(t *testing.T) {
	r := newRig(t, 1)
	pool := r.logged()
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `INSERT INTO consumer_bootstraps (consumer_name, tenant, kind, after)
		VALUES ('search', 0, '', ''), ('search', 1, 'follow', '7'), ('other', 0, '', '')`); err != nil {
		t.Fatal(err)
	}
	if err := projector.Replay(t.Context(), pool, "search", noClear); err != nil {
		t.Fatal(err)
	}
	var left string
	if err := pool.QueryRow(t.Context(), `SELECT string_agg(consumer_name, ',') FROM consumer_bootstraps`).Scan(&left); err != nil ||
		left != "other" {
		t.Errorf("left are %q, %v", left, err)
	}
}
