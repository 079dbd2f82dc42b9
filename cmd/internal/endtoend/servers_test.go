package endtoend_test

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/relay"
)

// failOver kills the primary and promotes its synchronous standby, while no call of the API is
// under way: the model knows no write of unknown outcome. The later ones find nothing to promote.
func (l *line) failOver() {
	l.t.Helper()
	if l.promoted {
		return
	}
	l.quiet.Lock()
	defer l.quiet.Unlock()
	l.promote()
	l.api.Reset() // the test also reads through the store, without the API's answers to errors
	testkit.Eventually(l.t, "the API to reach the new primary", func() (bool, error) {
		return l.reader().call(http.MethodGet, "/v1/posts/1/comments", "").status == http.StatusOK, nil
	})
}

// promote makes the standby the primary of every part, at any moment. The old primary dies, or
// freezes and thaws.
func (l *line) promote() {
	l.t.Helper()
	if l.rng.IntN(2) == 0 {
		l.db = l.pair.FailOver(l.t, l.db)
	} else {
		l.pair.Freeze(l.t)
		l.db = l.pair.Promote(l.t, l.db)
		defer l.pair.Thaw(l.t)
	}
	for _, link := range []*testkit.Proxy{l.toDB, l.own} {
		link.Redirect(host(l.t, l.db.URL))
	}
	l.system.Reset()
	l.promoted = true
	testkit.Eventually(l.t, "the test to reach the new primary", func() (bool, error) {
		err := l.system.Ping(l.t.Context())
		return err == nil, err
	})
}

// fullStreams lets the streams take no more bytes for a while, as on a full disk of NATS.
func (l *line) fullStreams() {
	l.t.Helper()
	limit := func(of func(*jetstream.StreamInfo) int64) {
		all := l.js.ListStreams(l.t.Context())
		for info := range all.Info() {
			if !strings.HasPrefix(info.Config.Name, l.nats.Config().Stream+"-") {
				continue
			}
			info.Config.MaxBytes = of(info)
			if _, err := l.js.UpdateStream(l.t.Context(), info.Config); err != nil {
				l.t.Fatal(err)
			}
		}
		if err := all.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
			l.t.Fatal(err)
		}
	}
	limit(func(info *jetstream.StreamInfo) int64 { return max(1, int64(info.State.Bytes)) })
	testkit.Eventually(l.t, "events that no stream takes", func() (waiting bool, err error) {
		err = l.system.QueryRow(l.t.Context(), `SELECT count(*) > 20 FROM outbox_messages WHERE processed_at IS NULL`).Scan(&waiting)
		return waiting || l.failed.Load(), err
	})
	limit(func(*jetstream.StreamInfo) int64 { return -1 })
}

// operators lets a consumer park events, and two operators retry all of them at once. Both also
// repair the streams. Meanwhile no call of the API is under way, because the model knows no parked
// events.
func (l *line) operators(name string) {
	l.t.Helper()
	if _, err := consumers.Pause(l.t.Context(), l.system, name, consumers.Paused{Actor: "test", Reason: "operators"}); err != nil {
		l.t.Fatal(err)
	}
	lag := func() (n int64, err error) {
		lags, err := consumers.Lag(l.t.Context(), l.system, l.js, l.nats.Config(), name)
		for _, lag := range lags {
			n += lag.Messages
		}
		return n, err
	}
	var before int64 // with the batches in hand, which will be applied
	testkit.Eventually(l.t, "the consumer to begin no more batches", func() (paused bool, err error) {
		running := func(p *part) bool { return testkit.Metric(l.t, p.reg, "tidings_consumer_paused") == 0 }
		paused = !slices.ContainsFunc(l.running[name], running)
		before, err = lag()
		return paused || l.failed.Load(), err
	})
	testkit.Eventually(l.t, "events that the consumer has not applied", func() (bool, error) {
		n, err := lag()
		return n > before+60 || l.failed.Load(), err
	})
	l.quiet.Lock()
	defer l.quiet.Unlock()
	l.refuse.Store(name)
	if _, err := consumers.Resume(l.t.Context(), l.system, name); err != nil {
		l.t.Fatal(err)
	}
	l.settle()
	l.refuse.Store("")
	d := consumers.NewDeadLetters(l.system, projection(name, l.kinds.Now))
	if n, err := d.Count(l.t.Context(), consumers.DeadLetterFilter{Consumer: name}); err != nil || n == 0 {
		l.t.Errorf("%d events are parked, %v", n, err)
	}
	var two sync.WaitGroup
	for range 2 {
		two.Go(func() { l.retryAll(d, name) })
		two.Go(func() {
			_, err := relay.Repair(l.t.Context(), l.system, l.nats.Config(), testkit.Logger(l.t), relay.RepairOptions{})
			if err != nil && !strings.Contains(err.Error(), "another repair or restore is running") {
				l.t.Errorf("repair: %v", err)
			}
		})
	}
	two.Wait()
}

// retryAll is one operator.
func (l *line) retryAll(d *consumers.DeadLetters, name string) {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		all, err := postgres.Collect(d.List(l.t.Context(), consumers.DeadLetterFilter{Consumer: name, First: true}, 10))
		if err != nil {
			l.t.Error(err)
			return
		}
		if len(all) == 0 {
			return
		}
		for _, letter := range all {
			_, err := d.Retry(l.t.Context(), consumers.DeadLetterRequest{ID: letter.ID, Actor: "test"})
			var notFirst *consumers.NotFirstError
			if err != nil && !errors.Is(err, consumers.ErrNotParked) && !errors.As(err, &notFirst) {
				l.t.Errorf("retry: %v", err)
				return
			}
		}
	}
	l.t.Error("the operators have not retried all after a minute")
}
